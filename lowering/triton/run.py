"""Launching emitted kernels: the portable CUDA implementation of the family."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..ahead import compile_ahead
from ..calls import Call
from ..gates import GATE_FUNCTIONS
from ..scratch import Scratch
from .configs import Config, choose, padded, step_columns
from .device import device_of, on, precision, synchronous, unsupported
from .kernels import chunk_source
from .load import load_source
from .placement import place
from .step import step_source
from .variant import Variant

MAX_WIDTH = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXPONENT_LIMIT = 80.0  # exp of it, times a normalised key, is finite in fp32 and in bf16; see decays.py


class TritonKernels:
    """:class:`kdacompile.lowering.calls.Implementation`: every row, every shape up to K = V = 256, any strides."""

    name = "triton"

    def declines(self, call: Call) -> str | None:
        if reason := unsupported(call.q):
            return reason
        if call.compute_dtype not in _DTYPES:
            return f"no {call.compute_dtype} kernels"
        if call.gate_fn not in GATE_FUNCTIONS:
            return f"no kernels with the gate function {call.gate_fn!r}"
        if max(call.q.shape[3], call.v.shape[3]) > MAX_WIDTH:
            return f"K or V above {MAX_WIDTH}"
        return None

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        scratch = scratch or Scratch()
        compile_ahead(lambda ahead: run_chunks(call, ahead), scratch)
        return run_chunks(call, scratch)

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        return run_step(call, state, scratch or Scratch())


def run_chunks(call: Call, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """The kernels of a call, in the order of its placement."""
    batch, length, _, key_width = call.q.shape
    value_heads, value_width = call.v.shape[2:]
    o = scratch.result(tuple(call.v.shape), call.out_dtype, call.v.device)
    final = _new_state(call, scratch)
    if 0 in (length, final.numel()):
        return o, final
    dtype = call.compute_dtype
    block = _bounded_block(call)
    config = choose(
        device_of(call.q.device), key_width=key_width, value_width=value_width, lanes=call.sequences * value_heads,
        length=length, item=dtype.itemsize, chunk_size=call.chunk_size, bounded=block > 1,
        limited=block == 0,
    )  # fmt: skip
    variant = Variant.of(call)
    module = load_source(variant.name, chunk_source(variant))
    values = {**_operands(call, scratch), "o_ptr": o, "final_state_ptr": final, "T": length}
    values |= {"C": config.chunk, "VP": padded(value_width), "INVERSE_PRECISION": inverse_precision(call, dtype)}
    values |= {"DT": triton_dtype(dtype), "PRECISION": precision(), "BLOCK": min(block, config.chunk)}
    chunks = batch * -(-length // config.chunk)
    with on(call.q.device):
        if call.cu_seqlens is not None:
            chunks = length // config.chunk + call.sequences  # the most there can be; programs beyond the last return
            values |= pack(call.cu_seqlens, config.chunk, scratch)
        values |= _buffers(variant, call, config, chunks, scratch)
        tiles = chunks * value_heads
        columns = -(-value_width // config.scan_columns)
        programs = {"scan": call.sequences * value_heads * columns}
        for name in place(variant.program).kernels:
            blocks, options = config.launch(name)
            if name == "gram" and block == 0:
                options |= synchronous(call.q.device)
            launch(scratch, getattr(module, name), programs.get(name, tiles), {**values, **blocks}, **options)
    return o, final


def run_step(call: Call, state: Tensor | None, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """One token. ``state`` receives the new state; None for a fresh fp32 tensor."""
    batch, _, _, key_width = call.q.shape
    value_heads, value_width = call.v.shape[2:]
    o = scratch.result(tuple(call.v.shape), call.out_dtype, call.v.device)
    final = _new_state(call, scratch) if state is None else state
    if not final.numel():
        return o, final
    variant = Variant.of(call, form="token")
    module = load_source(variant.name, step_source(variant))
    keys, values = padded(key_width), padded(value_width)
    columns = step_columns(device_of(call.q.device), keys=keys, values=values, lanes=batch * value_heads)
    arguments = {**_operands(call, scratch), "o_ptr": o, "BV": columns}
    arguments |= tensor_arguments("final_state", "nhkv", final)
    with on(call.q.device):
        launch(scratch, module.step, batch * value_heads * -(-value_width // columns), arguments, num_warps=4)
    return o, final


def _operands(call: Call, scratch: Scratch) -> dict[str, Any]:
    """Every argument that does not depend on the schedule, by the name the kernels give it."""
    key_width, value_heads, value_width = call.q.shape[3], *call.v.shape[2:]
    values: dict[str, Any] = {
        "scale": call.scale, "gate_scale": call.gate_scale, "l2norm_eps": call.qk_l2norm_eps,
        "HV": value_heads, "GROUP": value_heads // call.q.shape[2],
        "K": key_width, "V": value_width, "KP": padded(key_width),
    }  # fmt: skip
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        values |= tensor_arguments(name, "bthd", x)
    if call.g is not None:
        g = call.g.expand(1, 1, -1) if call.gate == "head" else call.g
        values |= tensor_arguments("g", "bthd" if call.gate == "channel" else "bth", g)
        if call.gate == "head":
            values |= {"g_sb": 0, "g_st": 0}
    if call.beta is not None:
        values |= tensor_arguments("beta", "bth", call.beta)
    if call.initial_state is not None:
        values |= tensor_arguments("initial_state", "nhkv", call.initial_state)
    if call.A_log is not None:
        values["A_log_ptr"] = scratch.contiguous(call.A_log)
    if call.dt_bias is not None:
        values["dt_bias_ptr"] = scratch.contiguous(call.dt_bias)
    if call.initial_state is not None and call.state_indices is not None:
        values |= {"state_indices_ptr": scratch.contiguous(call.state_indices), "N": call.initial_state.shape[0]}
    return values


def tensor_arguments(name: str, letters: str, x: Tensor) -> dict[str, Any]:
    """A tensor's pointer and strides by the names that the kernels give them."""
    return dict(zip(_names(name, letters), (x, *x.stride()), strict=True))


