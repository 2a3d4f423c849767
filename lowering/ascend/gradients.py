"""Gradients on an Ascend NPU: the emitted kernels of the adjoint, and what stands in front of the recurrence.

The kernels give the gradients of q, k and gates for every value head, in the chunks that their plan is for; norms, gate
functions and sigmoid of beta are element-wise operators in front of them (``prepare.py``), which torch differentiates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..adjoint import Gradients
from ..calls import RECURRENT, Call
from ..operands import given, operands
from ..scratch import Scratch
from .emit import CHUNK, adjoint_module
from .kernel import SUB_CHUNK
from .launch import (
    Launcher,
    buffers_of,
    column_tile,
    decline,
    launch_chunks,
    levels,
    padded_call,
    tables_of,
    turned_gates,
)
from .prepare import prepare, single

_WIDEST = 128  # keys or values: the epilogue holds all columns of a chunk


def declines(call: Call) -> str | None:
    """Why the emitted kernels do not give the gradients of a call."""
    if reason := decline(call.q.shape[-1], call.v.shape[-1], call.compute_dtype):
        return reason
    if max(call.q.shape[-1], call.v.shape[-1]) > _WIDEST:
        return f"gradients of more than {_WIDEST} keys or values a head"
    if call.gate == "channel" and call.delta and call.compute_dtype is torch.float32:
        return "KDA's gradients of 16-bit operands only"  # in fp32 ascendnpu-ir 1.2.0 waits for a flag that nobody sets
    return None


def gradients(
    call: Call,
    grad_o: Tensor | None,
    grad_state: Tensor | None,
    *,
    cores: int,
    launch: Launcher,
    scratch: Scratch | None = None,
) -> Gradients:
    """Those of a call's tensors, see :class:`~kdacompile.lowering.adjoint.GradientKernels`."""
    names = [name for name in given(call) if name != "cu_seqlens"]

    def prepared(*values: Tensor) -> tuple[Tensor, ...]:
        made = single(prepare(replace(call, **dict(zip(names, values, strict=True)))))
        return tuple(x for x in made.recurrent if x is not None)

    values, pull_back, *_ = torch.func.vjp(prepared, *(getattr(call, name) for name in names))
    with torch.no_grad():
        applied: dict[str, Any] = {"A_log": None, "dt_bias": None, "gate_fn": "log", "sigmoid_beta": False}
        present = [name for name in RECURRENT if getattr(call, name) is not None]
        inputs = dict(zip(present, values, strict=True))
        plain = replace(call, **inputs, **applied, qk_l2norm_eps=0.0)
        found = run_gradients(plain, grad_o, grad_state, cores=cores, launch=launch, scratch=scratch)
        pulled = dict(zip(names, pull_back(tuple(found[name] for name in present)), strict=True))
    return tuple(pulled[o.name].contiguous() if o.name in pulled else None for o in operands(Call))


