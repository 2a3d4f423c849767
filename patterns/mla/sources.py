"""What keys and values are made of, in the attention of MLA.

They are followed back through rearrangements only, to a *projection* (the product of an activation with a weight:
kv_b_proj of the latent), to the latent itself, and to *shared* tensors (the rotated key of all heads, expanded).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.traits import of_kind
from kdacompile.patterns.engine.values import Numbering, first_column, operand, root, turn
from kdacompile.patterns.engine.values import is_weight as is_given_weight
from kdacompile.patterns.engine.vocabulary import (
    ADDED_PRODUCTS,
    CONTRACTIONS,
    ELEMENTWISE,
    INDEXED,
    LAYOUT,
    PICKING,
    TURNS,
)

REARRANGEMENTS = LAYOUT | frozenset(
    "slice split split_with_sizes select unbind cat slice_scatter select_scatter repeat constant_pad_nd".split()
)
"""How keys and values are laid out on the way to their product."""

CACHED = REARRANGEMENTS | frozenset("index_copy index_put scatter".split())
"""The same where they are put into a cache first."""

CLIMBED = REARRANGEMENTS & (LAYOUT | PICKING | {"repeat"})
"""Those that take elements of one tensor."""

SCALES = frozenset({"mul", "div"})

FAR = 24
"""Rearrangements in a row."""


UNPACKED = frozenset(
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift remainder floor_divide "
    "__and__ __or__ __xor__ __lshift__ __rshift__".split()
)
"""How several numbers are taken out of one."""

COMPUTED = LAYOUT | PICKING | CONTRACTIONS | UNPACKED | {"add", "sub", "mul", "div", "cat", "stack"}
"""How weights are made of others: an adapter's product is added, 8-bit numbers are scaled, heads put together."""

DERIVED = ELEMENTWISE | of_kind("reduction") | {"linalg_vector_norm", "_weight_norm_interface"}
"""How weights are made of parameters: rows of one length, values that are rounded, hidden or squashed."""


@dataclass(frozen=True)
class Projection:
    """``activation @ weight^T``, in any spelling."""

    op: Op
    activation: Value
    weight: Value
    rank: int
    """How many columns of the activation are summed over."""
    bias: bool

    @property
    def size(self) -> int:
        """How many numbers the weight has."""
        return math.prod(root(self.weight).shape)


@dataclass
class Made:
    """What operands are made of."""

    projections: dict[Op, Projection] = field(default_factory=dict[Op, Projection])
    latent: bool = False
    """Whether the latent itself is among it."""
    shared: dict[Value, None] = field(default_factory=dict[Value, None])

    @property
    def only(self) -> Projection | None:
        """The projection that is all of it."""
        return next(iter(self.projections.values())) if len(self.projections) == 1 and not self.latent else None


def is_weight(value: Value) -> bool:
    """A weight that the graph is given, or that is computed from such weights, and a number for each row or for all:
    ``W + B A``, ``scale * W8``, ``W / |W|``, ``W / u^T W v``. Of products, gathered rows and functions those of
    parameters: others may be tokens. So may a vector be, but not one that scales a matrix, or makes a number that does.
    """
    if is_given_weight(value):
        return True
    stack, seen, given = [(value, False, False)], set[Value](), list[Value]()
    derived = scaled = False
    while stack:
        step, multiplied, number = stack.pop()
        if step in seen or step.const:
            continue
        seen.add(step)
        op = step.op
        if is_given_weight(step):
            given.append(step)
        elif op is not None and _computes_weights(op) and len(seen) <= FAR:
            derived = derived or op.name not in COMPUTED
            number = number or math.prod(step.shape) == 1
            multiplied = not number and (multiplied or op.name in CONTRACTIONS)
            stack += [(read, multiplied, number) for read in op.reads]
        elif op is None and len(step.shape) < 2 and not multiplied:
            scaled = True
        else:
            return False
    of_tokens = (derived and any(map(is_matrix, given))) or (scaled and all(len(each.shape) < 2 for each in given))
    return bool(given) and not of_tokens


