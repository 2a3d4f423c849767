"""Rules that write a functional graph in another way: one a file, its equation first.

A rule redefines values, by an ``Edit`` of the functional graph: what the graph computes stays the same, and the model's
own graph is not touched.
"""

from __future__ import annotations

from kdacompile.graph.edit import Rule
from kdacompile.patterns.canonical import (
    adapters,
    columns,
    emptied_states,
    hoist,
    log_gates,
    normalised_masks,
    outer_products,
    packed,
    padded_states,
    powers,
    quotients,
    relaid,
    row_factors,
    running_maxima,
    shared,
    stabilised,
)

RULES: tuple[Rule, ...] = (
    shared.apply,
    outer_products.apply,
    log_gates.apply,
    powers.apply,
    stabilised.apply,
    running_maxima.apply,
    relaid.apply,
    emptied_states.apply_all,
    padded_states.apply,
    hoist.apply,
    normalised_masks.apply,
    row_factors.apply,
    hoist.apply_across,
    packed.apply,
    quotients.apply,
)
"""In the order in which they are tried, each on what the ones before it have left."""

FIRST: tuple[Rule, ...] = (emptied_states.apply, hoist.apply)
"""Before anything is looked for, the second where the first has changed something: a loop that empties its state falls
into one step a token otherwise.
"""

ON_TRIAL: tuple[tuple[Rule, ...], ...] = (
    (shared.apply,),
    (powers.apply,),
    (emptied_states.apply_all, hoist.apply),
    (padded_states.apply, hoist.apply),
    (hoist.apply,),
)
"""Those for functions that may become one op, of which many more are looked at than are: what comes later in a row only
where what is before it has changed something.
"""


may_take_loops_apart = hoist.may_help

FOR_ATTENTION: tuple[Rule, ...] = (adapters.apply, columns.apply)
"""For attention, which is searched before the others."""
