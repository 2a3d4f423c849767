"""Running emitted modules: tables, buffers and grids. Who compiles and launches a kernel is the caller's affair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..errors import ArgumentError
from ..ir import Dim
from ..scratch import Scratch
from ..stages import evaluate, size
from .emit import CHUNK, FIRST, chunk_module
from .kernel import SUB_CHUNK, Domain, Kernel, Kind, Module
from .step import step_module

LEVELS = (CHUNK // SUB_CHUNK).bit_length() - 1
_MOST_STATE = 128 * 128  # elements of the state that two Vec cores hold between them, with what they need beside it
_WIDEST_TOKEN_GATE = 128  # keys wider than this leave the one kernel that does a chunk with a gate per token no room
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: a one-dimensional grid, the run-time arguments and the constexpr ones, by name."""

    module: Module
    kernel: Kernel
    grid: int
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, int]


Launcher = Callable[[Launch], None]


def decline(width: int, columns: int, dtype: torch.dtype) -> str:
    """Why the emitted kernels do not take keys of ``width``, values of ``columns`` or operands of ``dtype``, or ''."""
    for name, n, most in (("K", width, 256), ("V", columns, 1 << 15)):
        if n & (n - 1) or not SUB_CHUNK <= n <= most:
            return f"{name} = {n} is not a power of two from {SUB_CHUNK} to {most}"
    if dtype not in _DTYPES:
        return f"no {dtype} kernels"
    return ""


def _check(call: Call) -> None:
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        raise ArgumentError(f"q, k and v have one dtype, got {call.q.dtype}, {call.k.dtype} and {call.v.dtype}")
    if reason := decline(call.q.shape[-1], call.v.shape[-1], call.q.dtype):
        raise ArgumentError(reason)


def target_of_arch(arch: str) -> str:
    """The target to plan for on a device as triton-ascend names it: Ascend910B3, Ascend910_9391, Ascend910_9599."""
    return "ascend910_95" if arch.startswith("Ascend910_95") else FIRST


