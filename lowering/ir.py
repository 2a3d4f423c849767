"""The tile-program IR: an algorithm written once, over tiles, with a scan axis and a carry.

A program is a straight line of ops in single-assignment form. It describes the work of ONE head (a value head
of a batch entry) on ONE step of the scan axis (a chunk of the sequence); heads are implied, steps are
tied together by the carry:

    carry = (init, step, combine)

``init`` is an input port, ``step`` the value that the ops compute from this step's carry, and ``combine`` a pair of
programs that summarise a step without knowing the carry and merge two summaries, so that a scan may be cut into
segments. A program may have a second carry that walks the axis from its end, as gradients do; neither reads the other.

Tile shapes are symbolic (``C`` tokens of a chunk, ``K``, ``V``) or 1; elementwise ops broadcast dimensions of size 1.
Dtypes are symbolic as well: ``io`` is what the caller hands in, ``acc`` what sums are formed in (fp32, or fp64 for
fp64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from .errors import TileDtypeError, TileProgramError, TileShapeError

Dim = str | int
Attr = str | int | float | bool


class DType(str, Enum):
    """Symbolic element types; a plan or an executor binds them to real ones."""

    IO = "io"
    ACC = "acc"


@dataclass(frozen=True)
class TileType:
    """A two-dimensional tile of one head and one step."""

    rows: Dim
    cols: Dim
    dtype: DType = DType.ACC

    @property
    def shape(self) -> tuple[Dim, Dim]:
        return (self.rows, self.cols)

    def __str__(self) -> str:
        return f"{self.dtype.value}[{self.rows},{self.cols}]"


class OpKind(str, Enum):
    """The tile ops. ``gated_gram``, ``gated_dot`` and ``unit_lower_inverse`` are macro-ops: each target implements them
    in its own way."""

    LOAD = "load"
    STORE = "store"
    CARRY = "carry"
    CAST = "cast"
    SCALE = "scale"
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    EXP = "exp"
    LOG = "log"
    NEG = "neg"
    CUMSUM = "cumsum"
    REDUCE = "reduce"
    ROW_SUM = "row_sum"
    ROW_MAX = "row_max"
    MAX = "max"
    NORMALISE = "normalise"
    TRANSPOSE = "transpose"
    EYE = "eye"
    MASK = "mask"
    DOT = "dot"
    GATED_GRAM = "gated_gram"
    GATED_DOT = "gated_dot"
    UNIT_LOWER_INVERSE = "unit_lower_inverse"


@dataclass(frozen=True)
class Value:
    """The result of one op."""

    name: str
    type: TileType

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Op:
    """One line of a program. ``attrs`` is a sorted tuple of pairs so that ops hash and print the same everywhere."""

    kind: OpKind
    inputs: tuple[Value, ...]
    output: Value | None
    attrs: tuple[tuple[str, Attr], ...] = ()

    def attr(self, name: str, default: Attr | None = None) -> Attr:
        for key, value in self.attrs:
            if key == name:
                return value
        if default is None:
            raise TileProgramError(f"op {self.kind.value} has no attribute {name!r}")
        return default

    @property
    def result(self) -> Value:
        if self.output is None:
            raise TileProgramError(f"op {self.kind.value} has no result")
        return self.output

    def __str__(self) -> str:
        words = [str(value) for value in self.inputs]
        words += [f"{key}={value}" for key, value in self.attrs]
        call = f"{self.kind.value}({', '.join(words)})"
        return call if self.output is None else f"{self.output} = {call} : {self.output.type}"


class Per(str, Enum):
    """What a port holds, and so the layout of the tensor bound to it."""

    TOKENS = "tokens"  # rows are the step's tokens: a tensor [B, T, heads, cols], or [B, T, heads] for one column
    STEP = "step"  # one tile per lane and step: a tensor [B, steps, heads, rows, cols]
    LANE = "lane"  # one tile per lane, shared by all steps: a tensor [B, heads, rows, cols]


@dataclass(frozen=True)
class Port:
    """A named input or output tensor.

    ``heads`` says whose head count it has (grouped heads share keys); ``fill`` is what a token that does not exist
    reads as, in the last chunk of a sequence: the value that leaves the state alone.
    """

    name: str
    type: TileType
    per: Per = Per.TOKENS
    heads: str = "value"
    fill: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} : {self.type} per {self.per.value}, {self.heads} heads" + (
            f", fill {self.fill:g}" if self.fill else ""
        )


@dataclass(frozen=True)
class Combine:
    """How steps compose: the ``summary`` of a step, without its carry, and the ``merge`` of two in order."""

    summary: Program
    merge: Program


@dataclass(frozen=True)
class Carry:
    """A tile handed from step to step: starts as port ``init``, leaves as port ``final``; ``combine`` is how steps
    compose, where it is known."""

    name: str
    type: TileType
    init: str
    final: str
    step: Value
    combine: Combine | None = None


@dataclass(frozen=True)
class Program:
    """A validated tile program; build one with :class:`kdacompile.lowering.builder.Builder`.

    ``reverse`` is a second carry, handed from a step to the one before it: it starts at a sequence's end.
    """

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    ops: tuple[Op, ...]
    carry: Carry | None = None
    axis: str = "chunk"
    scalars: tuple[str, ...] = ()
    notes: str = field(default="", compare=False)
    reverse: Carry | None = None

    @property
    def carries(self) -> tuple[Carry, ...]:
        return tuple(carry for carry in (self.carry, self.reverse) if carry is not None)

    def port(self, name: str) -> Port:
        for port in (*self.inputs, *self.outputs):
            if port.name == name:
                return port
        raise TileProgramError("no such port", name)

    def values(self) -> Iterator[Value]:
        return (op.output for op in self.ops if op.output is not None)

    def producer(self, value: Value) -> Op:
        for op in self.ops:
            if op.output == value:
                return op
        raise TileProgramError("no op produces this value", str(value))


# -- what each op takes and makes --------------------------------------------------------------------------------------

Types = tuple[TileType, ...]
Attrs = dict[str, Attr]


def _broadcast(types: Types, attrs: Attrs, where: str) -> TileType:
    a, b = types
    dtype = _same_dtype(types, where)
    for x, y in zip(a.shape, b.shape, strict=True):
        if 1 not in (x, y) and x != y:
            raise TileShapeError(f"cannot broadcast {x} against {y}", where)
    rows, cols = (y if x == 1 else x for x, y in zip(a.shape, b.shape, strict=True))
    return TileType(rows, cols, dtype)


def _same_dtype(types: Types, where: str) -> DType:
    dtypes = {t.dtype for t in types}
    if len(dtypes) != 1:
        raise TileDtypeError("operands differ in dtype; cast one of them", where)
    return dtypes.pop()


def _square(types: Types, attrs: Attrs, where: str) -> TileType:
    if types[0].rows != types[0].cols:
        raise TileShapeError(f"needs a square tile, got {types[0]}", where)
    return types[0]


def _eye_type(types: Types, attrs: Attrs, where: str) -> TileType:
    dim = attrs["dim"]
    size = dim if isinstance(dim, str) else int(dim)
    return TileType(size, size)


def _dot_type(types: Types, attrs: Attrs, where: str) -> TileType:
    a, b = types[0], types[1]
    rows, inner_a = (a.cols, a.rows) if attrs.get("trans_a") else a.shape
    inner_b, cols = (b.cols, b.rows) if attrs.get("trans_b") else b.shape
    _same_dtype((a, b), where)
    if inner_a != inner_b:
        raise TileShapeError(f"inner dimensions {inner_a} and {inner_b} differ", where)
    result = TileType(rows, cols, DType.ACC)
    if len(types) == 3 and types[2] != result:
        raise TileShapeError(f"accumulator is {types[2]}, the product is {result}", where)
    return result


def _gram_type(types: Types, attrs: Attrs, where: str) -> TileType:
    x, y, g = types
    _same_dtype(types, where)
    if x.cols != y.cols or x.rows != y.rows:
        raise TileShapeError(f"rows {x} and columns {y} differ", where)
    _gate_fits(g, x, where)
    return TileType(x.rows, x.rows, DType.ACC)


def _gated_dot_type(types: Types, attrs: Attrs, where: str) -> TileType:
    weights, y, g = types
    _same_dtype(types, where)
    if weights.rows != weights.cols or y.rows != weights.rows:
        raise TileShapeError(f"weights {weights} do not fit {y}", where)
    _gate_fits(g, y, where)
    return TileType(y.rows, y.cols, DType.ACC)


def _gate_fits(g: TileType, rows: TileType, where: str) -> None:
    if g.rows != rows.rows or g.cols not in (1, rows.cols):
        raise TileShapeError(f"gate {g} fits neither per token nor per channel", where)


_Rule = Callable[[Types, Attrs, str], TileType]
_OPS: dict[OpKind, tuple[int, int, _Rule]] = {
    **dict.fromkeys(
        (OpKind.SCALE, OpKind.NORMALISE, OpKind.EXP, OpKind.LOG, OpKind.NEG, OpKind.CUMSUM),
        (1, 1, lambda types, *_: types[0]),
    ),
    **dict.fromkeys((OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.MAX), (2, 2, _broadcast)),
    **dict.fromkeys((OpKind.MASK, OpKind.UNIT_LOWER_INVERSE), (1, 1, _square)),
    **dict.fromkeys((OpKind.ROW_SUM, OpKind.ROW_MAX), (1, 1, lambda types, *_: replace(types[0], cols=1))),
    OpKind.REDUCE: (1, 1, lambda types, *_: replace(types[0], rows=1)),
    OpKind.TRANSPOSE: (1, 1, lambda types, *_: TileType(types[0].cols, types[0].rows, types[0].dtype)),
    OpKind.CAST: (1, 1, lambda types, attrs, _: replace(types[0], dtype=DType(attrs["to"]))),
    OpKind.EYE: (0, 0, _eye_type),
    OpKind.DOT: (2, 3, _dot_type),
    OpKind.GATED_GRAM: (3, 3, _gram_type),
    OpKind.GATED_DOT: (3, 3, _gated_dot_type),
}
"""Of each op: the fewest and the most operands, and the type of its result."""


def infer(kind: OpKind, inputs: tuple[Value, ...], attrs: Attrs, where: str) -> TileType:
    """Result type of an op that is neither a load, a store nor a carry read (those take theirs from a port)."""
    low, high, rule = _OPS[kind]
    if not low <= len(inputs) <= high:
        raise TileShapeError(f"{kind.value} takes {low} to {high} operands, got {len(inputs)}", where)
    return rule(tuple(value.type for value in inputs), attrs, where)
