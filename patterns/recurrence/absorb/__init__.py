"""What stands upstream of a region and belongs to the op: casts, l2norm, scale, gate activation, sigmoid, head repeats.

One rule per file, its equation first. A rule moves roles up to tensors the Dynamo graph has by name and turns on the
op's option for what lies between; it does so only where the two are the same function. Rules run until none applies:
what one uncovers, the next may take.
"""

from __future__ import annotations

from kdacompile.patterns.engine.evaluate import one_thread
from kdacompile.patterns.recurrence.absorb.casts import Rule, absorb_casts
from kdacompile.patterns.recurrence.absorb.dt_bias import absorb_dt_bias
from kdacompile.patterns.recurrence.absorb.gate import absorb_gate
from kdacompile.patterns.recurrence.absorb.l2norm import absorb_l2norm
from kdacompile.patterns.recurrence.absorb.repeat import absorb_repeat
from kdacompile.patterns.recurrence.absorb.scale import absorb_scale
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.absorb.sigmoid_beta import absorb_sigmoid_beta
from kdacompile.patterns.recurrence.roles import RecurrenceMatch

RULES: tuple[Rule, ...] = (
    absorb_casts,
    absorb_l2norm,
    absorb_scale,
    absorb_repeat,
    absorb_sigmoid_beta,
    absorb_gate,
    absorb_dt_bias,
)


WITH_BONUS: tuple[Rule, ...] = (absorb_casts, absorb_scale)
"""Beside the op stands a product of q, k and v as the region has them."""

BETWEEN: tuple[Rule, ...] = (absorb_casts, absorb_scale, absorb_sigmoid_beta)
"""The op gets queries that are decayed, for as many heads as there are decays."""


@one_thread()
def absorb(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch:
    """The match with everything upstream taken over that the op can do itself, as far as ``scope`` goes."""
    rules = RULES if match.binding.reads != "between" else BETWEEN
    rules = rules if "u" not in match.inputs else WITH_BONUS
    if match.binding.writes > 1 or match.binding.reads != "after":  # a filler in the place of a logit would decay
        rules = tuple(rule for rule in rules if rule is not absorb_gate)
    applied = True
    while applied:
        applied = False
        for rule in rules:
            taken = rule(match, scope)
            if taken is not None:
                match, applied = taken, True
    return match


__all__ = ["RULES", "Scope", "absorb"]