@cache
def _names(name: str, letters: str) -> tuple[str, ...]:
    """Of a tensor's pointer and strides."""
    return (f"{name}_ptr", *(f"{name}_s{letter}" for letter in letters))


def _buffers(variant: Variant, call: Call, config: Config, chunks: int, scratch: Scratch) -> dict[str, Any]:
    """The crossing buffers: a tile per chunk and value head."""
    sizes = {"C": config.chunk, "K": padded(call.q.shape[3]), "V": padded(call.v.shape[3]), 1: 1}
    dtype = call.compute_dtype
    operand = torch.float16 if inverse_precision(call, dtype) == "fp16" else torch.float32
    kept = {"io": dtype, "fp32": torch.float32, "inverse": operand}
    made: dict[str, Any] = {}
    for buffer in place(variant.program).buffers:
        rows, cols = (sizes[dim] for dim in buffer.value.type.shape)
        tiles = (chunks * call.v.shape[2], rows, cols)
        made[f"{buffer.name}_buffer"] = scratch.empty(tiles, kept[buffer.kept], call.q.device)
    return made


def pack(cu_seqlens: Tensor, chunk: int, scratch: Scratch) -> dict[str, Any]:
    """Where each sequence's chunks start, computed on the device: no length is read on the host."""
    from . import macros

    sequences = cu_seqlens.shape[0] - 1
    cu_seqlens = scratch.contiguous(cu_seqlens)
    offsets = scratch.result((sequences + 1,), torch.int32, cu_seqlens.device)
    packing = {"cu_seqlens": cu_seqlens, "chunk_offsets": offsets, "N": sequences}
    launch(scratch, macros.chunk_offsets_kernel, 1, {**packing, "C": chunk}, num_warps=4)
    return packing


def launch(scratch: Scratch, kernel: Any, programs: int, values: dict[str, Any], **options: Any) -> None:
    scratch.launch(kernel, (programs,))(**{name: values[name] for name in kernel.arg_names}, **options)


def _new_state(call: Call, scratch: Scratch) -> Tensor:
    shape = (call.sequences, call.v.shape[2], call.q.shape[3], call.v.shape[3])
    return scratch.result(shape, torch.float32, call.q.device)


def triton_dtype(dtype: torch.dtype) -> Any:
    tl = import_module("triton.language")  # not at the top: the package is optional
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def inverse_precision(call: Call, dtype: torch.dtype) -> str:
    """How the products of the inverse round.

    With normalised keys and beta in [0, 2], as a sigmoid is, the inverse is made of products of contractions, so fp16,
    which rounds as finely as TF32, holds it; otherwise its entries have no bound, and three bf16 products have fp32's
    range.
    """
    if dtype is torch.float32:
        return precision()
    steady = call.qk_l2norm_eps > 0.0 and (call.beta is None or call.sigmoid_beta)
    return "fp16" if steady else "bf16x3"


def _bounded_block(call: Call) -> int:
    """Tokens of a block half of whose log gates cannot sum below the exponent limit; 0 and 1 as in decays.py."""
    if call.gate != "channel" or call.qk_l2norm_eps <= 0.0 or call.compute_dtype is torch.float16:
        return 1
    unknown = 0 if call.compute_dtype is torch.bfloat16 else 1
    strongest = -GATE_FUNCTIONS[call.gate_fn].lower_bound(call.gate_scale)
    return next((block for block in (32, 16) if strongest * block / 2 <= _EXPONENT_LIMIT), unknown)
