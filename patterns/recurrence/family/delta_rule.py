"""Delta rule (DeltaNet).

    S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T
    o_t = scale * S_t^T q_t

No decay: only what is stored under k_t is replaced.
Source: DeltaNet, arXiv 2406.06484, eq. 2.
"""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.row import Pattern

DELTA_RULE = Pattern(
    name="delta_rule",
    title="Delta rule (DeltaNet)",
    equation="S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T",
    gates=("none",),
    delta=True,
    source="DeltaNet, arXiv 2406.06484, eq. 2",
)
