"""Launching the portable MLA decode kernels: cut, attend, combine."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..ahead import compile_ahead
from ..attention_calls import absorb
from ..run_attention import Attention
from ..scratch import Scratch
from ..split import BLOCK, OVERHEAD, PARTIAL, SHORT, STAYING, Split, split, workers
from .configs import VERIFIED_TRITON, padded
from .device import device_of, on, precision, unsupported

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_RANK, MAX_ROPE = 1024, 256
COMBINING = 16  # programs a multiprocessor that merge partial results


@dataclass(frozen=True)
class Tiles:
    """Rows and tokens of a tile, warps, stages of the loop, and programs that share a multiprocessor."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int


def tiles(
    rows: int, columns: int, element: int, shared_memory: int, *, masked: bool = False, tall: bool = True
) -> Tiles | None:
    """The tiles of ``rows`` query rows over a cache of ``columns`` padded columns (latent and rope); None: no room.

    With one small tile of rows the kernel is bound by memory, and a second program on a multiprocessor loads while the
    first multiplies; else the more rows a tile has, the less often the cache is read. ``tall``: whether 64 rows, from
    which on products are those of Hopper's and Blackwell's asynchronous tensor cores, are known to be compiled right.
    """

    def fits(height: int, tokens: int, programs: int) -> bool:
        """The queries, a block of the cache (two, with wgmma and in fp32), a mask, and what products exchange."""
        blocks = 2 * tokens + 16 if element == 4 else 2 * tokens if height == 64 else tokens
        exchanged = 8192 + (8 * height * tokens if masked else 0)
        return programs * (columns * element * (height + blocks) + exchanged) <= shared_memory

    warps = 4 if rows <= 16 and element == 2 else 8
    if rows <= 16 and any(fits(16, tokens, 2) for tokens in (64, 32)):
        return Tiles(16, 64 if fits(16, 64, 2) else 32, warps, 2, 2)
    for height in (16,) if rows <= 16 or element == 4 else (64, 32, 16) if rows > 32 and tall else (32, 16):
        for tokens in (64, 32) if height > 16 else (64, 32, 16):
            if fits(height, tokens, 1):
                return Tiles(height, tokens, warps, 2, 1)
    return None


class TritonDecode:
    """:class:`~kdacompile.lowering.attention_calls.AttentionImplementation`: the absorbed form on any GPU from Ampere.

    Any rank, rope, head count, page size, mask and strides; bfloat16, float16 and float32.
    """

    name = "triton"

    def declines(self, call: Attention) -> str | None:
        reason = unsupported(call.q) or decodes(call) or _sizes(call)
        if reason is None and _tiles(call) is None:
            reason = "the latent is too wide for this GPU's shared memory"
        return reason

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        scratch = scratch or Scratch()
        compile_ahead(lambda ahead: absorb(call, attend, ahead), scratch)
        return absorb(call, attend, scratch)


def decodes(call: Attention) -> str | None:
    """Why a kernel on the latent itself is not for this call, or None."""
    if not call.absorbed:
        return "the expanded form is cheaper"
    operands = (call.q, call.q_rope, call.latent, call.k_rope, call.w_uk, call.w_uv)
    dtypes = {x.dtype for x in operands if x is not None}
    if len(dtypes) > 1 or call.q.dtype not in DTYPES:
        return f"operands in {', '.join(sorted(map(str, dtypes)))}"
    if call.latent.stride(2) != 1 or (call.k_rope is not None and call.k_rope.stride(2) != 1):
        return "a cache whose columns do not lie together"
    return None


def _sizes(call: Attention) -> str | None:
    if call.latent.shape[2] > MAX_RANK or (call.k_rope is not None and call.k_rope.shape[2] > MAX_ROPE):
        return f"R above {MAX_RANK} or D above {MAX_ROPE}"
    if call.width >= 2**30 or call.q.shape[0] >= 2**15:
        return "too many tokens or requests"
    return None


def _widths(call: Attention) -> tuple[int, int]:
    """R and D; D = 0 without positions."""
    return call.latent.shape[2], 0 if call.k_rope is None else call.k_rope.shape[2]


def _tiles(call: Attention) -> Tiles | None:
    rank, rope = _widths(call)
    columns = padded(rank) + (padded(rope) if rope else 0)
    device, rows = device_of(call.q.device), call.q.shape[1] * call.q.shape[2]
    verified = device.capability[0] == 9 and device.triton == VERIFIED_TRITON
    return tiles(
        rows, columns, call.q.dtype.itemsize, device.shared_memory, masked=call.mask is not None,
        tall=verified or device.capability[0] not in (9, 10),
    )  # fmt: skip


