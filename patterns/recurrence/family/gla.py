"""Gated linear attention (GLA).

    S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,  g_t in R^K
    o_t = scale * S_t^T q_t

One decay per token, head and channel; values are added, nothing is replaced.
Source: GLA, arXiv 2312.06635, eq. 3.
"""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.row import Pattern

GLA = Pattern(
    name="gla",
    title="Gated linear attention (GLA)",
    equation="S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,  g_t in R^K",
    gates=("channel",),
    delta=False,
    source="GLA, arXiv 2312.06635, eq. 3",
)
