"""Writing tile programs: one method per op, types inferred and checked as each line is written."""

from __future__ import annotations

from .errors import CarryError, TileProgramError
from .ir import Attr, Carry, Combine, DType, Op, OpKind, Per, Port, Program, TileType, Value, infer
from .validate import validate


class Builder:
    """Collects ports and ops; :meth:`build` validates and returns the :class:`Program`."""

    def __init__(self, name: str, axis: str = "chunk", notes: str = "") -> None:
        self._name = name
        self._axis = axis
        self._notes = notes
        self._inputs: list[Port] = []
        self._outputs: list[Port] = []
        self._ops: list[Op] = []
        self._scalars: list[str] = []
        self._carries: dict[bool, Carry] = {}  # by whether they walk the axis from its end
        self._carry_ports: dict[bool, tuple[str, TileType, str, str]] = {}
        self._names: dict[str, int] = {}

    def input(self, name: str, type: TileType, per: Per = Per.TOKENS, heads: str = "value", fill: float = 0.0) -> Value:
        """Declare an input tensor and load this step's tile of it."""
        self._inputs.append(Port(name, type, per, heads, fill))
        return self._emit(OpKind.LOAD, (), type, name, port=name)

    def store(self, name: str, value: Value, per: Per = Per.TOKENS) -> None:
        """Declare an output tensor and write this step's tile of it."""
        self._outputs.append(Port(name, value.type, per))
        self._ops.append(Op(OpKind.STORE, (value,), None, (("port", name),)))

    def carry(self, name: str, type: TileType, init: str, final: str, *, reverse: bool = False) -> Value:
        """Declare the carry and read its value at the start of the step; ``reverse``: the one that comes from the
        step after this."""
        if reverse in self._carry_ports:
            raise CarryError("a program has one carry in each direction", name)
        self._carry_ports[reverse] = (name, type, init, final)
        self._inputs.append(Port(init, type, Per.LANE))
        self._outputs.append(Port(final, type, Per.LANE))
        return self._emit(OpKind.CARRY, (), type, name, carry=name)

    def step(self, value: Value, combine: Combine | None = None, *, reverse: bool = False) -> None:
        """Declare the carry's value at the end of the step."""
        if reverse not in self._carry_ports:
            raise CarryError("a step without a carry", str(value))
        self._carries[reverse] = Carry(*self._carry_ports[reverse], value, combine)

    def cast(self, x: Value, to: DType, name: str = "") -> Value:
        """``x`` in another dtype; nothing is emitted when it has that dtype already."""
        return x if x.type.dtype is to else self._op(OpKind.CAST, (x,), name or x.name, to=to.value)

    def scale(self, x: Value, scalar: str, name: str = "") -> Value:
        """``x`` times a run-time scalar that is the same for every lane and step."""
        return self._by(OpKind.SCALE, x, scalar, name)

    def normalise(self, x: Value, eps: str, name: str) -> Value:
        """``x / sqrt(sum(x * x) + eps)`` by rows; ``eps`` is the scalar's name."""
        return self._by(OpKind.NORMALISE, x, eps, name)

    def add(self, x: Value, y: Value, name: str = "") -> Value:
        return self._op(OpKind.ADD, (x, y), name)

    def sub(self, x: Value, y: Value, name: str = "") -> Value:
        return self._op(OpKind.SUB, (x, y), name)

    def mul(self, x: Value, y: Value, name: str = "") -> Value:
        return self._op(OpKind.MUL, (x, y), name)

    def exp(self, x: Value, name: str = "") -> Value:
        return self._op(OpKind.EXP, (x,), name)

    def log(self, x: Value, name: str = "") -> Value:
        return self._op(OpKind.LOG, (x,), name)

    def neg(self, x: Value, name: str = "") -> Value:
        return self._op(OpKind.NEG, (x,), name)

    def cumsum(self, x: Value, *, reverse: bool = False, name: str = "") -> Value:
        """Sums over rows ``<= i``, or with ``reverse`` over rows ``> i`` (exclusive: no difference is needed)."""
        return self._op(OpKind.CUMSUM, (x,), name, reverse=reverse)

    def reduce(self, x: Value, name: str = "") -> Value:
        """Sum over the rows."""
        return self._op(OpKind.REDUCE, (x,), name)

    def row_sum(self, x: Value, name: str) -> Value:
        """Sum over the columns."""
        return self._op(OpKind.ROW_SUM, (x,), name)

    def row_max(self, x: Value, name: str = "") -> Value:
        """Largest of each row's columns, but no less than the dtype's lowest finite number.

        A row of ``-inf`` (nothing to attend to) then has a maximum that can be subtracted from it.
        """
        return self._op(OpKind.ROW_MAX, (x,), name)

    def max(self, x: Value, y: Value, name: str = "") -> Value:
        return self._op(OpKind.MAX, (x, y), name)

    def transpose(self, x: Value, name: str = "") -> Value:
        return self._op(OpKind.TRANSPOSE, (x,), name)

    def eye(self, dim: str, name: str = "") -> Value:
        return self._op(OpKind.EYE, (), name, dim=dim)

    def mask(self, x: Value, *, strict: bool, name: str = "") -> Value:
        """Lower triangle by selection (never by a product: 0 * NaN is NaN)."""
        return self._op(OpKind.MASK, (x,), name, strict=strict)

    def dot(
        self,
        x: Value,
        y: Value,
        acc: Value | None = None,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        negate: bool = False,
        name: str = "",
    ) -> Value:
        """``acc + x @ y`` (``acc - x @ y`` with ``negate``), summed in the acc dtype."""
        operands = (x, y) if acc is None else (x, y, acc)
        return self._op(OpKind.DOT, operands, name, trans_a=trans_a, trans_b=trans_b, negate=negate)

    def gated_gram(self, x: Value, y: Value, g: Value, *, strict: bool, name: str = "") -> Value:
        """``A[i,j] = sum_d x[i,d] y[j,d] exp(g[j+1,d] + ... + g[i,d])`` for j < i (strict) or j <= i, else 0."""
        return self._op(OpKind.GATED_GRAM, (x, y, g), name, strict=strict)

    def gated_dot(self, weights: Value, y: Value, g: Value, *, trans: bool = False, name: str = "") -> Value:
        """``sum_j weights[i,j] y[j,d] exp(g[j+1,d] + ... + g[i,d])`` over j <= i, or with ``trans`` over the rows i of
        ``weights[i,j] y[i,d]`` for every j; what is above the diagonal is not read."""
        return self._op(OpKind.GATED_DOT, (weights, y, g), name, trans_a=trans)

    def unit_lower_inverse(self, x: Value, name: str = "") -> Value:
        """``(I + strict lower triangle of x)^-1``."""
        return self._op(OpKind.UNIT_LOWER_INVERSE, (x,), name)

    def build(self) -> Program:
        for reverse, (name, *_) in self._carry_ports.items():
            if reverse not in self._carries:
                raise CarryError("the carry has no step", name)
        program = Program(
            self._name,
            tuple(self._inputs),
            tuple(self._outputs),
            tuple(self._ops),
            self._carries.get(False),
            self._axis,
            tuple(self._scalars),
            self._notes,
            self._carries.get(True),
        )
        validate(program)
        return program

    def _by(self, kind: OpKind, x: Value, scalar: str, name: str) -> Value:
        if scalar not in self._scalars:
            self._scalars.append(scalar)
        return self._op(kind, (x,), name or x.name, by=scalar)

    def _op(self, kind: OpKind, inputs: tuple[Value, ...], name: str, **attrs: Attr) -> Value:
        kept = {key: value for key, value in attrs.items() if value is not False}
        return self._emit(kind, inputs, infer(kind, inputs, kept, f"{self._name}.{name or kind.value}"), name, **kept)

    def _emit(self, kind: OpKind, inputs: tuple[Value, ...], type: TileType, name: str, **attrs: Attr) -> Value:
        if not (name or kind.value).isidentifier():
            raise TileProgramError("value names are identifiers", name)
        value = Value(self._fresh(name or kind.value), type)
        self._ops.append(Op(kind, inputs, value, tuple(sorted(attrs.items()))))
        return value

    def _fresh(self, name: str) -> str:
        """``name``, or the first of ``name_1``, ``name_2`` ... that is free."""
        fresh = name
        while fresh in self._names:
            self._names[name] += 1
            fresh = f"{name}_{self._names[name]}"
        self._names[fresh] = 0
        return fresh
