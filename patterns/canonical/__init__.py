"""Rules that write a functional graph in another way: one a file, its equation first.

A rule redefines values: what the graph computes stays the same, and the model's own graph is not touched. It is given
an ``Edit`` of the functional graph and the model's graph, whose calls are easier to read than their operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx

from kdacompile.graph.edit import Edit, NewCalls
from kdacompile.graph.ir import Graph
from kdacompile.patterns.canonical import (
    adapters,
    factors,
    hoist,
    log_gates,
    packed,
    quotients,
    relaid,
    row_sums,
    shared,
)

Rule = Callable[[Edit, fx.Graph], None]

RULES: tuple[Rule, ...] = (
    shared.apply,
    factors.apply,
    log_gates.apply,
    relaid.apply,
    hoist.apply,
    row_sums.apply,
    packed.apply,
    quotients.apply,
)
"""In the order in which they are tried, each on what the ones before it have left."""


def apply(rules: Iterable[Rule], functional: Graph, calls: NewCalls, graph: fx.Graph) -> bool:
    """Apply rules to the functional graph of ``graph``; True if one changed it."""
    changed, before = False, functional.calls
    for rule in rules:
        edit = Edit(functional, calls)
        rule(edit, graph)
        edit.finish()
        changed |= edit.changed
    functional.calls = calls if changed else before
    return changed


may_take_loops_apart = hoist.may_help

merge_adapters: Rule = adapters.apply
"""For attention, which is searched before these rules."""