def _computes_weights(op: Op) -> bool:
    of_tokens = op.name in CONTRACTIONS | INDEXED and any(is_matrix(read) for read in op.reads)
    return op.name in COMPUTED | DERIVED and not of_tokens


def is_matrix(value: Value) -> bool:
    """A matrix that the graph is given beside its parameters: a functional weight, or one request's tokens."""
    return root(value).weight and not root(value).param


class Sources:
    """What operands are made of: projections, of ``latent`` alone if it is given, the latent, and shared tensors."""

    def __init__(
        self, latent: Value | None = None, moves: frozenset[str] = REARRANGEMENTS, numbering: Numbering | None = None
    ) -> None:
        self.latent, self.moves, self.numbering = latent, moves, numbering or Numbering()
        self.reached: dict[Value, bool] = {}

    def of(self, *values: Value) -> Made:
        made = Made()
        for value in values:
            self._collect(value, made)
        return made

    def _collect(self, value: Value, made: Made) -> None:
        projection = self._project(value)
        if projection is not None:
            made.projections[projection.op] = projection
        elif self._is_latent(value):
            made.latent = True
        elif value.op is not None and self._reaches(value):
            for read in _behind(value):
                self._collect(read, made)
        elif not value.const:
            made.shared[value] = None

    def _is_latent(self, value: Value) -> bool:
        return self.latent is not None and self.numbering.of(value) == self.numbering.of(self.latent)

    def _project(self, value: Value) -> Projection | None:
        found = project(value.op)
        if found is None or self.latent is None:
            return found
        activation = tokens_of(found.activation)
        return found if activation is not None and self._is_latent(activation) else None

    def _reaches(self, value: Value) -> bool:
        """True if rearrangements alone lie between ``value`` and a projection or the latent."""
        if value not in self.reached:
            op = value.op
            self.reached[value] = False
            moves = op is not None and (op.name in self.moves or scales(op))
            self.reached[value] = (
                self._is_latent(value)
                or self._project(value) is not None
                or (op is not None and moves and any(self._reaches(read) for read in _behind(value)))
            )
        return self.reached[value]


def follows(values: list[Value], op: Op) -> bool:
    """Whether one of the values is computed from what an operator yields, columns that were joined to it aside."""
    stack, seen = list(values), set[Value]()
    while stack:
        value = stack.pop()
        if value in seen or value.op is None or value.index < op.out.index:
            continue
        if value.op is op:
            return True
        seen.add(value)
        stack += _behind(value)
    return False


def climb(value: Value) -> Iterator[Value]:
    """An operand and what it is taken from, through rearrangements and cuts of one tensor."""
    yield value
    for _ in range(FAR):
        op = value.op
        data = [] if op is None else _data(op)
        if op is None or len(data) != 1 or not (op.name in CLIMBED or scales(op)):
            return
        value = data[0]
        yield value


def _data(op: Op) -> list[Value]:
    return [read for read in op.reads if not read.const]


def _behind(value: Value) -> list[Value]:
    """What a rearrangement reads; of columns that were joined and are cut again, the parts that are left."""
    op, start = value.op, first_column(value)
    data = [] if op is None else _data(op)
    if start is None:
        return data
    whole = root(data[0], until=lambda step: step.op is not None and not _keeps_columns(step.op))
    joined, last = whole.op, len(whole.shape) - 1
    if joined is None or joined.name != "cat" or (*joined.args, 0)[1] not in (-1, last):
        return data
    kept: list[Value] = []
    for part in joined.args[0]:
        if start < part.shape[-1] and -start < value.shape[-1] and not part.const:
            kept.append(part)
        start -= part.shape[-1]
    return kept


