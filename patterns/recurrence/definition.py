"""The executable definition of the whole linear-attention family, one token at a time.

Per head, with state ``S`` in R^{K x V} and rows ``q_t, k_t`` in R^K, ``v_t`` in R^V::

    S_t = (I - b_t k_t k_t^T) diag(exp g_t) S_{t-1} + b_t k_t v_t^T
    o_t = scale * S_t^T q_t

Without the delta term the factor ``(I - b_t k_t k_t^T)`` is dropped: ``S_t = diag(exp g_t) S_{t-1} + b_t k_t v_t^T``.
A token may read the state ``before`` its own decay and write, or ``between`` the two; with a bonus u in R^K (RWKV-5 and
6) it reads its own write apart::

    o_t = scale * S_{t-1}^T q_t        o_t = scale * (diag(exp g_t) S_{t-1})^T q_t
    o_t = scale * (S_{t-1} + diag(u) k_t v_t^T)^T q_t

With n writes a token (gated DeltaProduct) the state decays before the first of them and is read after the last::

    S_t = (I - b_tn k_tn k_tn^T) .. (I - b_t1 k_t1 k_t1^T) diag(exp g_t) S_{t-1} + what is written

Sources: Kimi Linear (arXiv 2510.26692, eq. 1), Gated DeltaNet (arXiv 2412.06464, eq. 10), GLA (arXiv 2312.06635, eq.
3), Mamba-2 (arXiv 2405.21060, eq. 16), RetNet (arXiv 2307.08621, eq. 6), RWKV-6 (arXiv 2404.05892, eq. 16),
DeltaProduct (arXiv 2502.10297, eq. 3).

This file is the oracle of every proof, kernel and test.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reads = Literal["after", "before", "between"]
"""When a token reads the state: after its own decay and write, before both, or between them."""


def token_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    delta: bool,
    scale: float = 1.0,
    reads: Reads = "after",
    writes: int = 1,
    steps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in float64.

    Shapes: q, k ``[B, T, H, K]``; v ``[B, T, HV, V]`` with HV a multiple of H (value head ``h`` reads key head
    ``h // (HV // H)``); decay, the *factor* ``exp(g)`` in [0, 1], any shape that broadcasts to ``[B, T, HV, K]``;
    beta broadcasts to ``[B, T, HV]``; initial_state ``[B, HV, K, V]``; bonus broadcasts to ``[HV, K]`` (with
    reads "before"). With ``writes`` per token, k, v and beta have ``writes * T`` rows, those of a token one after the
    other. ``steps`` stops after that many tokens.
    Returns o ``[B, steps, HV, V]`` and the state after the last token, both float64.
    """
    batch, length, _, width = q.shape
    value_heads = v.shape[2]

    def per_token(x: Tensor) -> tuple[Tensor, ...]:
        """``[B, T, h, D]`` as a ``[B * HV, 1, D]`` for every token."""
        x = x.double().repeat_interleave(value_heads // x.shape[2], dim=2)
        return x.permute(1, 0, 2, 3).reshape(-1, batch * value_heads, 1, x.shape[3]).unbind(0)

    steps = length if steps is None else min(steps, length)
    rows = steps * writes
    queries, keys, values = per_token(scale * q[:, :steps].double()), per_token(k[:, :rows]), per_token(v[:, :rows])
    factors = None if decay is None else per_token(decay.expand(batch, length, value_heads, width)[:, :steps])
    weights = (
        None if beta is None else per_token(beta.expand(batch, length * writes, value_heads).unsqueeze(3)[:, :rows])
    )
    state = v.new_zeros(batch, value_heads, width, v.shape[3], dtype=torch.float64)
    if initial_state is not None:
        state = state + initial_state.double()
    state = state.flatten(0, 1)
    own = None if bonus is None else bonus.double().expand(value_heads, width).repeat(batch, 1).unsqueeze(1)
    outputs = []
    for row, (key, write) in enumerate(zip(keys, values, strict=True)):
        t, turn = divmod(row, writes)
        if reads == "before":
            outputs.append(queries[t] @ state)
        if own is not None:
            outputs[-1] = outputs[-1] + (queries[t] * own * key).sum(-1, keepdim=True) * write
        if factors is not None and turn == 0:
            state = state * factors[t].mT
        if reads == "between":
            outputs.append(queries[t] @ state)
        if delta:
            write = write - key @ state
        if weights is not None:
            write = write * weights[row]
        state = torch.addcmul(state, key.mT, write)  # the outer product of key and write
        if reads == "after" and turn == writes - 1:
            outputs.append(queries[t] @ state)
    o = torch.stack(outputs).view(-1, batch, value_heads, v.shape[3]).transpose(0, 1) if outputs else v[:, :0].double()
    return o, state.unflatten(0, (batch, value_heads))
