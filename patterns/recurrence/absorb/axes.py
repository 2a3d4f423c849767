"""Which dimension is which, one operator further up: axes of an operand from the axes of the result.

Axes are those of ``roles.Placement``: a role's axis, '.' for size one, '=' for a dimension along which the tensor
is the same, '*' for H and K merged into one.
"""

from __future__ import annotations

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.traits import TRAITS
from kdacompile.patterns.engine.values import segments, turn
from kdacompile.patterns.engine.vocabulary import AS_IS, ELEMENTWISE, LAYOUT, TURNS, VIEWS

POINTWISE = frozenset(name for name in ELEMENTWISE if not TRAITS[name].steps)
"""What an activation is made of."""

SAME_DATA = LAYOUT | {"select", "slice"}
"""Operators that keep the data of their only tensor operand (select and slice: where they take all of it)."""


def above(op: Op, axes: str, sizes: dict[str, int]) -> str | None:
    """Axes of the only operand of one of ``SAME_DATA``, None if they cannot be told."""
    source = op.reads[0]
    rank = len(source.shape)
    if op.name in AS_IS | {"_to_copy"} or (op.name == "slice" and source.shape == op.out.shape):
        return axes
    if op.name in VIEWS:
        return regrouped(op.out, axes, source, sizes)
    if op.name == "select":
        dim = op.args[1] % rank
        return f"{axes[:dim]}.{axes[dim:]}" if source.shape[dim] == 1 else None
    if op.name in TURNS:
        order = turn(op)
        return "".join(axes[order.index(dim)] for dim in range(rank))
    return _unexpanded(op.out, axes, source) if op.name == "expand" else None


def _unexpanded(out: Value, axes: str, source: Value) -> str | None:
    """Only dimensions that carry no axis may have been expanded."""
    offset = len(out.shape) - len(source.shape)
    grown = [d for d in range(len(out.shape)) if d < offset or out.shape[d] != source.shape[d - offset]]
    if any(axes[d] not in ".=" for d in grown):
        return None
    return "".join("." if d in grown else axes[d] for d in range(offset, len(out.shape)))


def regrouped(out: Value, axes: str, source: Value, sizes: dict[str, int]) -> str | None:
    """Axes above a view: sizes of one come and go, H and K may be merged or split, nothing else may."""
    found = ["."] * len(source.shape)
    for outer, inner in segments(out.shape, source.shape) or ():
        text = "".join(axes[d] for d in outer)
        if len(outer) == 1 and len(inner) == 1:
            found[inner[0]] = text
        elif len(inner) == 1 and text == "HK":
            found[inner[0]] = "*"
        elif text == "*" and [source.shape[d] for d in inner] == [sizes["H"], sizes["K"]]:
            found[inner[0]], found[inner[1]] = "H", "K"
        elif set(text) == {"="}:
            for dim in inner:
                found[dim] = "="
        else:
            return None
    return "".join(found)


def one_head(out: Value, axes: str, source: Value) -> tuple[str, int] | None:
    """Axes above an expand of a single key head, and how many it made of it."""
    if len(out.shape) != len(source.shape) or axes.count("G") != 1:
        return None
    dim = axes.index("G")
    text = _unexpanded(out, axes.replace("G", "="), source)
    return (text, out.shape[dim]) if text is not None and source.shape[dim] == 1 else None


def split_heads(out: Value, axes: str, source: Value) -> tuple[str, int] | None:
    """Axes above a view that merges key heads with copies of each: ([.., G, r, ..] -> [.., G r, ..], r)."""
    found = ["."] * len(source.shape)
    copies = 1
    for outer, inner in segments(out.shape, source.shape) or ():
        text = "".join(axes[d] for d in outer)
        if len(outer) != 1:
            return None
        if text == "G" and inner[-1] in source.uniform and len(inner) <= 2:
            copies = source.shape[inner[-1]]
            found[inner[0]], found[inner[-1]] = "G", "="
        elif len(inner) == 1:
            found[inner[0]] = text
        else:
            return None
    return ("".join(found), copies) if copies > 1 else None


def broadcast(op: Op, axes: str, operand: Value) -> str:
    """Axes of an operand of a pointwise operator."""
    offset = len(op.out.shape) - len(operand.shape)
    return "".join("." if size == 1 else axes[offset + d] for d, size in enumerate(operand.shape))
