"""Validation of MLA's arguments; as in ``checks.py``, fakes compare only sizes that are plain integers."""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.lowering.run_attention import Attention
from kdacompile.ops.checks import Size, check_operands, differ
from kdacompile.ops.errors import LatentWeightsError, OptionError, PagedCacheError

FORMS = ("auto", "absorbed", "expanded")


def check_mla(call: Attention, *, symbolic: bool = False) -> None:
    """Raise the typed error of the first argument of ``mla`` that is wrong."""
    _check_pair(call, "q_rope", "k_rope", "queries and keys are rotated together")
    _check_pair(call, "w_uk", "w_uv", "keys and values are expanded together")
    q, latent, table = call.q, call.latent, call.block_table
    if call.w_uk is None and q.dim() == 4 and latent.dim() == 3 and differ(q.shape[3], latent.shape[2], symbolic):
        reason = f"only queries of the latent's rank {latent.shape[2]} need none"
        raise LatentWeightsError(given=f"q of width {q.shape[3]}", missing="w_uk", reason=reason)
    sizes: dict[str, Size] = {}
    if table is not None and table.dim() == 2 and latent.dim() == 3:
        sizes["S"] = table.shape[1] * latent.shape[1]
    check_operands(call, sizes, symbolic)
    if call.form not in FORMS:
        raise OptionError(name="form", expected=f"one of {', '.join(FORMS)}", actual=call.form)
    if call.form == "expanded" and call.w_uk is None:
        raise OptionError(name="form", expected='"auto" or "absorbed" without weights', actual=call.form)


def _check_pair(call: Attention, first: str, second: str, reason: str) -> None:
    given = [name for name in (first, second) if getattr(call, name) is not None]
    if len(given) == 1:
        (missing,) = {first, second} - set(given)
        raise LatentWeightsError(given=given[0], missing=missing, reason=reason)


def check_cache(call: Attention) -> None:
    """Raise the error of the first value of lengths and block_table that is wrong, where they lie on the CPU."""
    if call.q.device.type != "cpu":
        return
    if call.lengths is not None and call.lengths.numel():
        low, high = int(call.lengths.min()), int(call.lengths.max())
        if low < 0 or high > call.width:
            raise PagedCacheError(problem=f"lengths must be in 0 .. {call.width}, found {low if low < 0 else high}")
    if call.block_table is not None:
        _check_entries(call.block_table, call.lengths, pages=call.latent.shape[0], page=call.page)


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
