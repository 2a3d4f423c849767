"""MLA on real tensors: the driver of the attention program, forward.

The cache is walked block by block. A block is read where it lies (through the page table if there is one), expanded
through the weights only in the expanded form, and its summary is merged into the carry of every block of queries that
may see it. Nothing of size ``S x H x (N + D)`` or ``T x S`` is ever formed.

What a request does not own (slots past its length, table entries past its last page) is replaced by zeros while it is
read and masked by ``-inf`` afterwards: NaN there never meets a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, cast

import torch
from torch import Tensor

from .attention import attention_program, choose_form
from .operands import Kind, Operand, Result
from .straight import compiled

QUERY_BLOCK = 256
SCORES = 1 << 20
"""Scores of one block of queries against one block of the cache, in elements: what should stay in the cache."""
MIN_BLOCK, MAX_BLOCK = 64, 4096
COPIED_BLOCK = 512
"""Longest block that is first copied (cast, or masked by lengths): its copy should still be at hand when it is read."""

REQUEST = 256
"""Cached tokens whose walk takes as long as what a request of its own costs."""
MASKED = 1.5
"""How much longer a token takes where requests of different lengths are walked together."""


def _query_layout(call: Attention) -> str:
    return "[B, T, H, R]" if call.w_uk is None else "[B, T, H, N]"


def _latent_layout(call: Attention) -> str:
    return "[B, S, R]" if call.block_table is None else "[P, page, R]"


def _rope_layout(call: Attention) -> str:
    return "[B, S, D]" if call.block_table is None else "[P, page, D]"


@dataclass(frozen=True)
class Attention:
    """The operand table of ``kdacompile::mla``, and one call of it.

    latent and k_rope are the cache, whole or in pages. Without w_uk and w_uv, q and the result are as wide as the
    latent. A float mask is added to the scores. schedule is what ``kdacompile::mla_schedule`` made of the lengths, or
    None. ``out_dtype`` is what o is wanted in, q's by default.
    """

    q: Annotated[Tensor, Operand(_query_layout)]
    q_rope: Annotated[Tensor | None, Operand("[B, T, H, D]")]
    latent: Annotated[Tensor, Operand(_latent_layout)]
    k_rope: Annotated[Tensor | None, Operand(_rope_layout)]
    w_uk: Annotated[Tensor | None, Operand("[H, N, R]")]
    w_uv: Annotated[Tensor | None, Operand("[H, V, R]")]
    mask: Annotated[Tensor | None, Operand("broadcasting to [B, H, T, S]", Kind.MASK, broadcast=True)]
    sinks: Annotated[Tensor | None, Operand("[H]")]
    lengths: Annotated[Tensor | None, Operand("[B]", Kind.INDEX)]
    block_table: Annotated[Tensor | None, Operand("[B, pages]", Kind.INDEX)]
    schedule: Annotated[Tensor | None, Operand("[entries]", Kind.INDEX)] = None
    _: KW_ONLY
    scale: float
    causal: bool
    form: str
    out_dtype: torch.dtype = field(default=cast("torch.dtype", None))
    length: int | None = None
    """Tokens of the only request: there may be room for more."""

    def __post_init__(self) -> None:
        if cast("torch.dtype | None", self.out_dtype) is None:
            object.__setattr__(self, "out_dtype", self.q.dtype)

    @property
    def results(self) -> tuple[Result, Result]:
        """Shape and dtype of o and of lse."""
        batch, tokens, heads, width = self.q.shape
        value = width if self.w_uv is None else self.w_uv.shape[1]
        return ((batch, tokens, heads, value), self.out_dtype), ((batch, heads, tokens), self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The executor's: float64 if the queries or the cache are, else float32. Also lse's."""
        return torch.float64 if torch.float64 in (self.q.dtype, self.latent.dtype) else torch.float32

    @property
    def page(self) -> int:
        return self.latent.shape[1]

    @property
    def width(self) -> int:
        """Tokens a request may have: the length of the mask's last dimension, or ``length``."""
        if self.length is not None:
            return self.length
        return self.latent.shape[1] if self.block_table is None else self.block_table.shape[1] * self.page

    @property
    def absorbed(self) -> bool:
        """Whether heads meet the latent itself, by the cost of both forms at these sizes."""
        if self.w_uk is None or self.w_uv is None:
            return True
        if self.form != "auto":
            return self.form == "absorbed"
        batch, tokens, heads, nope = self.q.shape
        rope = 0 if self.q_rope is None else self.q_rope.shape[-1]
        rank, value = self.latent.shape[-1], self.w_uv.shape[1]
        sizes = (batch, tokens, self.width, heads, nope, rope, rank, value)
        return choose_form(*sizes, causal=self.causal) == "absorbed"

    # ---- operands in the compute dtype, [B, heads, rows, cols]

    def queries(self, absorbed: bool) -> Tensor:
        """The scaled queries: against the latent ``[B, H, T, R]``, or against expanded keys ``[B, H, T, N]``."""
        q = self.q.to(self.dtype).transpose(1, 2) * self.scale
        return per_head(q, self.weight("w_uk")) if absorbed and self.w_uk is not None else q.contiguous()

    def shared_queries(self) -> Tensor | None:
        return None if self.q_rope is None else (self.q_rope.to(self.dtype).transpose(1, 2) * self.scale).contiguous()

    def weight(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, name)
        return weight.to(self.dtype)

    # ---- blocks

    def query_blocks(self) -> list[tuple[int, int]]:
        tokens = self.q.shape[1]
        return [(start, min(start + QUERY_BLOCK, tokens)) for start in range(0, tokens, QUERY_BLOCK)]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Bounds of the cache's blocks; whole pages, and no further than the longest request where that is known."""
        batch, tokens, heads, _ = self.q.shape
        end = self.width
        if self.lengths is not None and self.lengths.device.type == "cpu" and batch:
            end = min(end, int(self.lengths.max()))
        rows = max(1, batch * heads * min(tokens, QUERY_BLOCK))
        converted = self.latent.dtype is not self.dtype or self.lengths is not None
        most = COPIED_BLOCK if converted else MAX_BLOCK
        size = min(max(1 << (SCORES // rows).bit_length() - 1 if rows < SCORES else 1, MIN_BLOCK), most)
        if self.block_table is not None:
            size = max(1, size // self.page) * self.page
        for start in range(0, end, size):
            yield start, min(start + size, end)

    def seen(self, queries: tuple[int, int], block: tuple[int, int]) -> bool:
        """False if causality hides the whole block from these queries."""
        hidden = self.causal and self.lengths is None and block[0] > self.width - self.q.shape[1] + queries[1] - 1
        return not hidden

    def read(self, block: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """The block of latent and shared keys, ``[B, 1, C, R]`` and ``[B, 1, C, D]``."""
        rope = None if self.k_rope is None else self._rows(self.k_rope, block)
        return self._rows(self.latent, block), rope

    def _rows(self, cache: Tensor, block: tuple[int, int]) -> Tensor:
        start, end = block
        if self.block_table is None:
            rows = cache[:, start:end]
        else:
            first, last = start // self.page, -(-end // self.page)
            table = self.block_table[:, first:last]
            if self.lengths is not None:
                begins = torch.arange(first, last, device=table.device) * self.page
                table = torch.where(begins < self.lengths[:, None], table, 0)
            rows = cache[table].flatten(1, 2)[:, : end - start]
        rows = rows.to(self.dtype)
        if self.lengths is not None:
            rows = torch.where(self._owned(block)[:, :, None], rows, 0.0)
        return rows.unsqueeze(1)

    def _owned(self, block: tuple[int, int]) -> Tensor:
        """Which tokens of the block belong to each request, ``[B, C]``."""
        assert self.lengths is not None
        return torch.arange(*block, device=self.latent.device) < self.lengths[:, None]

    def bias(self, queries: tuple[int, int], block: tuple[int, int]) -> Tensor | None:
        """What is added to the scores ``[B, H, t, C]``: the mask's part, causality and lengths as ``-inf``."""
        total: Tensor | None = None
        if self.mask is not None:
            rows = slice(*queries) if self.mask.shape[2] > 1 else slice(None)
            part = self.mask[:, :, rows, block[0] : block[1]]
            total = _keep(part, self.dtype) if part.dtype is torch.bool else part.to(self.dtype)
        allowed = self.allowed(queries, block)
        if allowed is not None:
            total = _keep(allowed, self.dtype) if total is None else torch.where(allowed, total, -torch.inf)
        return total

    def allowed(self, queries: tuple[int, int], block: tuple[int, int]) -> Tensor | None:
        """Causality and lengths, ``[B|1, 1, t|1, C]``; None where nothing of the block is hidden."""
        tokens, device = self.q.shape[1], self.q.device
        if self.lengths is None and (not self.causal or block[1] - 1 <= self.width - tokens + queries[0]):
            return None
        if self.lengths is not None and not self.causal:
            return self._owned(block)[:, None, None]
        lengths = self.width if self.lengths is None else self.lengths[:, None, None, None]
        position = torch.arange(*queries, device=device)[:, None] + lengths - tokens
        reach = torch.arange(*block, device=device)
        allowed = reach <= position
        return allowed if self.lengths is not None else allowed[None, None]


def _keep(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """``[B, H, T, I]`` times each head's ``[H, I, O]``."""
    batch, heads, tokens, inner = x.shape
    rows = x.transpose(0, 1).reshape(heads, batch * tokens, inner) @ weight
    return rows.unflatten(1, (batch, tokens)).transpose(0, 1).contiguous()


def expand(rows: Tensor, weight: Tensor) -> Tensor:
    """The latent ``[B, 1, C, R]`` through each head's ``[H, O, R]``: ``[B, H, C, O]``."""
    heads, out, rank = weight.shape
    return (rows.squeeze(1) @ weight.reshape(heads * out, rank).mT).unflatten(-1, (heads, out)).transpose(1, 2)


def requests(call: Attention) -> list[Attention] | None:
    """A call for each request, if lengths are known on the host and it is worth it: none is walked further than its own
    length then, and nothing is masked or copied that others are too short for.
    """
    batch = call.q.shape[0]
    if call.lengths is None or call.lengths.device.type != "cpu" or not batch:
        return None
    lengths = [min(max(length, 0), call.width) for length in call.lengths.tolist()]
    if batch > 1 and sum(lengths) + REQUEST * batch > MASKED * max(lengths) * batch:
        return None
    return [_request(call, index, length) for index, length in enumerate(lengths)]


def _request(call: Attention, index: int, length: int) -> Attention:
    def own(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[index : index + 1]

    caches = {"latent": call.latent, "k_rope": call.k_rope}
    if call.block_table is None:
        caches = {name: own(x) for name, x in caches.items()}
    of_request = {name: own(getattr(call, name)) for name in ("q", "q_rope", "mask", "block_table")}
    return replace(call, **caches, **of_request, lengths=None, length=length)


Carry = tuple[Tensor, Tensor, Tensor]
"""max and sum ``[B, H, t, 1]``, accumulator ``[B, H, t, V]``."""


def run_attention(call: Attention) -> tuple[Tensor, Tensor]:
    """o ``[B, T, H, V]`` and lse ``[B, H, T]`` in the compute dtype; a query that sees nothing gives 0 and +inf.

    ``lse`` is over the keys alone; sinks only divide the result.
    """
    alone = requests(call)
    if alone is not None:
        results = [run_attention(one) for one in alone]
        o, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
        return o, lse
    absorbed = call.absorbed
    return _finish(call, _scan(call, absorbed), absorbed)


def _scan(call: Attention, absorbed: bool) -> dict[tuple[int, int], Carry]:
    """The carry of every block of queries after the last block of the cache."""
    q, q_shared = call.queries(absorbed), call.shared_queries()
    w_uk = w_uv = None
    if not absorbed:
        w_uk, w_uv = call.weight("w_uk"), call.weight("w_uv")
    carries: dict[tuple[int, int], Carry] = {}
    for block in call.blocks():
        latent, rope = call.read(block)
        k = latent if w_uk is None else expand(latent, w_uk)
        v = latent if w_uv is None else expand(latent, w_uv)
        for queries in call.query_blocks():
            if call.seen(queries, block):
                bias = call.bias(queries, block)
                summary = _summary(q, q_shared, k, rope, v, queries, bias)
                carries[queries] = _merged(carries.get(queries), summary)
    return carries


def _summary(
    q: Tensor,
    q_shared: Tensor | None,
    k: Tensor,
    rope: Tensor | None,
    v: Tensor,
    queries: tuple[int, int],
    bias: Tensor | None,
) -> Carry:
    ports = {"q": _rows(q, queries), "k": k, "v": v}
    if q_shared is not None and rope is not None:
        ports |= {"q_shared": _rows(q_shared, queries), "k_shared": rope}
    if bias is not None:
        ports["bias"] = bias
    program = attention_program(second_key="k_shared" in ports, bias=bias is not None).summary
    largest, total, acc = compiled(program)(**ports)
    return largest, total, acc


def _rows(x: Tensor, queries: tuple[int, int]) -> Tensor:
    return x[:, :, queries[0] : queries[1]]


def _merged(carry: Carry | None, summary: Carry) -> Carry:
    if carry is None:
        return summary
    (m0, l0, a0), (m1, l1, a1) = carry, summary
    merge = compiled(attention_program().merge)
    largest, total, acc = merge(max0=m0, max1=m1, sum0=l0, sum1=l1, acc0=a0, acc1=a1)
    return largest, total, acc


def _finish(call: Attention, carries: dict[tuple[int, int], Carry], absorbed: bool) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = call.q.shape
    width = call.latent.shape[-1] if absorbed or call.w_uv is None else call.w_uv.shape[1]
    o = torch.zeros(batch, heads, tokens, width, dtype=call.dtype, device=call.q.device)
    lse = torch.full((batch, heads, tokens), torch.inf, dtype=call.dtype, device=call.q.device)
    for queries, (largest, total, acc) in carries.items():
        empty = total == 0
        _rows(o, queries).copy_(torch.where(empty, 0.0, acc / total))
        _rows(lse, queries).copy_(torch.where(empty, torch.inf, largest + total.log()).squeeze(-1))
    if call.sinks is not None:
        o *= torch.sigmoid(lse - call.sinks.to(call.dtype)[:, None]).unsqueeze(-1)
    if absorbed and call.w_uv is not None:
        o = per_head(o, call.weight("w_uv").mT)
    return o.transpose(1, 2).contiguous(), lse
