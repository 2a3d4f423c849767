"""Launching MLA decoding on Hopper GPUs: which calls the kernel takes, and its operands for the copy engine."""

# pyright: reportMissingImports=false

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..ahead import compile_ahead
from ..attention_calls import absorb
from ..run_attention import Attention
from ..scratch import Scratch
from ..split import BLOCK, workers
from ..triton.device import device_of, on
from ..triton.mla_run import Results, cut, decodes, table_rows
from . import run
from .descriptors import aligned, described
from .launches import LOG2E

RANK, ROPE = 512, 64
ROWS = 64  # of a tile
FEW_ROWS = 16  # of one request: the portable kernel, two programs a multiprocessor, is faster there


class HopperDecode:
    """:class:`~kdacompile.lowering.attention_calls.AttentionImplementation`: R = 512, D = 64, 16-bit, sm_90."""

    name = "hopper"

    def declines(self, call: Attention) -> str | None:
        return run.machine(call.q) or decodes(call) or _shape(call) or _cache(call)

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        scratch = scratch or Scratch()
        compile_ahead(lambda ahead: absorb(call, _attend, ahead), scratch)
        return absorb(call, _attend, scratch)


def _shape(call: Attention) -> str | None:
    if call.latent.shape[2] != RANK or call.k_rope is None or call.k_rope.shape[2] != ROPE:
        return f"R = {RANK} and D = {ROPE} only"
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return "only 16-bit operands"
    if call.mask is not None and (call.mask.dtype is not torch.bool or call.mask.shape[1:3] != (1, 1)):
        return "a mask that is not one of tokens alone"
    if call.scale <= 0:
        return "a scale that is not positive: the largest score would not be the largest logit"
    if call.q.shape[0] == 1 and call.q.shape[1] * call.q.shape[2] <= FEW_ROWS:
        return f"one request of {FEW_ROWS} rows or fewer"
    if call.block_table is not None and call.page % BLOCK:
        return f"pages of {call.page} tokens, no multiple of {BLOCK}"
    return None


def _cache(call: Attention) -> str | None:
    """Whether the copy engine can address the cache where it lies; a copy would cost more than another kernel."""
    for x in (call.latent, call.k_rope):
        if x is not None and not aligned(x):
            return "a cache in steps that are no multiples of 16 bytes"
    if call.width >= 2**30 or call.q.shape[0] >= 2**15:
        return "too many tokens or requests"
    return None


def _attend(call: Attention, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """A call without weights."""
    kernels: Any = import_module(".mla", __package__)  # here, not above: a machine without triton imports this too
    assert call.q_rope is not None and call.k_rope is not None
    rows = call.q.shape[1] * call.q.shape[2]
    tiles = -(-rows // ROWS)
    results = Results(call, tiles, device_of(call.q.device).multiprocessors, scratch, stay=True)
    half, rope = (1, ROWS, RANK // 2), (1, ROWS, ROPE)
    values: dict[str, Any] = {
        "d_q": described(_flat(call.q, scratch), half), "d_q_rope": described(_flat(call.q_rope, scratch), rope),
        "d_c": described(call.latent, half), "d_r": described(call.k_rope, rope),
        "k_rope": call.k_rope, "rope_sp": call.k_rope.stride(0), "rope_sr": call.k_rope.stride(1),
        "d_o": described(results.o.flatten(1, 2), half), **results.arguments(),
        "scale": call.scale * LOG2E, "PAGE": 0 if call.block_table is None else call.page,
        "CAUSAL": call.causal and call.q.shape[1] > 1, "MASK": call.mask is not None,
        **_mask(call, results.lse, scratch),
    }  # fmt: skip
    quarter = 1, ROWS, RANK // 4
    values["d_part"] = described(results.part_o, quarter) if results.split.partial else values["d_o"]
    with on(call.q.device):
        results.schedule()
        arguments = {name: values[name] for name in kernels.attend.arg_names}
        grid = tiles, results.workers if results.split.scheduled else results.split.items
        scratch.launch(kernels.attend, grid)(**arguments, **results.launch_options(), num_warps=4)
        results.combine()
    return results.o, results.lse


def entries(requests: int, rows: int, device: torch.device) -> int:
    """Numbers in the schedule of so many requests with ``rows`` queries times heads each."""
    return 4 * table_rows(requests, workers(-(-rows // ROWS), device_of(device).multiprocessors), stay=True)


def schedule(lengths: Tensor, rows: int, width: int, scratch: Scratch) -> Tensor:
    """What :class:`HopperDecode` cuts requests of these lengths by, of up to ``width`` tokens."""
    device, requests = lengths.device, lengths.shape[0]
    table = scratch.result((entries(requests, rows, device),), torch.int32, device)
    share = workers(-(-rows // ROWS), device_of(device).multiprocessors)
    with on(device):
        cut(scratch.contiguous(lengths), table.view(-1, 4), width, share, scratch, chained=True, stay=True)
    return table


def _mask(call: Attention, absent: Tensor, scratch: Scratch) -> dict[str, Any]:
    """The mask's bytes, those of a request together, and the step from one request to the next."""
    if call.mask is None:
        return {"mask": absent, "mask_sb": 0}  # never read
    mask = scratch.contiguous(call.mask[:, 0, 0]).view(torch.uint8)
    return {"mask": mask, "mask_sb": mask.shape[1] if mask.shape[0] > 1 else 0}


def _flat(x: Tensor, scratch: Scratch) -> Tensor:
    """``[B, T, H, I]`` as ``[B, T * H, I]``, where it lies if the copy engine can address it there."""
    flat = x.flatten(1, 2)
    return flat if aligned(flat) else scratch.copied(flat)
