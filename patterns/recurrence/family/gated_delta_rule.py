"""Gated delta rule (GDN).

    S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,  g_t in R
    o_t = scale * S_t^T q_t

One decay per token and head (or a constant one per head), then the delta rule.
Source: Gated DeltaNet, arXiv 2412.06464, eq. 10.
"""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.row import Pattern

GATED_DELTA_RULE = Pattern(
    name="gated_delta_rule",
    title="Gated delta rule (GDN)",
    equation="S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,  g_t in R",
    gates=("token", "head"),
    delta=True,
    source="Gated DeltaNet, arXiv 2412.06464, eq. 10",
)
