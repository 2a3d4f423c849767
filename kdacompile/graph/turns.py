"""Sizes at which a comparison in a region turns: found from the instances looked at so far, to be looked at as well."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kdacompile.graph.ir import Op
from kdacompile.graph.positions import Edge, edges

Sizes = Mapping[Any, int]


class Turns:
    """The edges of one region at its instances."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self.ops = list(ops)
        self.own: list[Edge] = []
        self.seen: list[tuple[Sizes, list[Edge]]] = []

    def add(self, sizes: Sizes, ops: Iterable[Op]) -> str | None:
        """Take an instance of the region in; the reason why it is not comparable. Raises ``NotAffine`` for
        constants that are not known at other sizes.
        """
        there = list(ops)
        own, found = edges(self.ops, there), edges(there, self.ops)
        if own is None or found is None or len(own) != len(found) or (self.seen and len(own) != len(self.own)):
            return "the region consists of other operators at other sizes"
        self.own = own
        self.seen.append((sizes, found))
        return None

    def further(self, hints: Sizes, symbols: Iterable[Any]) -> Iterator[dict[Any, int]]:
        """Sizes at which comparisons that have come out one way so far come out the other way, the farthest last."""
        farthest: dict[float, dict[Any, int]] = {}
        for index, edge in enumerate(self.own):
            outcomes = edge.outcomes.union(*(found[index].outcomes for _, found in self.seen))
            if len(outcomes) > 1:
                continue
            for sizes, found in self.seen:
                before, after = _margin(edge), _margin(found[index])
                if before == after or math.inf in (before, after):
                    continue
                times = before / (before - after)
                wanted = {symbol: hints[symbol] + _away(times * (sizes[symbol] - hints[symbol])) for symbol in symbols}
                if min(wanted.values()) >= 2:
                    farthest[max(wanted.values())] = wanted
        yield from (farthest[size] for size in sorted(farthest))


def _away(number: float) -> int:
    """A little farther than ``number``, in whole sizes."""
    return math.ceil(number) + 2 if number > 0 else math.floor(number)


def _margin(edge: Edge) -> float:
    """How far the difference is from coming out the other way."""
    if edge.least == edge.most == 0 and edge.relation in ("eq", "ne"):
        return math.inf
    below = edge.most < 0 or (edge.most == 0 and edge.relation in ("le", "gt"))
    inside = edge.relation in ("eq", "ne", "lt", "ge") if below else edge.relation in ("eq", "ne", "le", "gt")
    return (-edge.most if below else edge.least) + (0 if inside else 1)
