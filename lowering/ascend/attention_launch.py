"""Running latent attention's emitted kernels: what they take, tiles, parts of the cache, grids.

torch_npu has operators for the same: npu_fused_infer_attention_score_v2 wants the lengths as integers on the host (a
wait for the device at every step), a paged cache with latent and rotated keys in tensors of their own, and does not say
what slots past a length may hold; npu_mla_prolog_v3 begins before the projections of the query and ends with writing
the cache, where this op begins. ``tests/ascend/test_dispatch.py`` reads both schemas from the wheel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..attention_calls import absorb
from ..errors import CapacityError
from ..plan import Plan
from ..run_attention import Attention
from ..scratch import Scratch
from .attention import BLOCK, CARRY, HEADS, attention_module, attention_plan
from .kernel import SUB_CHUNK, Kernel, Module
from .launch import Launch, Launcher

_MERGED_HEADS = 8  # a Vec core holds two accumulators of so many heads, and what spreads the weights over them
_WIDTHS = (16, 32, 64, 128, 256, 512)
_IO = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def decline(call: Attention) -> str | None:
    """Why the emitted kernels do not take a call, or None."""
    operands = (call.q, call.q_rope, call.latent, call.k_rope, call.w_uk, call.w_uv)
    dtypes = {x.dtype for x in operands if x is not None}
    rope = 0 if call.k_rope is None else call.k_rope.shape[-1]
    if not call.absorbed:
        return "many queries: the expanded form does less"
    if len(dtypes) > 1 or not dtypes <= _IO.keys():
        return "queries, cache and weights are not of one dtype of 16 or 32 bits"
    if call.latent.shape[-1] not in _WIDTHS or rope not in (0, *_WIDTHS[:4]):
        return f"rank {call.latent.shape[-1]} with {rope} shared columns"
    if any(x is not None and x.stride(-1) != 1 for x in (call.latent, call.k_rope)):
        return "a cache whose rows do not lie together"
    if not block_of(call):
        return f"tiles of rank {call.latent.shape[-1]} do not fit"
    return None


def block_of(call: Attention) -> int:
    """Cached tokens of a block: they lie in one page, whose last may be short, and their tiles fit. 0 if none do."""
    rope = 0 if call.k_rope is None else call.k_rope.shape[-1]
    page = 0 if call.block_table is None else call.page
    tile, io = head_tile(call.q.shape[2]), _IO[call.latent.dtype]
    return _block(page, tile, call.latent.shape[-1], rope, io, masks_of_heads(call))


def masks_of_heads(call: Attention) -> bool:
    """Whether every head has a mask of its own."""
    return call.mask is not None and call.mask.shape[1] > 1


@cache
def _block(page: int, heads: int, rank: int, rope: int, io: str, masks: bool) -> int:
    blocks = [BLOCK >> n for n in range((BLOCK // SUB_CHUNK).bit_length())]
    whole = [block for block in blocks if page % block == 0]
    for block in whole or [block for block in blocks if block < 2 * max(page, SUB_CHUNK)]:
        try:
            check_layout(attention_plan(heads, block, rank, rope, io, masks=masks))
        except CapacityError:
            continue
        return block
    return 0


def check_layout(made: Plan) -> None:
    """Raises :class:`CapacityError` unless every tile has a place of its own, and operands of Cube two: what the
    compiler needs, where the plan alone would be content with what is alive at once."""
    for need in made.needs:
        copies = 2 if need.memory == "L1" else 1
        if copies * need.apart_bytes > need.available:
            tiles = tuple((name, copies * size) for name, size in need.apart)
            largest = max(tiles, key=lambda tile: tile[1])[0]
            raise CapacityError(need.stage, need.memory, largest, copies * need.apart_bytes, need.available, tiles)


def head_tile(heads: int) -> int:
    return HEADS[0] if heads <= HEADS[0] else HEADS[1]


def run(call: Attention, cores: int, launch: Launcher, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
    """o and lse of a call that :func:`decline` has nothing against, as ``AttentionImplementation.run`` has them."""
    return absorb(call, lambda inner, scratch: _attend(inner, cores, launch, scratch), scratch or Scratch())


def _attend(call: Attention, cores: int, launch: Launcher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    batch, queries, heads, rank = call.q.shape
    device, io = call.q.device, call.q.dtype
    block, tile = block_of(call), head_tile(heads)
    rows, tiles = batch * queries, -(-heads // tile)
    parts = parts_of(rows * tiles, -(-call.width // block), cores)
    module = attention_module(call.q_rope is not None, masks_of_heads(call))
    o = torch.empty(rows, heads, rank, dtype=io, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    values: dict[str, Any] = {
        "q_ptr": call.q.contiguous(),
        "latent_ptr": call.latent,
        "o_ptr": o,
        "lse_ptr": lse,
        "visible_ptr": _visible(call),
        "scale": call.scale,
        "page_stride": call.latent.stride(0),
        "queries": queries,
        "pages": 0,
        "width": call.width,
        "mask_batch": 0,
        "mask_query": 0,
        "tasks": rows * tiles * parts,
    }
    constants = {"H": heads, "C": block, "K": rank, "TILE": tile, "TILES": tiles, "PARTS": parts}
    constants |= {"MASK": 0, "PAGE": 0, "IN_PAGE": 1, "LATENT_ROW": call.latent.stride(1)}
    if call.q_rope is not None and call.k_rope is not None:
        values |= {"q_rope_ptr": call.q_rope.contiguous(), "k_rope_ptr": call.k_rope}
        values["rope_stride"] = call.k_rope.stride(0)
        constants |= {"ROPE": call.k_rope.shape[-1], "ROPE_ROW": call.k_rope.stride(1)}
    if call.mask is not None:
        values |= _mask(call.mask)
        constants["MASK"] = 1
    if call.block_table is not None:
        values |= {"table_ptr": call.block_table.int().contiguous(), "pages": call.block_table.shape[1]}
        constants |= {"PAGE": call.page, "IN_PAGE": -(-call.page // block)}
    if parts > 1:
        shapes = {"max": (), "sum": (), "acc": (rank,)}
        for name in CARRY:
            values[f"{name}_ptr"] = scratch.empty((rows, parts, heads, *shapes[name]), torch.float32, device)
    unused = {"table_ptr": torch.int32, **{f"{name}_ptr": torch.float32 for name in ("mask", *CARRY)}}
    values = {**{name: torch.empty(1, dtype=dtype, device=device) for name, dtype in unused.items()}, **values}
    attend, merge = module.kernels
    launch(_launch_of(module, attend, min(values["tasks"], cores), values, constants))
    if parts > 1:
        merged = min(tile, _MERGED_HEADS)
        values["tasks"] = rows * -(-heads // merged)
        constants |= {"TILE": merged, "TILES": -(-heads // merged)}
        launch(_launch_of(module, merge, min(values["tasks"], 2 * cores), values, constants))
    o, lse = o.view(batch, queries, heads, rank), lse.view(batch, queries, heads).transpose(1, 2).contiguous()
    if call.sinks is not None:
        o = o * torch.sigmoid(lse.transpose(1, 2) - call.sinks.float()).unsqueeze(-1)
    return o.to(call.out_dtype), lse


def parts_of(tasks: int, blocks: int, cores: int) -> int:
    """Into how many parts to cut the blocks of a query, so that cores have a task each; a power of two, since every
    number is another compilation and blocks grow with the cache."""
    return 1 << (max(1, min(cores // tasks, blocks)).bit_length() - 1)


def _mask(mask: Tensor) -> dict[str, Any]:
    """What is added to the scores, ``[B, heads or 1, T, S]`` in fp32 (-inf where bools hide), and its strides: 0 along
    what it is the same for."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    mask = mask.float().contiguous()
    strides = (0 if size == 1 else stride for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    return {"mask_ptr": mask, **dict(zip(("mask_batch", "mask_head", "mask_query"), strides, strict=True))}


def _visible(call: Attention) -> Tensor:
    """How many tokens each query sees, ``[B * T]``: computed where the lengths are, without waiting for them."""
    batch, queries = call.q.shape[:2]
    device = call.q.device
    if call.lengths is None:
        lengths = torch.full((batch,), call.width, dtype=torch.int32, device=device)
    else:
        lengths = call.lengths.to(device=device, dtype=torch.int32)
    behind = torch.arange(1 - queries, 1, dtype=torch.int32, device=device) if call.causal else 0
    return (lengths[:, None] + behind).clamp(min=0).expand(batch, queries).reshape(-1).contiguous()


def _launch_of(module: Module, kernel: Kernel, grid: int, values: dict[str, Any], constants: dict[str, int]) -> Launch:
    arguments = {a.name: values[a.name] for a in kernel.arguments}
    return Launch(module, kernel, grid, arguments, {name: constants[name] for name in kernel.constants})
