"""Rules that write a functional graph in another way: one a file, its equation first.

A rule redefines values, by an ``Edit`` of the functional graph: what the graph computes stays the same, and the model's
own graph is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kdacompile.graph.edit import Edit, NewCalls
from kdacompile.graph.ir import Graph
from kdacompile.patterns.canonical import (
    adapters,
    columns,
    hoist,
    log_gates,
    outer_products,
    packed,
    quotients,
    relaid,
    row_factors,
    shared,
    stabilised,
)

Rule = Callable[[Edit], None]

RULES: tuple[Rule, ...] = (
    shared.apply,
    outer_products.apply,
    log_gates.apply,
    stabilised.apply,
    relaid.apply,
    hoist.apply,
    row_factors.apply,
    hoist.apply_across,
    packed.apply,
    quotients.apply,
)
"""In the order in which they are tried, each on what the ones before it have left."""

ON_TRIAL: tuple[Rule, ...] = (shared.apply,)
"""Those for functions that may become one op, of which many more are looked at than are."""


def apply(rules: Iterable[Rule], functional: Graph, calls: NewCalls) -> bool:
    """Apply rules to a functional graph; True if one changed it."""
    changed, before = False, functional.calls
    for rule in rules:
        edit = Edit(functional, calls)
        rule(edit)
        edit.finish()
        changed |= edit.changed
    functional.calls = calls if changed else before
    return changed


may_take_loops_apart = hoist.may_help

FOR_ATTENTION: tuple[Rule, ...] = (adapters.apply, columns.apply)
"""For attention, which is searched before the others."""
