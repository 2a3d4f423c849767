"""The gradients of MLA, block by block, with the scores computed again rather than kept.

With ``P = exp(S - lse)`` (sinks counted in), ``dP = dO V^T`` and ``delta = rowsum(dO * O)``::

    dV = P^T dO      dS = P * (dP - delta)      dQ = dS K      dK = dS^T Q

as in FlashAttention-2 (arXiv 2307.08691, algorithm 2). A gradient of lse, which is over the keys alone, adds
``exp(S - lse) * dlse`` to dS. In the absorbed form K and V are the latent, Q and dO are taken through the weights first
and the weights' gradients are formed from whole rows at the end; in the expanded form they are formed block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import ArgumentError
from .operands import operands
from .run_attention import Attention, expand, per_head, softmax_sums
from .tiles import shared_product

NAMES = tuple(operand.name for operand in operands(Attention) if operand.differentiable)
"""The operands that have gradients, in the op's order."""


def run_attention_backward(
    call: Attention, o: Tensor, lse: Tensor, grad_o: Tensor | None, grad_lse: Tensor | None, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` operands (of ``NAMES``) in the compute dtype, in the operands' shapes."""
    if call.block_table is not None:
        raise ArgumentError("a paged cache has no gradients")
    return _Backward(call, o, lse, grad_o, grad_lse, frozenset(wanted)).run()


class _Backward:
    """Gradients of one call, one block of keys after the other."""

    def __init__(
        self,
        call: Attention,
        o: Tensor,
        lse: Tensor,
        grad_o: Tensor | None,
        grad_lse: Tensor | None,
        wanted: frozenset[str],
    ) -> None:
        self.call, self.wanted, dtype = call, wanted, call.dtype
        self.absorbed = call.absorbed
        self.lse = lse.to(dtype).unsqueeze(-1)
        self.o = o.to(dtype).transpose(1, 2)
        self.grad_o = torch.zeros_like(self.o) if grad_o is None else grad_o.to(dtype).transpose(1, 2)
        self.grad_lse = None if grad_lse is None else grad_lse.to(dtype).unsqueeze(-1)
        self.delta = (self.grad_o * self.o).sum(-1, keepdim=True)
        self.largest, self.keys = self.lse, torch.ones_like(self.lse)
        if call.mask is not None and call.mask.is_floating_point():
            # Additive masks hide by huge numbers, beside which an lse forgets its sum: a row that is hidden as a whole
            # is an average all the same, and needs to know of how many.
            self.largest, self.keys = softmax_sums(call)
        self.total = self.keys
        if call.sinks is not None:
            self.total = self.keys + torch.exp(call.sinks.to(dtype)[:, None, None] - self.largest)
        self.grads = {name: self._zeros(name) for name in wanted}

    def _zeros(self, name: str) -> Tensor:
        like: Tensor = getattr(self.call, name)
        return torch.zeros(like.shape, dtype=self.call.dtype, device=like.device)

    def run(self) -> dict[str, Tensor]:
        call = self.call
        q, q_shared = call.queries(self.absorbed), call.shared_queries()
        grad_values = self.grad_o
        if self.absorbed and call.w_uv is not None:
            grad_values = per_head(self.grad_o, call.weight("w_uv"))
        grad_q = torch.zeros_like(q)
        grad_shared = None if q_shared is None else torch.zeros_like(q_shared)
        context = torch.zeros_like(q) if self.absorbed and "w_uv" in self.wanted else None
        for block in call.blocks():
            latent, rope = call.read(block)
            k = v = latent
            if not self.absorbed:
                k, v = expand(latent, call.weight("w_uk")), expand(latent, call.weight("w_uv"))
            grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
            grad_rope = None if rope is None else torch.zeros_like(rope)
            for queries in call.query_blocks():
                if not call.seen(queries, block):
                    continue
                rows = (slice(None), slice(None), slice(*queries))
                p, ds = self.weights(queries, block, q, q_shared, k, rope, v, grad_values)
                grad_q[rows] += shared_product(ds, k)
                grad_k += _folded(ds, q[rows], k.shape[1])
                grad_v += _folded(p, grad_values[rows], v.shape[1])
                if grad_shared is not None and grad_rope is not None and q_shared is not None and rope is not None:
                    grad_shared[rows] += shared_product(ds, rope)
                    grad_rope += _folded(ds, q_shared[rows], 1)
                if context is not None:
                    context[rows] += shared_product(p, v)
            self.store_block(block, latent, grad_k, grad_v, grad_rope)
        self.store_queries(q, grad_q, grad_shared, context)
        return self.grads

    def weights(
        self,
        queries: tuple[int, int],
        block: tuple[int, int],
        q: Tensor,
        q_shared: Tensor | None,
        k: Tensor,
        rope: Tensor | None,
        v: Tensor,
        grad_values: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """P and dS of one block of queries against one block of the cache."""
        rows = (slice(None), slice(None), slice(*queries))
        scores = shared_product(q[rows], k.mT)
        if q_shared is not None and rope is not None:
            scores += shared_product(q_shared[rows], rope.mT)
        bias = self.call.bias(queries, block)
        if bias is not None:
            scores += bias
        weights = torch.exp(scores - self.largest[rows])
        p = weights / self.total[rows]
        ds = p * (shared_product(grad_values[rows], v.mT) - self.delta[rows])
        if self.grad_lse is not None:
            ds += weights / self.keys[rows] * self.grad_lse[rows]
        if "mask" in self.wanted:
            mask = self.grads["mask"]
            part = mask[:, :, rows[2] if mask.shape[2] > 1 else slice(None), slice(*block)]
            part += ds.sum_to_size(part.shape)
        return p, ds

    def store_block(
        self, block: tuple[int, int], latent: Tensor, grad_k: Tensor, grad_v: Tensor, grad_rope: Tensor | None
    ) -> None:
        """What one block of the cache gets, and in the expanded form the weights through it."""
        call, grads, place = self.call, self.grads, (slice(None), slice(*block))
        if "k_rope" in grads and grad_rope is not None:
            grads["k_rope"][place] += grad_rope.squeeze(1)
        if self.absorbed:
            if "latent" in grads:
                grads["latent"][place] += (grad_k + grad_v).squeeze(1)
            return
        for name, grad in (("w_uk", grad_k), ("w_uv", grad_v)):
            if name in grads:
                grads[name] += torch.einsum("bhco,bcr->hor", grad, latent.squeeze(1))
            if "latent" in grads:
                grads["latent"][place] += torch.einsum("bhco,hor->bcr", grad, call.weight(name))

    def store_queries(self, q: Tensor, grad_q: Tensor, grad_shared: Tensor | None, context: Tensor | None) -> None:
        call, grads = self.call, self.grads
        if self.absorbed and call.w_uk is not None:
            if "w_uk" in grads:
                plain = call.q.to(call.dtype).transpose(1, 2) * call.scale
                grads["w_uk"] += torch.einsum("bhtn,bhtr->hnr", plain, grad_q)
            grad_q = per_head(grad_q, call.weight("w_uk").mT)
        if "q" in grads:
            grads["q"] += (grad_q * call.scale).transpose(1, 2)
        if "q_rope" in grads and grad_shared is not None:
            grads["q_rope"] += (grad_shared * call.scale).transpose(1, 2)
        if context is not None:
            grads["w_uv"] += torch.einsum("bhtv,bhtr->hvr", self.grad_o, context)
        if "sinks" in grads and call.sinks is not None:
            share = torch.exp(call.sinks.to(call.dtype)[:, None, None] - self.largest) / self.total
            grads["sinks"] -= (share * self.delta).sum((0, 2, 3))


def _folded(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """``x^T y`` per head, summed over heads where ``heads`` is one."""
    if heads == 1 and x.shape[1] > 1:
        x, y = x.flatten(1, 2).unsqueeze(1), y.flatten(1, 2).unsqueeze(1)
    return x.mT @ y
