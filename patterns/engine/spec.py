"""What a pattern says about itself; the engine (``kdacompile/search/matching.py``) does the rest.

A pattern is a ``Spec``: where it could be, who could be who there, and how a binding is checked. Whoever adds one
writes a Spec and how its op's operands are written into the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kdacompile.graph.ir import Graph, Op
from kdacompile.patterns.engine.match import B, Candidate, Match, Obstacle, Verdict
from kdacompile.patterns.engine.verdicts import Verdicts


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

    def blockers(self, graph: Graph, *, unknown: bool) -> list[Obstacle]:
        """What keeps the graph from having a region at all; ``unknown``: operators that nobody knows count too."""
        return []

    def equal_sizes(self, match: Match[B]) -> tuple[Any, Any] | None:
        """Two sizes of the graph that are equal now, and that the match may ask to stay so."""
        return None
