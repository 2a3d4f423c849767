"""What the kernels of a chunked program share: naming, products, elementwise ops, buffer addresses.

Tiles as wide as V are held transposed, [V, C] and [V, K], in all kernels: the state then is the left operand of every
product of the scan and stays in registers, and what the products meet comes straight from memory.
"""

from __future__ import annotations

from ..emitter import Emitter
from ..ir import Dim, Op, OpKind, Value
from .placement import Placement, is_wide
from .ports import PortText
from .variant import Variant


class Kernel(Emitter):
    """Emits the ops that mean the same in all kernels."""

    turns = True
    """Whether ports are loaded with their tokens along the second axis."""

    def __init__(self, variant: Variant, placement: Placement) -> None:
        super().__init__(placement.program)
        self.variant, self.placement = variant, placement
        self.ports = PortText(variant, self.lines)
        self.rows: set[Value] = set()  # columns of the program that are held as rows

    def on_load(self, op: Op) -> str:
        if self.turns:
            self.rows.add(op.result)
        return self.ports.load(op, turned=self.turns)

    def on_cast(self, op: Op) -> str:
        """An input in fp32, or a result in the dtype of the tensor it is stored to."""
        if self.program.producer(op.inputs[0]).kind is not OpKind.LOAD:
            return f"{op.inputs[0].name}.to({op.result.name}_ptr.dtype.element_ty)"
        if self.turns:
            self.rows.add(op.result)
        return self.ports.prepared(op, turned=self.turns)

    def on_transpose(self, op: Op) -> str:
        return f"tl.trans({op.inputs[0].name})"

    def on_mask(self, op: Op) -> str:
        sign = ">" if op.attr("strict", False) else ">="
        return f"tl.where(i {sign} j, {op.inputs[0].name}, 0.0)"

    def narrow(self, value: Value) -> str:
        """A value as a product takes it."""
        return f"{value.name}.to(DT)"

    def on_dot(self, op: Op) -> str:
        x, y, *acc = op.inputs
        trans_a, trans_b = bool(op.attr("trans_a", False)), bool(op.attr("trans_b", False))
        left = f"tl.trans({self.narrow(x)})" if trans_a else self.narrow(x)
        right = f"tl.trans({self.narrow(y)})" if trans_b else self.narrow(y)
        if is_wide(op.result):  # (x y)^T = y^T x^T, and y^T is what is held
            left, right = self.narrow(y), self.narrow(x) if trans_a else f"tl.trans({self.narrow(x)})"
        product = f"tl.dot({left}, {right}, input_precision=PRECISION)"
        if not acc:
            return product
        if op.attr("negate", False):
            return f"{acc[0].name} - {product}"
        return f"tl.dot({left}, {right}, {acc[0].name}, input_precision=PRECISION)"

    def operand(self, value: Value, op: Op) -> str:
        narrow = is_wide(op.result) and not is_wide(value) and value.type.shape != (1, 1)
        return f"tl.trans({value.name})" if narrow and value not in self.rows else value.name


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
