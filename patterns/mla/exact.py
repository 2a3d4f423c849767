"""Latent attention over the prime fields: expanded and absorbed forms are one function, and what differs is another.

Queries, latents, rotated keys and the weights of the keys are residues modulo R, where scores are sums of products; an
exponential makes them residues modulo P, and the softmax is a quotient of sums there. A maximum that is subtracted is
any number: it cancels, or the region is not the softmax. A token that a mask hides has the exponential zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kdacompile.patterns.engine import field
from kdacompile.patterns.engine.field import P, R, matmul
from kdacompile.patterns.engine.meanings import Field, Residues, exponential

Operands = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""q, q_rope, latent, k_rope, w_uk and w_uv, as the oracle takes them."""


def latent_attention(
    operands: Mapping[int, Operands],
    masks: list[Residues],
    sinks: Tensor | None,
    exponents: Field,
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """o ``[B, T, H, V]`` and the exponential of lse ``[B, H, T]``, modulo P, of operands modulo P and R.

    ``masks`` (modulo R) broadcast to ``[B, H, T, S]``.
    """
    q, q_rope, latent, k_rope, w_uk, _ = operands[R]
    queries, tokens = q.transpose(1, 2), latent.unsqueeze(1)
    keys = tokens if w_uk is None else matmul(tokens, w_uk.mT, R)
    scores = matmul(queries, keys.mT, R)
    if q_rope is not None and k_rope is not None:
        scores = (scores + matmul(q_rope.transpose(1, 2), k_rope.unsqueeze(1).mT, R)) % R
    scores = scores * exponents.numbers.read(scale, R) % R
    gone = torch.zeros_like(scores, dtype=torch.bool)
    for mask in masks:
        scores = (scores + mask.x) % R
        gone = gone if mask.gone is None else gone | mask.gone
    if causal:
        count, length = scores.shape[-2:]
        gone = gone | torch.ones(count, length, dtype=torch.bool).triu(1 + length - count)
    weights = exponential(exponents, Residues(scores, gone)).x
    own = total = weights.sum(-1, keepdim=True) % P
    if sinks is not None:
        total = (total + field.exp(sinks)[:, None, None]) % P
    values, w_uv = operands[P][2].unsqueeze(1), operands[P][5]
    values = values if w_uv is None else matmul(values, w_uv.mT, P)
    return (matmul(weights, values, P) * field.inverse(total, P) % P).transpose(1, 2), own.squeeze(-1)
