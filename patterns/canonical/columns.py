"""Columns that are taken before rows, of a tensor whose rows are taken in the same way: columns of those rows.

    f(x[..., a:b])    becomes    f(x)[..., a:b]    where f(x) is there, too

A cache of latents and rotated keys is read twice, ``pool[tokens]`` for keys and ``pool[..., :rank][tokens]`` for
values: that values are columns of the keys shows once they are columns of what the keys are.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.canonical.proof import agrees
from kdacompile.patterns.engine.values import Numbering, cut_of
from kdacompile.patterns.engine.vocabulary import DATA_MOVEMENT, INDEXED


def apply(edit: Edit) -> None:
    """Redefine what is laid out or picked of columns, first things first: what follows is of columns again."""
    numbering, readers = Numbering(everything=True), dict[int, list[Op]]()
    for op in edit.functional.ops:
        if op.name in DATA_MOVEMENT | INDEXED and op.reads:
            readers.setdefault(numbering.of(op.reads[0]), []).append(op)
    for op in tuple(edit.functional.ops):
        if op.name not in DATA_MOVEMENT | INDEXED or not op.reads or op.node is None or op.out.node in edit.fixed:
            continue
        columns = op.reads[0]
        found = cut_of(columns)
        if found is None or columns.op is None or found[0] != len(columns.shape) - 1:
            continue
        whole = columns.op.reads[0]
        alike = [other for other in readers.get(numbering.of(whole), ()) if _same(op, columns, other)]
        # Of its own layer rather than of another one, where that is equal.
        twin = min(alike, key=lambda other: other.reads[0] is not whole, default=None)
        if twin is not None and twin.out.shape[:-1] == op.out.shape[:-1] and twin.out.shape[-1:] == whole.shape[-1:]:
            with contextlib.suppress(CannotEdit):
                new = edit.call("narrow", twin.out, -1, found[1], columns.shape[-1], like=op.node)
                if agrees(edit, [(new, op.out)], ancestors([op.out, new], _is_computed), ("normal",)):
                    edit.redefine(op.out, new)


def _is_computed(value: Value) -> bool:
    return value.op is None or value.op.name not in DATA_MOVEMENT | INDEXED


def _same(op: Op, columns: Value, other: Op) -> bool:
    """Whether two operators differ only in how many columns there are."""

    def text(given: Op, value: Value) -> str:
        def named(item: Any) -> Any:
            if isinstance(item, (list, tuple)) and item and item[-1] == value.shape[-1]:
                return [*item[:-1], "columns"]
            return "rows" if item is value else item

        return f"{given.target} {list(map(named, given.args))} {given.kwargs}"

    return text(op, columns) == text(other, other.reads[0])
