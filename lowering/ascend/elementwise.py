"""The ops that read alike in every emitted kernel."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Op, OpKind

_INFIX = {OpKind.ADD: "+", OpKind.SUB: "-", OpKind.MUL: "*"}
_CALLS = {OpKind.MAX: "tl.maximum", OpKind.EXP: "tl.exp"}
_OVER_COLUMNS = {OpKind.ROW_SUM: "tl.sum", OpKind.ROW_MAX: "tl.max"}


def elementwise(op: Op, operands: Sequence[str]) -> str | None:
    """The text of an op over operands that have the axes they need; None for one that does not go by elements."""
    if op.kind in _INFIX:
        return f" {_INFIX[op.kind]} ".join(operands)
    if op.kind in _CALLS:
        return f"{_CALLS[op.kind]}({', '.join(operands)})"
    if op.kind in _OVER_COLUMNS:
        return f"{_OVER_COLUMNS[op.kind]}({operands[0]}, 1)"
    return f"-{operands[0]}" if op.kind is OpKind.NEG else None
