"""Linear attention.

    S_t = S_{t-1} + k_t v_t^T
    o_t = scale * S_t^T q_t

No decay. Feature maps on q and k stay outside.
Source: Katharopoulos et al., arXiv 2006.16236, eq. 18, without its normaliser.
"""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.row import Pattern

LINEAR_ATTENTION = Pattern(
    name="linear_attention",
    title="Linear attention",
    equation="S_t = S_{t-1} + k_t v_t^T",
    gates=("none",),
    delta=False,
    source="Katharopoulos et al., arXiv 2006.16236, eq. 18, without its normaliser",
)
