"""MLA by whole rows of scores: the gradients of every call, and what the CPU makes of prompts (``cpu/attention.py``).

Keys and values are made once, per head in the expanded form; in the absorbed one they are the latent, which all heads
share. With ``S = scale Q K^T + mask``, a softmax over whole rows, sinks s (``f = sigmoid(lse - s)``, else 1) and
``dlse`` of the keys alone::

    P = softmax S      O = f P V      lse = max S - log(max P)
    dV = f P^T dO      dS = P * (f (dO V^T - rowsum(dO * O)) + dlse)      dQ = scale dS K      dK = scale dS^T Q

as in FlashAttention-2 (arXiv 2307.08691, algorithm 2), scores computed again rather than kept: those of some heads and
of ``ROWS`` queries at a time, which stay in the processor's cache. A causal block skips the keys after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .attention_calls import joined
from .errors import ArgumentError
from .run_attention import Attention, expand, per_head
from .tiles import shared_product

ROWS = 128
"""Queries of a block."""
SCORES = 1 << 19
"""Scores that are worked on at a time, in elements: 2 MB."""
SCORES_ON_DEVICES = 1 << 25

Part = tuple[slice, slice]
"""Requests and heads."""


@dataclass(frozen=True)
class Rows:
    """A call in its compute dtype: q, scaled, ``[B, H, T, W]``, k ``[B, H | 1, S, W]``, v ``[B, H | 1, S, V]``."""

    call: Attention
    q: Tensor
    k: Tensor
    v: Tensor
    absorbed: bool

    @classmethod
    def of(cls, call: Attention) -> Rows:
        absorbed = call.absorbed
        latent, rope = call.read((0, call.width))
        k, v, q = latent, latent, call.q
        if not absorbed:
            assert call.w_uk is not None and call.w_uv is not None
            nope = call.w_uk.shape[1]
            both = expand(latent, joined(call.w_uk, call.w_uv, 1).to(call.dtype))
            k, v = both[..., :nope], both[..., nope:].contiguous()
        if absorbed or call.q_rope is None:
            q = call.queries(absorbed)
            q = q if (shared := call.shared_queries()) is None else torch.cat([q, shared], -1)
        else:
            q = (joined(call.q, call.q_rope, -1).to(call.dtype).transpose(1, 2) * call.scale).contiguous()
        if rope is not None:
            k = torch.cat([k, rope.expand(-1, k.shape[1], -1, -1)], -1)
        return cls(call, q, k.contiguous(), v, absorbed)

    def parts(self) -> Iterator[Part]:
        """Requests and heads that are worked on at a time: several requests, or some heads of one."""
        batch, heads, tokens, _ = self.q.shape
        scores = SCORES if self.q.device.type == "cpu" else SCORES_ON_DEVICES
        most = max(1, scores // max(1, min(tokens, ROWS) * self.k.shape[2]))
        if most >= heads:
            step = most // max(1, heads)
            yield from ((slice(at, at + step), slice(None)) for at in range(0, batch, step))
        else:
            heads_at = [slice(at, at + most) for at in range(0, heads, most)]
            yield from ((slice(b, b + 1), some) for b in range(batch) for some in heads_at)

    def blocks(self) -> Iterator[slice]:
        tokens = self.q.shape[2]
        return (slice(at, min(at + ROWS, tokens)) for at in range(0, tokens, ROWS))

    @cached_property
    def aligned(self) -> bool:
        """Whether causality hides the keys behind a token's own, and there are no more queries than keys."""
        return self.call.causal and self.call.lengths is None and self.q.shape[2] <= self.k.shape[2]

    def weights(self, part: Part, rows: slice) -> tuple[Tensor, Tensor]:
        """P of a block, ``[b, h, t, keys]``, and lse ``[b, h, t]``; a query that sees nothing has zeros, and +inf."""
        tokens, cached = self.q.shape[2], self.k.shape[2]
        first = cached - tokens + rows.start  # the last key that the block's first query sees
        keys = cached - tokens + rows.stop if self.aligned else cached
        scores = shared_product(self.q[part][:, :, rows], of_part(self.k, part, slice(keys)).mT)
        mask, allowed = self.call.mask, None
        if mask is not None:
            own = of_part(mask, part, rows)[..., :keys]
            scores = scores.masked_fill_(~own, -math.inf) if own.dtype is torch.bool else scores.add_(own)
        if not self.aligned:
            allowed = self.call.allowed((rows.start, rows.stop), (0, cached))
        elif rows.stop - rows.start > 1:  # one token sees all of them
            later = scores.new_ones(rows.stop - rows.start, keys - first, dtype=torch.bool).triu_(1)
            scores[..., first:].masked_fill_(later, -math.inf)
        if allowed is not None:
            scores.masked_fill_(~of_part(allowed, part, slice(None)), -math.inf)
        largest = scores.amax(-1)
        p = torch.softmax(scores, -1)
        lse = largest - p.amax(-1).log_()
        if mask is not None or allowed is not None:
            unseen = largest == -math.inf
            p.masked_fill_(unseen.unsqueeze(-1), 0.0)
            lse.masked_fill_(unseen, math.inf)
        return p, lse


def of_part(x: Tensor, part: Part, rows: slice) -> Tensor:
    """The part of a tensor ``[B, H, T, ..]``, or of one whose first three dimensions may be 1."""
    index = (slice(None) if size == 1 else own for size, own in zip(x.shape, (*part, rows), strict=False))
    return x[tuple(index)]


