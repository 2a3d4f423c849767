"""What a pattern says about itself; the engine (``kdacompile/search/matching.py``) does the rest.

A pattern is a ``Spec``: where it could be, who could be who there, and how a binding is checked. Whoever adds one
writes a Spec and how its op's operands are written into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.match import B, Candidate, Match, Obstacle, Verdict
from kdacompile.patterns.engine.structure import digest


class Region(Protocol):
    """Where a pattern could be."""

    @property
    def ops(self) -> set[Op]:
        """Operators that tell it from every other place of the graph."""
        ...


R = TypeVar("R", bound=Region)


@dataclass(frozen=True)
class Inner(Generic[R, B]):
    """A region within another one; ``accepts`` tells whether a binding that holds is one that was looked for."""

    region: R
    accepts: Callable[[Candidate[B], B], bool]
    effort: Any = None
    """How long its candidates are looked for."""


class Spec(Generic[R, B]):
    """One pattern. What has a body here is what most patterns need."""

    name: str
    """What it is called before anybody knows which member of its family it is."""
    masks: tuple[str, ...] = ()
    """Roles of tensors that choose tokens."""
    narrows = False
    """Whether the bindings of a candidate are so few that those made at other sizes too are worth being looked for."""

    def __init__(self) -> None:
        self.verdicts = Verdicts(self.check)

    def regions(self, graph: Graph) -> Iterable[R]:
        """Where the pattern could be."""
        raise NotImplementedError

    def candidates(self, graph: Graph, region: R, effort: Any = None) -> Iterator[Candidate[B] | Obstacle]:
        """The candidates of one region, most plausible first, with the obstacles met on the way."""
        raise NotImplementedError

    def check(self, candidate: Candidate[B], *, wide: bool) -> Verdict[B]:
        """The first binding that holds."""
        raise NotImplementedError

    def counterpart(self, candidate: Candidate[B], here: Graph, there: Graph, regions: list[R]) -> Candidate[B] | str:
        """The same candidate in the graph at other sizes, whose ``regions`` are given; else why there is none."""
        raise NotImplementedError

    def forms(self, graph: Graph, match: Match[B], *, keep_upcasts: bool) -> Iterator[Match[B]]:
        """What the op could take over of a match, best first."""
        yield match

    def inner(self, graph: Graph, region: R, *, trial: bool) -> Iterator[Inner[R, B]]:
        """Regions within one that came to nothing; ``trial``: of a function that is one pattern, if any."""
        return iter(())

    def is_near(self, region: R) -> bool:
        """Whether a region that came to nothing looks like the pattern, be it without a word."""
        return False

    def forbids(self, region: R) -> Obstacle | None:
        """What keeps a region from being the pattern whatever its roles are: told before what its candidates lack."""
        return None

    def blockers(self, graph: Graph, matched: AbstractSet[Op], *, unknown: bool) -> list[Obstacle]:
        """What keeps all but ``matched`` from being a region; ``unknown``: operators that nobody knows count too."""
        return []

    def equal_sizes(self, match: Match[B]) -> tuple[Any, Any] | None:
        """Two sizes of the graph that are equal now, and that the match may ask to stay so."""
        return None

    def counted_sizes(self, match: Match[B]) -> list[Any]:
        """Open sizes that are a number elsewhere in the match: other values of theirs it can have no part in."""
        return []


# -- verdicts by structure --------------------------------------------------------------------------------------------


class Verdicts(Generic[B]):
    """Verdicts of this process, by structure; ``check`` finds the binding that holds."""

    def __init__(self, check: Callable[..., Verdict[B]]) -> None:
        self.check = check
        self.known: dict[tuple[object, ...], tuple[Verdict[B], list[Value]]] = {}

    def __call__(self, candidate: Candidate[B], *, wide: bool = False) -> Verdict[B]:
        deadline.check()
        bindings = candidate.bindings  # those that are looked for when they are asked for follow from the structure
        forms = tuple(binding.text() for binding in bindings) if isinstance(bindings, list) else ()
        likely = candidate.likely and candidate.likely.reading(candidate.ends)
        duplicates = tuple(map(candidate.cut.index, chain.from_iterable(candidate.duplicates.items())))
        key = digest(candidate.ops, candidate.cut, candidate.outputs), forms, duplicates, wide, str(likely)
        values = candidate.ends
        if key in self.known:
            return _moved(*self.known[key], values)
        verdict = self.check(candidate, wide=wide)
        unbound = [Value(index, value.shape, value.dtype) for index, value in enumerate(values)]
        self.known[key] = _moved(verdict, values, unbound), unbound  # values keep their graph, and that the model
        return verdict


def _moved(verdict: Verdict[B], values: list[Value], others: list[Value]) -> Verdict[B]:
    """The verdict on a region like this one, between other values."""
    if verdict.binding is None:
        return verdict
    return replace(verdict, binding=verdict.binding.moved(dict(zip(values, others, strict=True))))
