"""The executable definition of MLA: attention over a latent, with the keys and values it stands for.

With the latent ``c_s`` in R^R, one rotated key ``r_s`` in R^D for all heads, and per head ``W_UK`` in R^{N x R},
``W_UV`` in R^{V x R}::

    k_s = [W_UK c_s | r_s]      v_s = W_UV c_s
    o_t = softmax_s(scale * q_t . k_s + mask_ts) v

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1). A sink adds ``exp(sink)`` to the softmax's denominator. Without
weights the latent itself is key and value (the absorbed form).

This file is the oracle of every proof, kernel and test of MLA; it is written to be read, not to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor


def latent_attention(
    q: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    w_uk: Tensor | None,
    w_uv: Tensor | None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """o ``[B, T, H, V]`` and lse ``[B, H, T]`` (over the keys, without sinks), both float64.

    q ``[B, T, H, N]``, q_rope ``[B, T, H, D]``, latent ``[B, S, R]``, k_rope ``[B, S, D]``, w_uk ``[H, N, R]``, w_uv
    ``[H, V, R]``; with block_table ``[B, pages]`` latent and k_rope are ``[P, page, ..]``. mask, bool (True: may be
    seen) or additive, broadcasts to ``[B, H, T, S]``. Causal: query t of T sees the tokens up to ``length - T + t``.
    """
    outputs, sums = [], []
    for b in range(q.shape[0]):
        own, rope = (_owned(x, b, lengths, block_table) for x in (latent, k_rope))
        assert own is not None
        one, lse = _one_request(
            q[b].double(),
            None if q_rope is None else q_rope[b].double(),
            own,
            rope,
            w_uk,
            w_uv,
            None if mask is None else mask[b % mask.shape[0], ..., : own.shape[0]],
            sinks,
            scale,
            causal,
        )
        outputs.append(one)
        sums.append(lse)
    return torch.stack(outputs), torch.stack(sums)


def _owned(cache: Tensor | None, b: int, lengths: Tensor | None, block_table: Tensor | None) -> Tensor | None:
    """The tokens of one request, float64."""
    if cache is None:
        return None
    if block_table is None:
        rows = cache[b]
        return (rows if lengths is None else rows[: int(lengths[b])]).double()
    page = cache.shape[1]
    length = block_table.shape[1] * page if lengths is None else int(lengths[b])
    pages = block_table[b, : -(-length // page)].long()
    return cache[pages].flatten(0, 1)[:length].double()


def _one_request(
    q: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    rope: Tensor | None,
    w_uk: Tensor | None,
    w_uv: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    tokens, length = q.shape[0], latent.shape[0]
    keys = latent[None] if w_uk is None else torch.einsum("hnr,sr->hsn", w_uk.double(), latent)
    values = latent[None] if w_uv is None else torch.einsum("hvr,sr->hsv", w_uv.double(), latent)
    scores = torch.einsum("thn,hsn->hts", q, keys.expand(q.shape[1], -1, -1))
    if q_rope is not None and rope is not None:
        scores = scores + torch.einsum("thd,sd->hts", q_rope, rope)
    scores = scores * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.double()
    if causal:
        position = torch.arange(tokens, device=q.device)[:, None] + length - tokens
        scores = scores.masked_fill(torch.arange(length, device=q.device) > position, -torch.inf)
    lse = torch.logsumexp(scores, -1) if length else scores.new_full(scores.shape[:2], -torch.inf)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
    weights = torch.exp(scores - total.masked_fill(lse == -torch.inf, 0.0)[..., None])
    o = torch.einsum("hts,hsv->thv", weights, values.expand(q.shape[1], -1, -1))
    return o, lse.masked_fill(lse == -torch.inf, torch.inf)
