"""Prompts of MLA on the CPU: keys and values of every head once, then all keys that a block of queries may see.

With ``S = scale Q K^T + mask`` and a softmax over whole rows::

    P = softmax S      O = P V      lse = max S - log(max P)
    dV = P^T dO      dS = P * (dO V^T - rowsum(dO * O))      dQ = scale dS K      dK = scale dS^T Q

Scores of some heads and of ``ROWS`` queries at a time stay in the processor's cache, and a causal block skips the keys
after it. torch's FlashAttention, whose products are smaller and whose values have to be padded to the keys' width,
takes 1.1 to 1.6 times as long for 256 to 1024 tokens, as long for 2048 and for 128.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.lowering.attention_calls import joined, not_expanded
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch

ROWS = 128
"""Queries of a block."""
SCORES = 1 << 19
"""Scores that are worked on at a time, in elements: 2 MB."""

Part = tuple[slice, slice]


class BlockedAttention:
    """Masks too; without sinks, lengths or pages, and not in fp64, where the torch executor is the oracle."""

    name = "blocked"

    def declines(self, call: Attention) -> str | None:
        if torch.float64 in {call.q.dtype, call.latent.dtype}:
            return "the torch executor is the oracle in fp64"
        if 0 in (call.q.numel(), call.latent.numel()):
            return "there is nothing to attend to"
        return not_expanded(call, self.name, without=("sinks", "lengths", "block_table"))

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` in the call's ``out_dtype`` and lse ``[B, H, T]`` in fp32."""
        x = _Expanded.of(call)
        o = x.q.new_empty(*x.q.shape[:3], x.v.shape[-1])
        lse = x.q.new_empty(x.q.shape[:3])
        for part in x.parts():
            for rows in x.blocks():
                p, own = x.weights(part, rows)
                o[part][:, :, rows] = p @ x.v[part][:, :, : p.shape[-1]]
                lse[part][:, :, rows] = own
        return o.transpose(1, 2).to(call.out_dtype).contiguous(), lse

    def gradients(
        self, call: Attention, o: Tensor, lse: Tensor, grad_o: Tensor, wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Of the ``wanted`` operands, in fp32; o and grad_o ``[B, T, H, V]``."""
        x = _Expanded.of(call)
        o, grad_o = (y.to(x.q.dtype).transpose(1, 2).contiguous() for y in (o, grad_o))
        delta = (grad_o * o).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.empty_like(x.q), torch.zeros_like(x.k), torch.zeros_like(x.v)
        grad_mask = torch.zeros_like(call.mask, dtype=x.q.dtype) if call.mask is not None and "mask" in wanted else None
        for part in x.parts():
            for rows in x.blocks():
                p, _ = x.weights(part, rows)
                keys = p.shape[-1]
                above, q = grad_o[part][:, :, rows], x.q[part][:, :, rows]
                ds = (above @ x.v[part][:, :, :keys].mT).sub_(delta[part][:, :, rows]).mul_(p)
                grad_q[part][:, :, rows] = ds @ x.k[part][:, :, :keys]
                _add_product(grad_k[part][:, :, :keys], ds, q)
                _add_product(grad_v[part][:, :, :keys], p, above)
                if grad_mask is not None:
                    own = _of_mask(grad_mask, part, rows, keys)
                    own += ds.sum_to_size(own.shape)
        found = x.of_operands(call, grad_q, grad_k, grad_v, wanted)
        return found if grad_mask is None else found | {"mask": grad_mask}


BLOCKED = BlockedAttention()


def choose_attention(call: Attention) -> BlockedAttention | None:
    """What takes a call of MLA, and its gradients; the torch executor does the rest."""
    return BLOCKED if BLOCKED.declines(call) is None else None


@dataclass(frozen=True)
class _Expanded:
    """A call in fp32: q, scaled, ``[B, H, T, N + D]``, k ``[B, H, S, N + D]``, v ``[B, H, S, V]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    nope: int
    weight: Tensor
    """``w_uk`` and ``w_uv`` of every head below each other, ``[H, N + V, R]``."""

    @classmethod
    def of(cls, call: Attention) -> _Expanded:
        assert call.w_uk is not None and call.w_uv is not None
        weight = joined(call.w_uk, call.w_uv, 1).to(call.dtype)
        heads, nope, _ = call.w_uk.shape
        latent = call.latent.to(call.dtype)
        rows = (latent.flatten(0, 1) @ weight.flatten(0, 1).mT).view(*latent.shape[:2], heads, -1).transpose(1, 2)
        k, v = rows[..., :nope], rows[..., nope:]
        q = call.q
        if call.q_rope is not None and call.k_rope is not None:
            q = joined(call.q, call.q_rope, -1)
            k = torch.cat([k, call.k_rope.to(call.dtype).unsqueeze(1).expand(-1, heads, -1, -1)], -1)
        q = q.to(call.dtype).transpose(1, 2) * call.scale
        return cls(q.contiguous(), k.contiguous(), v.contiguous(), call.mask, call.causal, call.scale, nope, weight)

    def parts(self) -> Iterator[Part]:
        """Requests and heads that are worked on at a time: several requests, or some heads of one."""
        batch, heads, tokens, _ = self.q.shape
        most = max(1, SCORES // (min(tokens, ROWS) * self.k.shape[2]))
        if most >= heads:
            step = most // heads
            yield from ((slice(at, at + step), slice(None)) for at in range(0, batch, step))
        else:
            heads_at = [slice(at, at + most) for at in range(0, heads, most)]
            yield from ((slice(b, b + 1), some) for b in range(batch) for some in heads_at)

    def blocks(self) -> Iterator[slice]:
        tokens = self.q.shape[2]
        return (slice(at, min(at + ROWS, tokens)) for at in range(0, tokens, ROWS))

    def weights(self, part: Part, rows: slice) -> tuple[Tensor, Tensor]:
        """P of a block, ``[b, h, t, keys]``, and lse ``[b, h, t]``; a query that sees nothing has zeros, and +inf."""
        tokens, cached = self.q.shape[2], self.k.shape[2]
        first = cached - tokens + rows.start  # the last key that the block's first query sees
        keys = cached - tokens + rows.stop if self.causal else cached
        scores = self.q[part][:, :, rows] @ self.k[part][:, :, :keys].mT
        if self.mask is not None:
            own = _of_mask(self.mask, part, rows, keys)
            scores = scores.masked_fill_(~own, -math.inf) if own.dtype is torch.bool else scores.add_(own)
        if self.causal:
            later = scores.new_ones(rows.stop - rows.start, keys - first, dtype=torch.bool).triu_(1)
            scores[..., first:].masked_fill_(later, -math.inf)
        largest = scores.amax(-1)
        p = torch.softmax(scores, -1)
        lse = largest - p.amax(-1).log_()
        if self.mask is not None:
            unseen = largest == -math.inf
            p.masked_fill_(unseen.unsqueeze(-1), 0.0)
            lse.masked_fill_(unseen, math.inf)
        return p, lse

    def of_operands(
        self, call: Attention, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Gradients of the op's operands from those of what this holds."""
        latent = call.latent.to(call.dtype)
        grad_q, grad_nope = grad_q.transpose(1, 2) * self.scale, grad_k[..., : self.nope]
        found: dict[str, Tensor] = {"q": grad_q[..., : self.nope], "q_rope": grad_q[..., self.nope :]}
        if "k_rope" in wanted:
            found["k_rope"] = grad_k[..., self.nope :].sum(1)
        for name, grad in (("w_uk", grad_nope), ("w_uv", grad_v)):
            if name in wanted:
                found[name] = torch.einsum("bhso,bsr->hor", grad, latent)
        if "latent" in wanted:
            rows = torch.cat([grad_nope, grad_v], dim=-1).transpose(1, 2).flatten(2)
            found["latent"] = rows @ self.weight.flatten(0, 1)
        return {name: found[name] for name in wanted if name in found}


def _of_mask(mask: Tensor, part: Part, rows: slice, keys: int) -> Tensor:
    """The part of a mask ``[B, H, T, S]``, or of one whose dimensions before the last may be 1."""
    index = (slice(None) if size == 1 else own for size, own in zip(mask.shape, (*part, rows), strict=False))
    return mask[(*index, slice(keys))]


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """``total += x^T y`` for every head."""
    total.view(-1, *total.shape[2:]).baddbmm_(x.flatten(0, 1).mT, y.flatten(0, 1))
