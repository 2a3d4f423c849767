"""The executable definition of the whole linear-attention family, one token at a time.

Per head, with state ``S`` in R^{K x V} and rows ``q_t, k_t`` in R^K, ``v_t`` in R^V::

    S_t = (I - b_t k_t k_t^T) diag(exp g_t) S_{t-1} + b_t k_t v_t^T
    o_t = scale * S_t^T q_t

Without the delta term the factor ``(I - b_t k_t k_t^T)`` is dropped: ``S_t = diag(exp g_t) S_{t-1} + b_t k_t v_t^T``.
Sources: Kimi Linear (arXiv 2510.26692, eq. 1), Gated DeltaNet (arXiv 2412.06464, eq. 10), GLA (arXiv 2312.06635, eq.
3), Mamba-2 (arXiv 2405.21060, eq. 16), RetNet (arXiv 2307.08621, eq. 6).

This file is the oracle of every proof, kernel and test; it is written to be read, not to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    delta: bool,
    scale: float = 1.0,
    steps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence in float64.

    Shapes: q, k ``[B, T, H, K]``; v ``[B, T, HV, V]`` with HV a multiple of H (value head ``h`` reads key head
    ``h // (HV // H)``); decay, the *factor* ``exp(g)`` in [0, 1], any shape that broadcasts to ``[B, T, HV, K]``;
    beta broadcasts to ``[B, T, HV]``; initial_state ``[B, HV, K, V]``. ``steps`` stops after that many tokens.
    Returns o ``[B, steps, HV, V]`` and the state after the last token, both float64.
    """
    batch, length, heads, _ = q.shape
    value_heads = v.shape[2]
    groups = value_heads // heads
    q, k = (x.double().repeat_interleave(groups, dim=2) for x in (q, k))
    v = v.double()
    state = v.new_zeros(batch, value_heads, q.shape[-1], v.shape[-1])
    if initial_state is not None:
        state = state + initial_state.double()
    if decay is not None:
        decay = decay.double().expand(batch, length, value_heads, q.shape[-1])
    if beta is not None:
        beta = beta.double().expand(batch, length, value_heads)
    outputs = []
    for t in range(length if steps is None else min(steps, length)):
        if decay is not None:
            state = state * decay[:, t, :, :, None]
        write = v[:, t]
        if delta:
            write = write - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        if beta is not None:
            write = write * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * write[:, :, None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1) if outputs else v[:, :0], state
