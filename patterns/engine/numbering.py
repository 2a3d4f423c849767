"""Values that are the same by construction: the same cut of the same tensor, taken twice.

Code that keeps a cache writes ``cache[:batch, :end]`` wherever it needs it. Each of them is a value of its own in the
functional, though all of them hold the same numbers.
"""

from __future__ import annotations

from kdacompile.graph.ir import Value, map_values
from kdacompile.patterns.engine.vocabulary import LAYOUT, PICKING

TAKEN = LAYOUT | PICKING


class Numbering:
    """Value numbering: the same number for values that rearrange or pick the same of the same."""

    def __init__(self) -> None:
        self.known: dict[Value, int] = {}
        self.numbers: dict[str, int] = {}

    def of(self, value: Value) -> int:
        chain = [value]
        while chain:
            last = chain[-1]
            missing = [read for read in _sources(last) if read not in self.known]
            if missing:
                chain += missing
                continue
            chain.pop()
            self.known[last] = self.numbers.setdefault(self._text(last), len(self.numbers))
        return self.known[value]

    def _text(self, value: Value) -> str:
        op = value.op
        if op is None or not _sources(value):
            return f"value {value.index}"
        args, kwargs = (map_values(tree, self.known.__getitem__) for tree in (op.args, op.kwargs))
        return f"{op.target} {args} {kwargs} {op.outs.index(value)}"


def _sources(value: Value) -> list[Value]:
    """What a rearrangement reads; nothing for every other value."""
    return value.op.reads if value.op is not None and value.op.name in TAKEN else []
