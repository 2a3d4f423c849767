"""What a case needs between kernels by its plan, for ``verify`` to compare with what kernels allocate."""

from __future__ import annotations

import torch

from kdacompile.lowering.ascend.emit import chunk_module
from kdacompile.lowering.ascend.launch import chunk_of, column_tile, is_ahead
from kdacompile.lowering.linear_attention import linear_attention_program
from kdacompile.lowering.plan import Options, Plan, plan
from kdacompile.lowering.triton.configs import Device, choose, padded
from kdacompile.lowering.triton.placement import place
from tests.lowering.verify import Case

IO = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _plan(case: Case, target: str, chunk: int, keys: int, values: int, columns: int, *, ahead: bool = True) -> Plan:
    program = linear_attention_program(case.gate, case.delta, beta=case.beta)
    return plan(program, target, Options(ahead=ahead), io=IO[case.dtype], C=chunk, K=keys, V=values, BV=columns)


def _chunks(case: Case, chunk: int) -> int:
    if case.lengths is None:
        return case.batch * -(-case.length // chunk)
    return sum(-(-length // chunk) for length in case.lengths)


def triton_scratch(case: Case) -> int:
    """Emitted Triton: the plan's tensors for every chunk and head, and what the placement adds to them: the inverse and
    what it is made of, which cross between kernels, and keys that no gate scales, normalised."""
    keys, values = padded(case.key_width), padded(case.value_width)
    sequences = case.batch if case.lengths is None else len(case.lengths)
    config = choose(
        Device.of(torch.device(case.device)), key_width=case.key_width, value_width=case.value_width,
        lanes=sequences * case.value_heads, length=case.length if case.lengths is None else sum(case.lengths),
        item=case.dtype.itemsize, chunk_size=case.chunk_size,
    )  # fmt: skip
    made = _plan(case, "cuda_sm90", config.chunk, keys, values, values)
    width = case.dtype.itemsize
    sizes = {"C": config.chunk, "K": keys, 1: 1}
    extra = 0
    for buffer in place(linear_attention_program(case.gate, case.delta, beta=case.beta)).buffers:
        if buffer.reader != "scan" or buffer.name == "k_acc":
            rows, cols = (sizes[dim] for dim in buffer.value.type.shape)
            extra += rows * cols * (width if buffer.kept == "io" else 4)
    # packed sequences: the most chunks there can be, since no length is read on the host
    chunks = _chunks(case, config.chunk)
    if case.lengths is not None:
        chunks = sum(case.lengths) // config.chunk + len(case.lengths)
    return chunks * case.value_heads * (made.tensor_bytes + extra)


def ascend_scratch(case: Case, cores: int, target: str = "ascend910b") -> int:
    """Emitted Ascend kernels: the plan's tensors for every chunk and head, and a buffer a core for what more than one
    product of the scan reads. A number is kept as a row of K; gates per channel bring what ``sub_chunks`` leaves: the
    diagonals of the Gram matrices and their inverses, and a level's rows and columns each."""
    tile = column_tile(case.key_width, case.value_width)
    chunk = chunk_of(case.chunk_size, case.gate, case.delta, case.key_width, case.dtype)
    sequences = case.batch if case.lengths is None else len(case.lengths)
    ahead = is_ahead(sequences * case.value_heads, cores, case.key_width, case.value_width)
    made = _plan(case, target, chunk, case.key_width, case.value_width, tile, ahead=ahead)
    module = chunk_module(case.gate, case.delta, case.beta, target=target, ahead=ahead)
    own = {b.name for b in module.scratch if b.per_core}
    per_tile = made.tensor_bytes
    per_tile += sum((case.key_width - 1) * 4 for b in made.tensors if b.shape == (1, 1))
    if case.gate == "channel" and module.kernels[1].name == "prologue":  # else the plan has all of it between kernels
        inverted = any(b.name.endswith("_inverted") for b in made.buffers)
        per_tile += (1 + case.delta + inverted) * chunk * chunk * 4
        per_tile += sum(made.bytes(b) for b in made.buffers if b.name.endswith(("_rows", "_cols")))
        # scaled keys (K_gated_neg with the delta term, else K_decayed), which the plan has cross inside the prologue
        per_tile += chunk * case.key_width * case.dtype.itemsize
    per_core = sum(made.bytes(made.buffer(name)) for name in own)
    # packed sequences: the most chunks there can be, since no length is read on the host
    chunks = _chunks(case, chunk) if case.lengths is None else sum(case.lengths) // chunk + len(case.lengths)
    return chunks * case.value_heads * per_tile + cores * per_core
