"""Kimi Delta Attention (KDA).

    S_t = (I - b_t k_t k_t^T) diag(exp g_t) S_{t-1} + b_t k_t v_t^T,  g_t in R^K
    o_t = scale * S_t^T q_t

One decay per token, head and channel, then the delta rule: the old value under k_t is replaced by v_t, by a share b_t.
Source: Kimi Linear, arXiv 2510.26692, eq. 1.
"""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.row import Pattern

KDA = Pattern(
    name="kda",
    title="Kimi Delta Attention (KDA)",
    equation="S_t = (I - b_t k_t k_t^T) diag(exp g_t) S_{t-1} + b_t k_t v_t^T,  g_t in R^K",
    gates=("channel",),
    delta=True,
    source="Kimi Linear, arXiv 2510.26692, eq. 1",
)
