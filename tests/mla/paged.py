"""Decoding over paged caches that are gathered in the model, and caches that only look like it.

Every module takes ``x [B, 1, 16]``, ``pool [P, page, R + D]``, ``table [B, pages]`` and ``lengths [B]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.mla.absorbed import DeepSeek
from tests.mla.spellings import HEADS, NOPE, RANK

PAGES, PAGE, BATCH, EACH = 11, 3, 2, 4


def arguments(table: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pages in any order; the first request does not fill its last one."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, 1, 16, generator=generator)
    pool = torch.randn(PAGES, PAGE, RANK + 4, generator=generator)
    if table is None:
        table = torch.randperm(PAGES, generator=generator)[: BATCH * EACH].view(BATCH, EACH)
    return x, pool, table, torch.tensor([7, 12])


class Paged(DeepSeek):
    """``pool[table]``; override one step at a time."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return pool[table].flatten(1, 2)

    def attend(self, q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, lengths: Tensor) -> Tensor:
        scores = torch.einsum("bshc,btc->bsht", q[0], latent) + torch.einsum("bshr,btr->bsht", q[1], rope)
        seen = torch.arange(latent.shape[1]) < lengths[:, None, None, None]
        weights = (scores * self.scale).masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("bsht,btc->bshc", weights, latent)

    def forward(self, x: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        cache = self.gathered(pool, table)
        return self.attend(self.queries(x), cache[..., :RANK], cache[..., RANK:], lengths)


class IndexSelect(Paged):
    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return pool.index_select(0, table.flatten()).view(table.shape[0], -1, pool.shape[-1])


class Widened(Paged):
    """An int32 table, as kernels want it, made an index."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return pool[table.to(torch.int32).long()].reshape(table.shape[0], -1, pool.shape[-1])


class OneKeyHead(Paged):
    """``[P, page, 1, R + D]``, as FlashMLA has it."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return pool.unsqueeze(2)[table].flatten(1, 2).squeeze(2)


class Slots(Paged):
    """A slot for every token and a table of slots, as SGLang has it."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        slots = (table[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)
        return pool.flatten(0, 1).unsqueeze(1)[slots].squeeze(2)


class TwoPools(Paged):
    def forward(self, x: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        parts = pool.split([RANK, pool.shape[-1] - RANK], dim=-1)
        latent, rope = (self.gathered(part.clone(), table) for part in parts)
        return self.attend(self.queries(x), latent, rope, lengths)


class Expanded(Paged):
    """Keys and values are expanded from what is gathered."""

    def forward(self, x: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        cache = self.gathered(pool, table)
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        nope, v = self.wkv_b(cache[..., :RANK]).unflatten(-1, (HEADS, -1)).transpose(1, 2).tensor_split([NOPE], dim=-1)
        k = torch.cat([nope, cache[..., RANK:].unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        seen = torch.arange(cache.shape[1]) < lengths[:, None, None, None]
        weights = (q @ k.mT * self.scale).masked_fill(~seen, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class NewToken(Paged):
    """The step's own token is written into the pool first."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        pool[table[:, -1], 2] = torch.ones(table.shape[0], pool.shape[-1])
        return super().gathered(pool, table)


class OneLayer(Paged):
    """One layer of a pool for all."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return super().gathered(torch.stack([pool, 2 * pool])[1], table)


class Unmasked(Paged):
    def attend(self, q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, lengths: Tensor) -> Tensor:
        scores = torch.einsum("bshc,btc->bsht", q[0], latent) + torch.einsum("bshr,btr->bsht", q[1], rope)
        return torch.einsum("bsht,btc->bshc", (scores * self.scale).softmax(-1), latent)


class Clamped(Paged):
    """-1 stands where a request has no page."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return super().gathered(pool, torch.where(table == table.max(), -1, table).clamp(min=0))


PAGED: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        Paged, IndexSelect, Widened, OneKeyHead, Slots, TwoPools, Expanded, NewToken, OneLayer, Unmasked, Clamped,
    )
}  # fmt: skip


# -- gathered otherwise: matched as before, on what is gathered --------------------------------------------------------


class PagesBackwards(Paged):
    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return pool[table].flip(1).flatten(1, 2)


class PagesInterleaved(Paged):
    """The first token of every page, then the second."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return pool[table].transpose(1, 2).flatten(1, 2)


class TwoTables(Paged):
    """The rotated keys lie in other pages than the latent."""

    def forward(self, x: Tensor, pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        latent, rope = self.gathered(pool, table)[..., :RANK], self.gathered(pool, table.flip(0))[..., RANK:]
        return self.attend(self.queries(x), latent, rope, lengths)


class Changed(Paged):
    """What is gathered is changed before it is used."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return torch.sin(super().gathered(pool, table))


class WrittenAfterwards(Paged):
    """The pool is overwritten between the gather and the attention."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        cache = super().gathered(pool, table)
        pool.zero_()
        return cache + 0 * pool[0, 0, 0]


class Columns(Paged):
    """The table picks along the tokens of a page."""

    def gathered(self, pool: Tensor, table: Tensor) -> Tensor:
        return pool.transpose(0, 1)[:, table].movedim(0, 2).flatten(1, 2)


GATHERED: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls for cls in (PagesBackwards, PagesInterleaved, TwoTables, Changed, WrittenAfterwards, Columns)
}
