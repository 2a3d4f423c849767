"""What the kernels of a chunked program share: naming, products, elementwise ops, buffer addresses.

Tiles as wide as V are held transposed, [V, C] and [V, K], in all kernels: the state then is the left operand of every
product of the scan and stays in registers, and what the products meet comes straight from memory.
"""

from __future__ import annotations

from ..dialects import TRITON
from ..ir import Dim, Op, OpKind, Value
from .placement import Placement, is_wide
from .ports import PortText
from .text import Lines
from .variant import Variant


class Kernel:
    """Emits the ops that mean the same in all kernels."""

    def __init__(self, variant: Variant, placement: Placement) -> None:
        self.variant, self.placement, self.program = variant, placement, placement.program
        self.lines = Lines()
        self.ports = PortText(variant, self.lines)
        self.turned: set[Value] = set()

    def operand(self, value: Value) -> str:
        return f"{value.name}.to(DT)"

    def dot(self, op: Op) -> str:
        x, y, *acc = op.inputs
        trans_a, trans_b = bool(op.attr("trans_a", False)), bool(op.attr("trans_b", False))
        left = f"tl.trans({self.operand(x)})" if trans_a else self.operand(x)
        right = f"tl.trans({self.operand(y)})" if trans_b else self.operand(y)
        if is_wide(op.result):  # (x y)^T = y^T x^T, and y^T is what is held
            left, right = self.operand(y), self.operand(x) if trans_a else f"tl.trans({self.operand(x)})"
        product = f"tl.dot({left}, {right}, input_precision=PRECISION)"
        if not acc:
            return product
        if op.attr("negate", False):
            return f"{acc[0].name} - {product}"
        return f"tl.dot({left}, {right}, {acc[0].name}, input_precision=PRECISION)"

    def simple(self, op: Op) -> str:
        """The expression of an op that means the same in all kernels."""
        if TRITON.has(op):
            return TRITON.text(op, [self._oriented(value, op.result) for value in op.inputs])
        if op.kind is OpKind.TRANSPOSE:
            return f"tl.trans({op.inputs[0].name})"
        if op.kind is OpKind.DOT:
            return self.dot(op)
        assert op.kind is OpKind.MASK, op
        sign = ">" if op.attr("strict", False) else ">="
        return f"tl.where(i {sign} j, {op.inputs[0].name}, 0.0)"

    def _oriented(self, value: Value, result: Value) -> str:
        narrow = is_wide(result) and not is_wide(value) and value.type.shape != (1, 1)
        if narrow and value not in self.turned:
            return f"tl.trans({value.name})"
        return value.name


_COLUMN: dict[Dim, str] = {"C": "j", "K": "d"}
_SIZE: dict[Dim, str] = {"C": "C", "K": "KP", "V": "VP", 1: "1"}


def tile_size(value: Value) -> str:
    rows, cols = value.type.shape
    return f"({_SIZE[rows]} * {_SIZE[cols]})"


def tile_offset(value: Value) -> str:
    """Where a value's elements lie in its buffer tile: a wide one is [V, C] there, a column is a row."""
    rows, cols = value.type.shape
    if is_wide(value):
        return f"c * {_SIZE[rows]} + j"
    if rows == cols == 1:
        return "tl.zeros([1, 1], tl.int32)"
    if rows == 1:
        return "j"
    if cols == 1:
        return _COLUMN[rows]
    return f"i * {_SIZE[cols]} + {_COLUMN[cols]}"
