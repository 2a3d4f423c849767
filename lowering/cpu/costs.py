"""Estimates of what a call costs on a CPU: as Inductor compiles the model's own code, and as an op.

Each is a sum of terms, which follow from sizes, times constants, which are fitted to what was measured on one machine
(``docs/results/fits``). A decision rests on the quotient of two such estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

Kind = tuple[bool, bool]
Constants = tuple[float, ...]

CUT = 1e-5
"""Seconds that an op costs beside its own: what Inductor would fuse around the model's code is cut in two. Whole layers
of MiniMax took 10 us longer with an op that took no longer by itself.
"""


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A call as a cost model takes it."""

    train: bool = False
    """Forward and backward."""
    half: bool = False
    """In bf16."""

    seconds: ClassVar[Mapping[Kind, Constants]]
    """For each of the terms, by what has constants of its own."""

    @property
    def kind(self) -> Kind:
        return self.train, self.half

    def terms(self, *, op: bool) -> tuple[float, ...]:
        """What the constants multiply, of the op or of the model's own code."""
        raise NotImplementedError

    @property
    def ratio(self) -> float:
        """The op's time over that of Inductor's own code, as they are estimated."""
        ours, theirs = (
            sum(x * y for x, y in zip(self.seconds[self.kind], self.terms(op=op), strict=True)) for op in (True, False)
        )
        return (ours + CUT) / theirs if theirs else 0.0


def loses(call: Priced) -> float | None:
    """How many times as long as Inductor's own code the op takes, as they are estimated; None where it takes less."""
    return call.ratio if call.kind in call.seconds and call.ratio > 1.0 else None