def run_attention_backward(
    call: Attention, o: Tensor, grad_o: Tensor | None, grad_lse: Tensor | None, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` operands in the compute dtype, in the operands' shapes.

    o and grad_o ``[B, T, H, V]``, grad_lse ``[B, H, T]``; a gradient that is None stands for zeros.
    """
    if call.block_table is not None:
        raise ArgumentError("a paged cache has no gradients")
    found = {name: torch.zeros_like(getattr(call, name), dtype=call.dtype) for name in wanted}
    if 0 not in (call.q.numel(), call.latent.numel(), o.numel()):
        _Backward(Rows.of(call), o, grad_o, grad_lse, found).run()
    return found


class _Backward:
    """Gradients of one call, one block of queries after the other, into ``found``."""

    def __init__(
        self, rows: Rows, o: Tensor, grad_o: Tensor | None, grad_lse: Tensor | None, found: dict[str, Tensor]
    ) -> None:
        self.x, self.call, self.found, dtype = rows, rows.call, found, rows.call.dtype
        o = o.to(dtype).transpose(1, 2)
        self.grad_o = torch.zeros_like(o) if grad_o is None else grad_o.to(dtype).transpose(1, 2).contiguous()
        self.grad_lse = None if grad_lse is None else grad_lse.to(dtype).unsqueeze(-1)
        self.delta = (self.grad_o * o).sum(-1, keepdim=True)
        self.above = self.grad_o  # of what P is multiplied with V to
        if rows.absorbed and self.call.w_uv is not None:
            self.above = per_head(self.grad_o, self.call.weight("w_uv"))
        self.grad_q, self.grad_k, self.grad_v = (torch.zeros_like(x) for x in (rows.q, rows.k, rows.v))
        self.context = torch.zeros_like(self.above) if rows.absorbed and "w_uv" in found else None

    def run(self) -> None:
        for part in self.x.parts():
            for rows in self.x.blocks():
                self.block(part, rows)
        self.of_queries()
        self.of_cache()

    def block(self, part: Part, rows: slice) -> None:
        p, lse = self.x.weights(part, rows)
        keys, here = slice(p.shape[-1]), (*part, rows)
        k, v = of_part(self.x.k, part, keys), of_part(self.x.v, part, keys)
        ds = shared_product(self.above[here], v.mT).sub_(self.delta[here]).mul_(p)
        weights = p
        if self.call.sinks is not None:
            sinks = self.call.sinks.to(p.dtype)[part[1], None]
            kept = torch.sigmoid(lse - sinks).unsqueeze(-1)
            p, ds = p * kept, ds * kept
            if "sinks" in self.found:
                share = torch.sigmoid(sinks - lse).unsqueeze(-1) * self.delta[here]
                self.found["sinks"][part[1]] -= share.sum((0, 2, 3))
        if self.grad_lse is not None:
            ds += weights * self.grad_lse[here]
        self.grad_q[here] = shared_product(ds, k)
        _add_product(of_part(self.grad_k, part, keys), ds, self.x.q[here])
        _add_product(of_part(self.grad_v, part, keys), p, self.above[here])
        if self.context is not None:
            self.context[here] = shared_product(p, v)
        if "mask" in self.found:
            own = of_part(self.found["mask"], part, rows)[..., keys]
            own += ds.sum_to_size(own.shape)

    def of_queries(self) -> None:
        call, found, absorbed = self.call, self.found, self.x.absorbed
        width = self.grad_q.shape[-1] - (0 if call.q_rope is None else call.q_rope.shape[-1])
        grad_q = self.grad_q[..., :width]
        if "q_rope" in found:
            found["q_rope"] = (self.grad_q[..., width:] * call.scale).transpose(1, 2)
        if absorbed and "w_uk" in found:
            found["w_uk"] = torch.einsum("bthn,bhtr->hnr", call.q.to(call.dtype) * call.scale, grad_q)
        if absorbed and call.w_uk is not None:
            grad_q = per_head(grad_q, call.weight("w_uk").mT)
        if "q" in found:
            found["q"] = (grad_q * call.scale).transpose(1, 2)
        if self.context is not None:
            found["w_uv"] = torch.einsum("bhtv,bhtr->hvr", self.grad_o, self.context)

    def of_cache(self) -> None:
        call, found = self.call, self.found
        width = self.grad_k.shape[-1] - (0 if call.k_rope is None else call.k_rope.shape[-1])
        grad_k = self.grad_k[..., :width]
        if "k_rope" in found:
            found["k_rope"] = self.grad_k[..., width:].sum(1)
        if self.x.absorbed:
            if "latent" in found:
                found["latent"] = (grad_k + self.grad_v).squeeze(1)
            return
        latent = call.read((0, call.width))[0].squeeze(1)
        for name, grad in (("w_uk", grad_k), ("w_uv", self.grad_v)):
            if name in found:
                found[name] = torch.einsum("bhso,bsr->hor", grad, latent)
        if "latent" in found:
            weight = torch.cat([call.weight("w_uk"), call.weight("w_uv")], 1).flatten(0, 1)
            found["latent"] = torch.cat([grad_k, self.grad_v], -1).transpose(1, 2).flatten(2) @ weight


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """``total += x^T y`` for every head, or summed over heads where all have one total."""
    if total.shape[1] == 1 < x.shape[1]:
        x, y = x.flatten(1, 2).unsqueeze(1), y.flatten(1, 2).unsqueeze(1)
    total.view(-1, *total.shape[2:]).baddbmm_(x.flatten(0, 1).mT, y.flatten(0, 1))
