"""Validation of MLA's arguments; as in ``checks.py``, fakes compare only sizes that are plain integers."""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.ops.checks import FLOAT_NAMES, FLOATS, Size, check_tensor, differ
from kdacompile.ops.errors import (
    DeviceError,
    DtypeError,
    LatentWeightsError,
    OptionError,
    PagedCacheError,
    RankError,
    SizeError,
)

FORMS = ("auto", "absorbed", "expanded")


def check_mla(
    q: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    w_uk: Tensor | None,
    w_uv: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    lengths: Tensor | None,
    block_table: Tensor | None,
    *,
    form: str,
    symbolic: bool = False,
) -> None:
    """Raise the typed error of the first argument of ``mla`` that is wrong."""
    device = q.device
    if q.dim() != 4:
        raise RankError(name="q", expected=4, layout="[B, T, H, N]", actual=tuple(q.shape))
    if q.dtype not in FLOATS:
        raise DtypeError(name="q", expected=FLOAT_NAMES, actual=q.dtype)
    if latent.dim() != 3:
        layout = "[B, S, R]" if block_table is None else "[pages, page, R]"
        raise RankError(name="latent", expected=3, layout=layout, actual=tuple(latent.shape))
    batch, tokens, heads, width = q.shape
    first, second, rank = latent.shape
    rows = (batch, second) if block_table is None else (first, second)
    layout = "[B, S, R]" if block_table is None else "[pages, page, R]"
    check_tensor(latent, "latent", (*rows, rank), layout, device, symbolic)
    if (q_rope is None) != (k_rope is None):
        given, missing = ("q_rope", "k_rope") if k_rope is None else ("k_rope", "q_rope")
        raise LatentWeightsError(given=given, missing=missing, reason="queries and keys are rotated together")
    if q_rope is not None and k_rope is not None:
        rope = q_rope.shape[-1] if q_rope.dim() else 0
        check_tensor(q_rope, "q_rope", (batch, tokens, heads, rope), "[B, T, H, D]", device, symbolic)
        check_tensor(k_rope, "k_rope", (*rows, rope), layout.replace("R", "D"), device, symbolic)
    _check_weights(w_uk, w_uv, heads, width, rank, device, symbolic)
    length = second if block_table is None else block_table.shape[-1] * second
    if mask is not None:
        _check_mask(mask, (batch, heads, tokens, length), device, symbolic)
    if sinks is not None:
        check_tensor(sinks, "sinks", (heads,), "[H]", device, symbolic)
    _check_cache(lengths, block_table, batch, length, device, symbolic)
    if block_table is not None and not symbolic and device.type == "cpu":
        _check_entries(block_table, lengths, pages=int(first), page=int(second))
    if form not in FORMS:
        raise OptionError(name="form", expected=f"one of {', '.join(FORMS)}", actual=form)
    if form == "expanded" and w_uk is None:
        raise OptionError(name="form", expected='"auto" or "absorbed" without weights', actual=form)


def _check_weights(
    w_uk: Tensor | None,
    w_uv: Tensor | None,
    heads: Size,
    width: Size,
    rank: Size,
    device: torch.device,
    symbolic: bool,
) -> None:
    if (w_uk is None) != (w_uv is None):
        given, missing = ("w_uk", "w_uv") if w_uv is None else ("w_uv", "w_uk")
        raise LatentWeightsError(given=given, missing=missing, reason="keys and values are expanded together")
    if w_uk is None or w_uv is None:
        if differ(width, rank, symbolic):
            reason = f"only queries of the latent's rank {rank} need none"
            raise LatentWeightsError(given=f"q of width {width}", missing="w_uk", reason=reason)
        return
    check_tensor(w_uk, "w_uk", (heads, width, rank), "[H, N, R]", device, symbolic)
    value = w_uv.shape[1] if w_uv.dim() == 3 else 0
    check_tensor(w_uv, "w_uv", (heads, value, rank), "[H, V, R]", device, symbolic)


def _check_mask(mask: Tensor, full: tuple[Size, ...], device: torch.device, symbolic: bool) -> None:
    layout = "broadcasting to [B, H, T, S]"
    if mask.dtype is not torch.bool and mask.dtype not in FLOATS:
        raise DtypeError(name="mask", expected=f"bool, {FLOAT_NAMES}", actual=mask.dtype)
    if mask.device != device:
        raise DeviceError(name="mask", expected=device, actual=mask.device)
    if mask.dim() != 4:
        raise RankError(name="mask", expected=4, layout=layout, actual=tuple(mask.shape))
    sizes = zip(mask.shape[:3], full[:3], strict=True)
    wrong = any(differ(size, 1, symbolic) and differ(size, whole, symbolic) for size, whole in sizes)
    if wrong or differ(mask.shape[3], full[3], symbolic):
        raise SizeError(name="mask", expected=full, layout=layout, actual=tuple(mask.shape))


def _check_cache(
    lengths: Tensor | None,
    block_table: Tensor | None,
    batch: Size,
    length: Size,
    device: torch.device,
    symbolic: bool,
) -> None:
    for name, x, rank, layout in (("lengths", lengths, 1, "[B]"), ("block_table", block_table, 2, "[B, pages]")):
        if x is None:
            continue
        if x.dtype not in (torch.int32, torch.int64):
            raise DtypeError(name=name, expected="int32 or int64", actual=x.dtype)
        if x.device != device:
            raise DeviceError(name=name, expected=device, actual=x.device)
        if x.dim() != rank:
            raise RankError(name=name, expected=rank, layout=layout, actual=tuple(x.shape))
        if differ(x.shape[0], batch, symbolic):
            raise SizeError(name=name, expected=(batch, *x.shape[1:]), layout=layout, actual=tuple(x.shape))
    if lengths is not None and not symbolic and device.type == "cpu" and lengths.numel():
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > length:
            raise PagedCacheError(problem=f"lengths must be in 0 .. {length}, found {low if low < 0 else high}")


def _check_entries(block_table: Tensor, lengths: Tensor | None, *, pages: int, page: int) -> None:
    """Entries that a request owns must be pages of the pool; what stands past its last page is never read."""
    entries = block_table
    if lengths is not None:
        owned = torch.arange(block_table.shape[1]) * page < lengths[:, None]
        entries = block_table[owned]
    if entries.numel():
        low, high = int(entries.min()), int(entries.max())
        if low < 0 or high >= pages:
            wrong = low if low < 0 else high
            raise PagedCacheError(problem=f"entries of block_table must be in 0 .. {pages - 1}, found {wrong}")