def column_tile(width: int, columns: int, *, alone: bool = False) -> int:
    """How many columns of the state [K, V] one task holds; ``alone``: on one Vec core, without a Cube core's pair."""
    return min(columns, _MOST_STATE // width // (2 if alone else 1), 64 if alone else 128)


def run_chunks(
    call: Call,
    *,
    cores: int,
    launch: Launcher,
    outputs: str = "auto",
    narrow_update: bool = False,
    scratch: Scratch | None = None,
    target: str = FIRST,
) -> tuple[Tensor, Tensor]:
    """Linear attention over whole sequences.

    The call is prepared: q, k and v have one dtype, which is that of o; log gates, beta as it is used and the initial
    state are float32, q and k normalised. ``cores``: how many Cube cores the device has; ``target``: what its kernels
    are planned for. Returns o ``[B, T, HV, V]`` and the final state in float32. Raises :class:`ArgumentError` where
    :func:`decline` has a reason.
    """
    _check(call)
    q, v, g, gate = call.q, call.v, call.g, call.gate
    batch, length, heads, width = q.shape
    value_heads, columns = v.shape[2:]
    bounds = _bounds(call.cu_seqlens, batch, length)
    tables = _tables(bounds, q.device)
    chunks = int(tables["chunks"].numel()) // 2
    if g is not None and gate != "channel" and width > _WIDEST_TOKEN_GATE:
        g = (g if gate == "token" else g.expand(batch, length, -1)).unsqueeze(-1).expand(-1, -1, -1, width)
        gate = "channel"
    row = (gate, call.delta, call.beta is not None)
    module = chunk_module(*row, outputs=outputs, narrow_update=narrow_update, target=target)
    tile = column_tile(width, columns)
    constants = {"H": heads, "HV": value_heads, "C": CHUNK, "K": width, "V": columns, "BV": tile, "R": SUB_CHUNK}
    constants |= {"LEVELS": LEVELS, "DELTA": int(call.delta), "INITIAL": int(call.initial_state is not None)}
    o = torch.empty(batch, length, value_heads, columns, dtype=v.dtype, device=v.device)
    state = torch.empty(len(bounds) - 1, value_heads, width, columns, dtype=torch.float32, device=v.device)
    values: dict[str, Any] = {
        **_common(call, o, state),
        "tokens": batch * length,
        **tables,
        **_gates(g, call.beta, gate, batch, length),
    }
    tiles = chunks * value_heads
    values |= _buffers(module, constants, tiles, cores, v, scratch or Scratch())
    for kernel in module.kernels:
        block = tile if kernel.cube else column_tile(width, columns, alone=True)
        count = {
            Domain.SUB_CHUNKS: tiles * (CHUNK // SUB_CHUNK),
            Domain.CHUNKS: tiles,
            Domain.CHUNK_COLUMNS: tiles * (columns // block),
            Domain.LANE_COLUMNS: state.shape[0] * value_heads * (columns // block),
        }[kernel.domain]
        _launch(module, kernel, count, values, {**constants, "BV": block}, cores, launch)
    return o, state


def _buffers(
    module: Module, constants: Mapping[str, int], tiles: int, cores: int, like: Tensor, scratch: Scratch
) -> dict[str, Tensor]:
    """What lies between the kernels, by pointer name: a place for every tile (chunk and head), or for every core."""
    found: dict[str, Tensor] = {}
    for buffer in module.scratch:
        rows, cols = (_elements(dim, tuple(constants.items())) for dim in buffer.shape)
        if buffer.per_core and buffer.shape[1] == "V":
            cols = constants["BV"]
        dtype = like.dtype if buffer.kind is Kind.IO else torch.float32
        count = (cores if buffer.per_core else tiles) * rows * cols
        found[f"{buffer.name}_ptr"] = scratch.empty((count,), dtype, like.device)
    return found


def _common(call: Call, o: Tensor, final_state: Tensor) -> dict[str, Any]:
    """What kernels over whole sequences and of a step are both given."""
    initial = call.initial_state
    return {
        "q_ptr": call.q.contiguous(),
        "k_ptr": call.k.contiguous(),
        "v_ptr": call.v.contiguous(),
        "o_ptr": o,
        "initial_state_ptr": final_state if initial is None else initial.contiguous(),
        "final_state_ptr": final_state,
        "scale": call.scale,
    }


def run_step(call: Call, *, cores: int, launch: Launcher, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token: a call as :func:`run_chunks` takes it, T = 1. ``out`` may be the initial state, which is updated."""
    _check(call)
    batch, _, heads, width = call.q.shape
    value_heads, columns = call.v.shape[2:]
    tile = column_tile(width, columns, alone=True)
    module = step_module(call.gate, call.delta, call.beta is not None)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    if out is None:
        out = torch.empty(batch, value_heads, width, columns, dtype=torch.float32, device=call.v.device)
    g = call.g.expand(batch, 1, value_heads) if call.g is not None and call.gate == "head" else call.g
    values = _common(call, o, out)
    values |= {f"{name}_ptr": x.contiguous() for name, x in (("g", g), ("beta", call.beta)) if x is not None}
    initial = int(call.initial_state is not None)
    constants = {"H": heads, "HV": value_heads, "K": width, "V": columns, "BV": tile, "INITIAL": initial}
    count = batch * value_heads * (columns // tile)
    _launch(module, module.kernels[0], count, values, constants, cores, launch)
    return o, out


def _launch(
    module: Module,
    kernel: Kernel,
    tasks: int,
    values: Mapping[str, Any],
    constants: Mapping[str, int],
    cores: int,
    launch: Launcher,
) -> None:
    """Launch on as many cores as there is work for; a kernel without products runs on the Vec cores, two a group."""
    if not tasks:
        return
    values = {**values, "tasks": tasks}
    spare = values["q_ptr"]  # stands for what the row does not have and the kernel does not read
    arguments = {a.name: values.get(a.name, spare) for a in kernel.arguments}
    grid = min(tasks, cores if kernel.cube else 2 * cores)
    launch(Launch(module, kernel, grid, arguments, {name: constants[name] for name in kernel.constants}))


def _bounds(cu_seqlens: Tensor | None, batch: int, length: int) -> list[int]:
    """The bounds of the sequences in the tensors with batch and tokens taken as one; equal ones need no table."""
    if cu_seqlens is None:
        return [i * length for i in range(batch + 1)]
    return [int(n) for n in cu_seqlens.tolist()]


def _tables(bounds: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Bounds of sequences; first token, and tokens to the sequence's end, of every chunk; first chunk of every one."""
    chunks: list[int] = []
    first = [0]
    for start, end in pairwise(bounds):
        for token in range(start, end, CHUNK):
            chunks += [token, end - token]
        first.append(len(chunks) // 2)

    def table(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return {"cu_seqlens": table(bounds), "chunks": table(chunks), "first_chunk": table(first)}


def _gates(g: Tensor | None, beta: Tensor | None, gate: str, batch: int, length: int) -> dict[str, Tensor]:
    """Gates per token as [HV, tokens]: loads along tokens with a stride are many times slower than these copies."""
    turned: dict[str, Tensor] = {}
    if g is not None and gate == "head":
        g = g.expand(batch, length, -1)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            turned[f"{name}_ptr"] = x.contiguous() if x.dim() == 4 else x.flatten(0, 1).t().contiguous()
    return turned


@cache
def _elements(dim: Dim, constants: tuple[tuple[str, int], ...]) -> int:
    return evaluate(size(dim), dict(constants))