def _keeps_columns(op: Op) -> bool:
    """A rearrangement that leaves the last dimension where it is."""
    if op.out.shape[-1:] != op.reads[0].shape[-1:]:
        return False
    return op.name not in TURNS or turn(op)[-1] == len(op.out.shape) - 1


def scales(op: Op) -> bool:
    """A factor that is one constant number, as scaled_dot_product_attention puts on both operands."""
    if op.name not in SCALES or len(_data(op)) != 1:
        return False
    other = op.args[1]
    if op.name == "div" and isinstance(other, Value) and not other.const:
        return False
    return not isinstance(other, Value) or any(all(n == 1 for n in read.shape) for read in op.reads if read.const)


def project(op: Op | None) -> Projection | None:
    """The projection an operator is, a bias added right after included."""
    if op is None or op.out.const:
        return None
    if op.name == "add" and len(op.reads) == 2 and sum(root(read).param for read in op.reads) == 1:
        inner = next(read for read in op.reads if not root(read).param)
        found = project(root(inner).op)
        return None if found is None else replace(found, op=op, bias=True)
    if op.name not in CONTRACTIONS:
        return None
    left, right = op.reads[-2:]
    weights = [is_weight(root(read)) for read in (left, right)]
    if all(weights):  # of one request a latent is a matrix, too
        weights = [not is_matrix(read) for read in (left, right)]
    if sum(weights) != 1:
        return None
    activation, weight = (right, left) if weights[0] else (left, right)
    if operand(weight).node is None:
        return None
    return Projection(op, activation, weight, left.shape[-1], op.name in ADDED_PRODUCTS)


def is_part(weight: Value, whole: Value) -> bool:
    """True if a weight is cut out of another."""
    step = root(weight)
    while step.op is not None and step.op.name in PICKING:
        step = root(step.op.reads[0])
        if step is root(whole):
            return True
    return False


def unexpanded(value: Value) -> Value:
    """A shared tensor before it is expanded, or repeated, over heads; itself if it never is."""
    step = value
    while step.op is not None and not step.const:
        behind = _behind(step)
        if step.op.name in ("expand", "repeat") and _grows(behind[0].shape, step.shape):
            return behind[0]
        cut = first_column(step) is not None and [part.shape[-1] for part in behind] == [step.shape[-1]]
        if not cut and step.op.name not in LAYOUT and step.op.name != "repeat":
            break
        step = behind[0]
    return value


def _grows(source: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if dimensions of size one, or none, have become larger, and no others."""
    tail = shape[len(shape) - len(source) :]
    return source != tail and all(a in (1, b) for a, b in zip(source, tail, strict=True))


def factor_of(op: Op, scaled: Value) -> Value | None:
    """The tensor of one number that an operator scales a value by: a scale that is a buffer or a parameter."""
    if op.name not in SCALES or len(op.reads) != 2 or op.kwargs.get("rounding_mode"):
        return None
    if op.name == "div" and op.reads[0] is not scaled:
        return None
    factor = next((read for read in reversed(op.reads) if read is not scaled), scaled)
    one = factor is not scaled and math.prod(factor.shape) == 1 and factor.dtype.is_floating_point and not factor.const
    return named(factor) if one and op.out.shape == scaled.shape else None


def named(value: Value, rank: int = 0) -> Value | None:
    """The nearest value at or above ``value``, through rearrangements and constant factors, that a node yields."""
    step = value
    while step.node is None or len(step.shape) < rank:
        op = step.op
        if op is None or not (op.name in LAYOUT or scales(op)):
            return None
        step = _data(op)[0]
    return step


def heads_of(value: Value) -> Value | None:
    """Queries with their heads apart; one token, request or head may have no dimension of its own."""
    return named(value, 4) or named(value, 3) or named(value, 2)


def tokens_of(value: Value) -> Value | None:
    """A cache with its tokens apart; one request may have no dimension of its own."""
    return named(value, 3) or named(value, 2)
