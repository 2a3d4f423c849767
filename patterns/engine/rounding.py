"""Casts in the middle of a region, to less than what enters it: part of the function. Casts of results are not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.vocabulary import LAYOUT


def rounding(
    casts: Iterable[Op], ops: Collection[Op], inputs: Iterable[Value], outputs: Sequence[Value]
) -> Obstacle | None:
    """The first of ``casts`` that rounds between the steps of the region ``ops``: to fewer bits than any of ``inputs``
    has, or to as many in another dtype.
    """
    dtypes = {value.dtype for value in inputs if value.dtype.is_floating_point}
    least = min((dtype.itemsize for dtype in dtypes), default=0)
    for op in casts:
        dtype = op.out.dtype
        if op.name != "_to_copy" or op.out.const or dtype.itemsize > least or dtype in dtypes:
            continue
        value = op.out
        while value not in outputs:
            users = [user for user in value.users if user in ops]
            if len(users) != 1 or users[0].name not in LAYOUT:
                return Obstacle("rounding", f"the region rounds to {dtype} between its steps", op)
            value = users[0].out
    return None