def run_gradients(
    call: Call,
    grad_o: Tensor | None,
    grad_state: Tensor | None,
    *,
    cores: int,
    launch: Launcher,
    scratch: Scratch | None = None,
) -> dict[str, Tensor]:
    """Gradients of the operands of a prepared call (as of :func:`~.launch.run_chunks`), by name, in their dtypes."""
    if (wide := padded_call(call)) is not None:
        more_keys, more = wide.q.shape[-1] - call.q.shape[-1], wide.v.shape[-1] - call.v.shape[-1]
        grad_o = None if grad_o is None else pad(grad_o, (0, more))
        grad_state = None if grad_state is None else pad(grad_state, (0, more, 0, more_keys))
        found = run_gradients(wide, grad_o, grad_state, cores=cores, launch=launch, scratch=scratch)
        return {name: _narrowed(name, x, call) for name, x in found.items()}
    batch, length, heads, width = call.q.shape
    value_heads, columns = call.v.shape[2:]
    if call.delta and call.beta is None:  # its own kernels would have no room in UB
        ones = call.v.new_ones((batch, length, value_heads), dtype=torch.float32)
        found = run_gradients(replace(call, beta=ones), grad_o, grad_state, cores=cores, launch=launch, scratch=scratch)
        return {name: x for name, x in found.items() if name != "beta"}
    tables = tables_of(call.cu_seqlens, batch, length, CHUNK, call.q.device)
    chunks, sequences = tables["chunks"].numel() // 2, tables["first_chunk"].numel() - 1
    module = adjoint_module(call.gate, call.delta, call.beta is not None)
    constants = {
        "H": heads, "HV": value_heads, "C": CHUNK, "K": width, "V": columns,
        "BV": column_tile(width, columns), "R": SUB_CHUNK, "LEVELS": levels(CHUNK),
        "DELTA": int(call.delta),
    }  # fmt: skip
    results = _results(call, sequences)
    ends = {"initial_state_ptr": call.initial_state, "grad_final_state_ptr": grad_state}
    if call.delta and call.gate == "none":  # what begins at 0 and decays by nothing the compiler sums up on Cube
        ends = {
            name: torch.zeros_like(results["grad_initial_state_ptr"]) if x is None else x for name, x in ends.items()
        }
    values: dict[str, Any] = {
        **{f"{name}_ptr": getattr(call, name).contiguous() for name in ("q", "k", "v")},
        "grad_o_ptr": torch.zeros_like(call.v) if grad_o is None else grad_o.to(call.v.dtype).contiguous(),
        **{name: None if x is None else x.float().contiguous() for name, x in ends.items()},
        **results,
        "final_state_ptr": results["grad_initial_state_ptr"],  # the gradient comes later, and is what stays
        "scale": call.scale,
        "tokens": batch * length,
        **tables,
        **turned_gates(call.g, call.beta, call.gate, batch, length),
    }
    tiles = chunks * value_heads
    values |= buffers_of(module, constants, tiles, cores, call.v, scratch or Scratch())
    for kernel in module.kernels:
        start = ends["grad_final_state_ptr" if kernel.name == "reverse" else "initial_state_ptr"]
        sizes = {**constants, "INITIAL": int(start is not None)}
        present = {name: results["grad_initial_state_ptr"] if x is None else x for name, x in values.items()}
        launch_chunks(module, kernel, tiles, sequences * value_heads, present, sizes, cores, launch)
    return _gathered(call, results)


def _results(call: Call, sequences: int) -> dict[str, Tensor]:
    """Uninitialised, as the kernels write them: for every value head, those of gates along tokens."""
    batch, length, _, width = call.q.shape
    heads, columns = call.v.shape[2:]
    tokens = batch * length
    made = {
        "q": call.q.new_empty(batch, length, heads, width),
        "k": call.k.new_empty(batch, length, heads, width),
        "v": call.v.new_empty(batch, length, heads, columns),
        "initial_state": call.v.new_empty((sequences, heads, width, columns), dtype=torch.float32),
    }
    for name in ("g", "beta"):
        if (x := getattr(call, name)) is not None:
            shape = (batch, length, heads, width) if x.dim() == 4 else (heads, tokens)
            made[name] = call.v.new_empty(shape, dtype=torch.float32)
    return {f"grad_{name}_ptr": x for name, x in made.items()}


def _gathered(call: Call, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What belongs to the operands as they are: groups of heads and shared gates summed, gates by token."""
    batch, length, heads, _ = call.q.shape
    found: dict[str, Tensor] = {}
    for name in RECURRENT:
        x, given = results.get(f"grad_{name}_ptr"), getattr(call, name)
        if x is None or given is None:
            continue
        if name in ("q", "k") and x.shape != given.shape:
            x = x.unflatten(2, (heads, -1)).float().sum(3)
        elif name in ("g", "beta") and x.dim() == 2:
            x = x.t().unflatten(0, (batch, length))
            x = x.sum((0, 1)) if given.dim() == 1 else x
        found[name] = x.to(given.dtype)
    return found


def _narrowed(name: str, x: Tensor, call: Call) -> Tensor:
    """The columns and rows that an operand of the call has."""
    keys, values = call.q.shape[-1], call.v.shape[-1]
    if name == "initial_state":
        return x[..., :keys, :values]
    if name in ("g", "beta") and x.dim() < 4:
        return x
    return x[..., : values if name == "v" else keys]
