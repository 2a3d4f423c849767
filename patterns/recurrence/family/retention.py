"""Retention, lightning attention.

    S_t = exp(g) S_{t-1} + k_t v_t^T,  g in R, the same for all tokens
    o_t = scale * S_t^T q_t

One constant decay per head.
Source: RetNet, arXiv 2307.08621, eq. 6; lightning attention, arXiv 2401.04658.
"""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.row import Pattern

RETENTION = Pattern(
    name="retention",
    title="Retention, lightning attention",
    equation="S_t = exp(g) S_{t-1} + k_t v_t^T,  g in R, the same for all tokens",
    gates=("head",),
    delta=False,
    source="RetNet, arXiv 2307.08621, eq. 6; lightning attention, arXiv 2401.04658",
)
