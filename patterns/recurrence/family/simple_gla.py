"""Simple GLA, Mamba-2 SSD.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,  g_t in R
    o_t = scale * S_t^T q_t

One decay per token and head. In Mamba-2's names: q = C, k = B, v = dt * x, g = dt * A.
Source: Mamba-2, arXiv 2405.21060, eq. 16.
"""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.row import Pattern

SIMPLE_GLA = Pattern(
    name="simple_gla",
    title="Simple GLA, Mamba-2 SSD",
    equation="S_t = exp(g_t) S_{t-1} + k_t v_t^T,  g_t in R",
    gates=("token",),
    delta=False,
    source="Mamba-2, arXiv 2405.21060, eq. 16",
)
