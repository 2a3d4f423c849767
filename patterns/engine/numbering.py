"""Values that are the same by construction: the same cut of the same tensor, or any operator on the same, taken twice.

Code that keeps a cache writes ``cache[:batch, :end]`` wherever it needs it, and a loop the same mask in every turn.
Each of them is a value of its own in the functional graph, though all of them hold the same numbers.
"""

from __future__ import annotations

from kdacompile import compat
from kdacompile.graph.ir import Value, map_values
from kdacompile.patterns.engine.vocabulary import LAYOUT, PICKING

TAKEN = LAYOUT | PICKING


class Numbering:
    """Value numbering: the same number for values that are made alike of the same.

    By rearranging and picking, or, ``everything``, by any operator that reads something and draws no random numbers.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self.everything = everything
        self.known: dict[Value, int] = {}
        self.numbers: dict[str, int] = {}

    def of(self, value: Value) -> int:
        chain = [value]
        while chain:
            last = chain[-1]
            missing = [read for read in self._sources(last) if read not in self.known]
            if missing:
                chain += missing
                continue
            chain.pop()
            self.known[last] = self.numbers.setdefault(self._text(last), len(self.numbers))
        return self.known[value]

    def _text(self, value: Value) -> str:
        op = value.op
        if op is None or not self._sources(value):
            return f"value {value.index}"
        args, kwargs = (map_values(tree, self.known.get) for tree in (op.args, op.kwargs))
        return f"{op.target} {args} {kwargs} {op.outs.index(value)} {self.everything and op.grad}"

    def _sources(self, value: Value) -> list[Value]:
        """What a value is made of, where that alone makes it; nothing for every other value."""
        op = value.op
        if op is None or not (op.name in TAKEN or (self.everything and not compat.is_random(op.target))):
            return []
        return op.reads
