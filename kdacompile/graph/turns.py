"""Sizes at which a comparison in a region comes out the other way, from what its instances have shown so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from kdacompile.graph.crossings import beyond_compositions, beyond_crossings, grown, line_of
from kdacompile.graph.ir import Op
from kdacompile.graph.positions import Edge, edges

FARTHEST = 4096
"""The largest number in a region's code beyond which another instance is still tried."""


class CannotInstantiate(Exception):
    """No other sizes are found that the graph's guards allow."""


class Turns:
    """The edges of one region at its instances."""

    def __init__(self, ops: Iterable[Op], *, apart: bool = False) -> None:
        """``apart``: sizes may change one by one (queries and cached tokens may not: there are never more queries)."""
        self.ops, self.apart = sorted(ops, key=lambda op: op.outs[0].index), apart
        self.own: list[Edge] = []
        self.seen: list[tuple[Mapping[Any, int], list[Edge]]] = []

    def add(self, sizes: Mapping[Any, int], ops: Iterable[Op]) -> str | None:
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

    def one_way(self) -> bool:
        """Whether some comparison has come out one way so far."""
        return any(True for _ in self._unturned())

    def _unturned(self) -> Iterator[tuple[int, Edge]]:
        for index, edge in enumerate(self.own):
            if len(edge.outcomes.union(*(found[index].outcomes for _, found in self.seen))) == 1:
                yield index, edge

    def further(
        self, hints: Mapping[Any, int], symbols: Collection[Any], possible: Callable[[Any, int], bool]
    ) -> Iterator[dict[Any, int]]:
        """Sizes at which comparisons that have come out one way so far come out the other way, the farthest last; of
        the symbols that were others in the instance that tells.
        """
        farthest: dict[float, dict[Any, int]] = {}
        for index, edge in self._unturned():
            for sizes, found in self.seen:
                before, after = _margin(edge), _margin(found[index])
                if before == after or math.inf in (before, after):
                    continue
                times = before / (before - after)
                moved = [symbol for symbol in symbols if sizes[symbol] != hints[symbol]]
                wanted = {symbol: hints[symbol] + _away(times * (sizes[symbol] - hints[symbol])) for symbol in moved}
                if wanted and all(possible(symbol, size) for symbol, size in wanted.items()):
                    farthest[max(wanted.values())] = wanted
        yield from (farthest[size] for size in sorted(farthest))

    def together(self, hints: Mapping[Any, int], symbols: Collection[Any]) -> dict[Any, int] | None:
        """Sizes beyond what comparisons come to together alone; None if these have been looked at.

        See :mod:`kdacompile.graph.crossings`.
        """
        if not self.seen:
            return None
        after, found = self.seen[0]
        before = {symbol: hints[symbol] for symbol in symbols}
        pairs = list(zip(self.own, found, strict=True))
        known = [
            (edge.value, line) for edge, there in pairs if (line := line_of(edge, there, before, after)) is not None
        ]
        lines = {value: line for value, line in sorted(known, key=lambda pair: pair[1].offset) if value is not None}
        composed = beyond_compositions(self.ops, lines)
        if composed > FARTHEST:
            raise CannotInstantiate("comparisons of positions follow each other, up to sizes too large to try")
        beyond = max(beyond_crossings(line for _, line in known), math.ceil(composed))
        places = [place for edge, there in pairs for place in grown(edge, there)]
        those = [{symbol for symbol in symbols if (hints[symbol], after[symbol]) == place} for place in places]
        at = [hints, *(sizes for sizes, _ in self.seen)]
        if all(those):  # batch and heads stay as they are
            moved = set[Any]().union(*those)
            left = set() if any(min(sizes[s] for s in moved) >= beyond for sizes in at if moved) else moved
        else:  # lengths that are padded: whatever has not been as large
            left = {symbol for symbol in symbols if max(sizes[symbol] for sizes in at) < beyond}
        if not beyond or not left:
            return None
        return {symbol: beyond + n for n, symbol in enumerate(sorted(left, key=str))}


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