def attend(call: Attention, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """A call without weights."""
    kernels = _kernels("mla")
    rank, rope = _widths(call)
    tile = _tiles(call)
    assert tile is not None  # else declined
    row_tiles = -(-call.q.shape[1] * call.q.shape[2] // tile.rows)
    results = Results(call, row_tiles, device_of(call.q.device).multiprocessors * tile.programs, scratch)
    q, q_rope = (None if x is None else _rows_together(x, scratch) for x in (call.q, call.q_rope))
    assert q is not None
    k_rope = call.latent if call.k_rope is None else call.k_rope
    values: dict[str, Any] = {
        **_tensor("q", q, "bth"), **_tensor("q_rope", q if q_rope is None else q_rope, "bth", "qr"),
        **_tensor("latent", call.latent, "p", "c"), "C_STEP": call.latent.stride(1),
        **_tensor("rope", k_rope, "p", "r"), "R_STEP": k_rope.stride(1),
        **results.arguments(), **_mask(call, q), "mask_ss": 0 if call.mask is None else call.mask.stride(3),
        "scale": call.scale, "R": rank, "RP": padded(rank), "D": rope, "DP": padded(rope),
        "BM": tile.rows, "BN": tile.tokens, "BLOCK": BLOCK, "PAGE": 0 if call.block_table is None else call.page,
        "CAUSAL": call.causal and call.q.shape[1] > 1, "STAGES": tile.stages,
        "PRECISION": precision() if q.dtype is torch.float32 else "tf32",
        "APART": tile.rows == 64 and device_of(q.device).capability[0] == 9,
    }  # fmt: skip
    with on(q.device):
        results.schedule()
        arguments = {name: values[name] for name in kernels.attend.arg_names}
        launch = results.launch_options()
        scratch.launch(kernels.attend, (row_tiles, results.split.items))(**arguments, **launch, num_warps=tile.warps)
        results.combine()
    return results.o, results.lse


class Results:
    """What every decode kernel has around it: the cut, partial results and their merge, the outputs."""

    def __init__(self, call: Attention, row_tiles: int, slots: int, scratch: Scratch, *, stay: bool = False) -> None:
        self.call, self.scratch = call, scratch
        batch, tokens, heads, rank = call.q.shape
        self.rows = tokens * heads
        self.workers = workers(row_tiles, slots)
        self.split: Split = split(batch, row_tiles, call.width, slots, lengths=call.lengths is not None)
        device = call.q.device
        self.chained = device.type == "cuda" and device_of(device).capability >= (9, 0)
        self.o = scratch.result((batch, tokens, heads, rank), call.out_dtype, device)
        self.lse = scratch.result((batch, heads, tokens), torch.float32, device)
        self.lengths = None if call.lengths is None else scratch.contiguous(call.lengths)
        self.sinks = None if call.sinks is None else scratch.contiguous(call.sinks)
        self.table = None if call.block_table is None else _columns_together(call.block_table, scratch)
        self.part_o, self.part_lse = self.o, self.lse
        if self.split.partial:
            self.part_o = scratch.empty((self.split.items, self.rows, rank), torch.float32, device)
            self.part_lse = scratch.empty((self.split.items, self.rows), torch.float32, device)
        self.plan = self.items = self.starts = self.lse
        self.given, self.stay = False, stay and self.split.scheduled
        if self.split.scheduled:
            shape = table_rows(batch, self.workers, stay=stay), 4
            self.given = fits(call.schedule, shape, device)
            made = call.schedule if self.given else None
            self.items = scratch.result(shape, torch.int32, device) if made is None else made.view(shape)
            self.plan = self.items[self.split.items :]
            self.starts = self.plan[batch:]

    def arguments(self) -> dict[str, Any]:
        """What the decode kernels call these; for what is absent, any tensor, which is never read.

        Sinks are theirs where they write results, and the merge's where every result is partial.
        """
        call = self.call
        return {
            "table": self.lse if self.table is None else self.table,
            "table_sb": 0 if self.table is None else self.table.stride(0),
            "lengths": self.lse if self.lengths is None else self.lengths, "HAS_LENGTHS": call.lengths is not None,
            "sinks": self.lse if self.sinks is None else self.sinks,
            "HAS_SINKS": call.sinks is not None and self.split.splits <= 1,
            "items": self.items, "starts": self.starts, "SPLITS": max(1, self.split.splits),
            "SCHEDULED": self.split.scheduled, "PARTIAL": self.split.partial, "o": self.o, "lse": self.lse,
            "part_o": self.part_o, "part_lse": self.part_lse, "T": call.q.shape[1], "H": call.q.shape[2],
            "ROWS": self.rows, "WIDTH": call.width, "CHAINED": self.chained,
        }  # fmt: skip

    def launch_options(self) -> dict[str, bool]:
        """Of a decode kernel: it may start while the cut is made, not before what precedes the call is done."""
        return {"launch_pdl": True} if self.chained and self.split.scheduled else {}

    def schedule(self) -> None:
        """Cut on the device, where only it knows the lengths, unless that was done for several calls at once."""
        if self.split.scheduled and not self.given:
            assert self.lengths is not None  # else all requests are equally long
            width, count = self.call.width, self.workers
            cut(self.lengths, self.items, width, count, self.scratch, chained=self.chained, stay=self.stay)

    def combine(self) -> None:
        """Merge the partial results."""
        if not self.split.partial:
            return
        call, rank, splits = self.call, self.o.shape[3], self.split.splits
        batch, width, at_once, programs = call.q.shape[0], padded(rank), 4, self.rows
        requests = batch
        if self.split.scheduled:  # as many programs as run at once: how many requests are cut, the host does not know
            programs, requests = min(programs * batch, COMBINING * device_of(call.q.device).multiprocessors), 1
            splits = self.split.items // batch  # on average, where all are cut
        if splits > at_once * (2 if self.split.scheduled else 1):  # many parts of few rows
            at_once = min(_power(splits), 128)
            width = min(width, max(64, 1024 // at_once))
        self.scratch.launch(_kernels("mla_split").combine, (programs, -(-rank // width), requests))(
            self.part_o, self.part_lse, self.o, self.lse, self.lse if self.sinks is None else self.sinks,
            self.plan, call.q.shape[1], call.q.shape[2], self.rows, self.split.splits, R=rank, BC=width, BS=at_once,
            SCHEDULED=self.split.scheduled, HAS_SINKS=call.sinks is not None, CHAINED=self.chained, num_warps=4,
            **({"launch_pdl": True} if self.chained else {}),
        )  # fmt: skip


def table_rows(requests: int, workers: int, *, stay: bool) -> int:
    """Of four numbers: an item each, of each request its parts, and where programs stay the first item of each."""
    return workers + 2 * requests + (workers // 4 + 1 if stay else 0)


def cut(
    lengths: Tensor, items: Tensor, width: int, workers: int, scratch: Scratch, *, chained: bool, stay: bool = False
) -> None:
    """Fill the table of items of requests with these lengths, for so many programs at once; ``stay``: see split.py."""
    batch = lengths.shape[0]
    count = workers + batch
    sizes = {"BP": _power(batch), "PP": _power(count), "WP": _power(workers + 1) if stay else 0}
    sizes["LOG_B"] = (batch - 1).bit_length()
    overhead, partial = STAYING if stay else (OVERHEAD, PARTIAL)
    costs = {"BLOCK": BLOCK, "OVERHEAD": overhead, "PARTIAL": partial, "SHORT": SHORT}
    scratch.launch(_kernels("mla_split").schedule, (1,))(
        lengths, items, batch, width, workers, count, **sizes, **costs, CHAINED=chained,
        num_warps=4 if batch <= 512 else 16,
    )  # fmt: skip


def fits(schedule: Tensor | None, shape: tuple[int, int], device: torch.device) -> bool:
    """Whether a schedule is a table of this shape; one made for other rows, or for fewer requests, is left alone."""
    if schedule is None or schedule.dtype is not torch.int32 or schedule.device != device:
        return False
    return schedule.is_contiguous() and schedule.numel() == shape[0] * shape[1]


def _kernels(module: str) -> Any:
    """The kernels, imported late: a machine without triton imports this module too."""
    return import_module(f".{module}", __package__)


def _tensor(name: str, x: Tensor, letters: str, prefix: str = "") -> dict[str, Any]:
    strides = zip(letters, x.stride(), strict=False)
    return {name: x, **{f"{prefix or name}_s{letter}": stride for letter, stride in strides}}


def _mask(call: Attention, q: Tensor) -> dict[str, Any]:
    """The mask's pointer, kind and strides; a broadcast dimension has stride 0."""
    if call.mask is None:
        return {"mask": q, "MASK": "", "mask_sb": 0, "mask_sh": 0, "mask_st": 0}
    batch, tokens, heads, _ = call.q.shape
    mask = call.mask.expand(batch, heads, tokens, -1)
    kind = "bool" if mask.dtype is torch.bool else "float"
    mask = mask.view(torch.uint8) if kind == "bool" else mask
    return {"mask": mask, "MASK": kind, **dict(zip(("mask_sb", "mask_sh", "mask_st"), mask.stride(), strict=False))}


def _rows_together(x: Tensor, scratch: Scratch) -> Tensor:
    return x if x.stride(3) == 1 else scratch.copied(x)


def _columns_together(x: Tensor, scratch: Scratch) -> Tensor:
    return x if x.stride(1) == 1 else scratch.copied(x)


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
