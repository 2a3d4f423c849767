"""Random operands of the MLA op, and the float64 answer it must give for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kdacompile.patterns.mla.oracle import latent_attention

OPERANDS = (
    "q", "q_rope", "latent", "k_rope", "w_uk", "w_uv", "mask", "sinks", "lengths", "block_table",
)  # fmt: skip


@dataclass(frozen=True)
class MlaCase:
    tensors: dict[str, Any]
    scale: float = 0.3
    causal: bool = False
    form: str = "auto"
    stale: dict[str, Any] = field(default_factory=dict[str, Any])
    """Operands whose unused slots hold NaN and whose unused table entries are garbage, where that differs."""

    def with_(self, **changes: Any) -> MlaCase:
        return replace(self, **changes)

    def with_tensors(self, **tensors: Tensor | None) -> MlaCase:
        return replace(self, tensors={**self.tensors, **tensors})

    @property
    def positional(self) -> tuple[Any, ...]:
        return tuple({**self.tensors, **self.stale}[name] for name in OPERANDS)

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "causal": self.causal, "form": self.form, "out_dtype": None}

    def run(self) -> tuple[Tensor, Tensor]:
        return torch.ops.kdacompile.mla(*self.positional, None, **self.options)

    def oracle(self) -> tuple[Tensor, Tensor]:
        operands = [self.tensors[name] for name in OPERANDS]
        return latent_attention(*operands, scale=self.scale, causal=self.causal)


def make_mla(
    *,
    batch: int = 2,
    tokens: int = 5,
    cached: int = 70,
    heads: int = 3,
    nope: int = 6,
    rope: int = 4,
    rank: int = 10,
    value: int = 7,
    weights: bool = True,
    mask: str = "",
    sinks: bool = False,
    lengths: tuple[int, ...] = (),
    page: int = 0,
    causal: bool = False,
    form: str = "auto",
    dtype: torch.dtype = torch.float64,
) -> MlaCase:
    """``mask``: "", "bool" or "float"; ``page``: tokens a page, 0 for a contiguous cache."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    t: dict[str, Any] = dict.fromkeys(OPERANDS)
    t["q"] = draw(batch, tokens, heads, nope if weights else rank)
    t["q_rope"] = draw(batch, tokens, heads, rope) if rope else None
    t["latent"] = draw(batch, cached, rank)
    t["k_rope"] = draw(batch, cached, rope) if rope else None
    if weights:
        t["w_uk"], t["w_uv"] = draw(heads, nope, rank), draw(heads, value, rank)
    if mask == "bool":
        t["mask"] = torch.rand(batch, 1, tokens, cached, generator=generator) > 0.4
    elif mask:
        t["mask"] = draw(1, heads, tokens, cached)
    t["sinks"] = draw(heads) if sinks else None
    t["lengths"] = torch.tensor(lengths, dtype=torch.int32) if lengths else None
    case = MlaCase(t, causal=causal, form=form)
    if page:
        case = _paged(case, page, generator)
    return _poisoned(case) if lengths else case


def _paged(case: MlaCase, page: int, generator: torch.Generator) -> MlaCase:
    """The cache scattered over pages in random order, with some that belong to nobody."""
    batch, cached, _ = case.tensors["latent"].shape
    pages = -(-cached // page)
    order = torch.randperm(batch * pages + 3, generator=generator)
    table = order[: batch * pages].view(batch, pages)

    def scatter(cache: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(cache, (0, 0, 0, pages * page - cached), value=0.0)
        store = cache.new_full((len(order), page, cache.shape[-1]), torch.nan)
        store[table] = padded.unflatten(1, (pages, page))
        return store

    t = case.tensors
    rope = None if t["k_rope"] is None else scatter(t["k_rope"])
    return case.with_tensors(latent=scatter(t["latent"]), k_rope=rope, block_table=table.int())


def _poisoned(case: MlaCase) -> MlaCase:
    """NaN in every slot past a request's length, and garbage in the table past its last page."""
    t, stale = case.tensors, {}
    lengths, table = t["lengths"].tolist(), t["block_table"]
    for name in ("latent", "k_rope"):
        if t[name] is None:
            continue
        stale[name] = t[name].clone()
        for b, length in enumerate(lengths):
            if table is None:
                stale[name][b, length:] = torch.nan
                continue
            page = t["latent"].shape[1]
            for index, entry in enumerate(table[b].tolist()):
                stale[name][entry, max(0, min(page, length - index * page)) :] = torch.nan
    if table is not None:
        stale["block_table"] = table.clone()
        for b, length in enumerate(lengths):
            stale["block_table"][b, -(-length // t["latent"].shape[1]) :] = 1 << 30
    return case.with_(stale=stale)
