"""The linear-attention family: one row per pattern, each with its equation in a file of its own."""

from __future__ import annotations

from kdacompile.patterns.recurrence.family.delta_rule import DELTA_RULE
from kdacompile.patterns.recurrence.family.gated_delta_rule import GATED_DELTA_RULE
from kdacompile.patterns.recurrence.family.gla import GLA
from kdacompile.patterns.recurrence.family.kda import KDA
from kdacompile.patterns.recurrence.family.linear_attention import LINEAR_ATTENTION
from kdacompile.patterns.recurrence.family.retention import RETENTION
from kdacompile.patterns.recurrence.family.row import Pattern
from kdacompile.patterns.recurrence.family.simple_gla import SIMPLE_GLA

FAMILY: tuple[Pattern, ...] = (KDA, GATED_DELTA_RULE, DELTA_RULE, GLA, SIMPLE_GLA, RETENTION, LINEAR_ATTENTION)


def pattern_of(gate: str, *, delta: bool) -> Pattern:
    """The row for a kind of gate (none, head, token, channel) with or without the delta term."""
    return next(row for row in FAMILY if row.delta == delta and gate in row.gates)


__all__ = ["FAMILY", "Pattern", "pattern_of"]
