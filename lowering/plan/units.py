"""A program made fit for its target's units, and each of its ops put on one.

Cube multiplies two narrow tiles, accumulates into its own fp32 result and casts on store; it neither subtracts nor
starts from a tile that Vec made. So for such a target

* operands of products are narrowed by a visible ``cast``, which is where rounding happens;
* ``acc - x @ y`` becomes ``acc + (-x) @ y``, with the sign moved into whatever Vec computes upstream;
* a triangular inverse whose columns are scaled, or rounded, is multiplied by a diagonal matrix, so that it need not go
  back to Vec for it;
* ``acc + x @ y`` stays one product where ``acc`` is itself a product nobody else reads, and is a product and an
  addition on Vec where it is not (the fp32 carry is on Vec: Cube's accumulator cannot be loaded).

Where a target's compiler lets Cube do neither (``Target.accumulates``, ``Target.narrows``), sums and casts are Vec's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..decay import SUB_CHUNK
from ..errors import TileProgramError
from ..ir import Attr, Dim, DType, Op, OpKind, Program, TileType, Value, infer
from ..stages import Task
from ..target import Target, Unit
from ..validate import validate


def legalise(program: Program, target: Target, *, accumulate: bool = True, ahead: bool = False) -> Program:
    """``program`` as ``target`` computes it; the same program for a target that is one process of torch.

    ``accumulate=False`` leaves a sum of two products that the text writes as an addition to Vec. ``ahead``: as in
    :class:`~.model.Options`.
    """
    if target.name == "cpu":
        return program
    return _Legaliser(program, target, accumulate, ahead).run()


@dataclass(frozen=True)
class Joined:
    """A triangular inverse that Cube joins from what Vec has left beside products of its own: ``gram``, of which only
    the inverse is made, the ``factors`` of its rows, which are those of the inverse's columns, and the ``result``."""

    gram: Value
    factors: tuple[Value, ...]
    result: Value
    skipped: tuple[Value, ...]  # what is not made apart


def joined(program: Program) -> dict[Value, Joined]:
    """By inverse: those of a Gram matrix with gates. With T = M diag(b) of M = (I + diag(b) L)^-1, blocks of T are
    joined by L alone: [[x, 0], [-y L x, y]] where x and y are blocks of T."""
    found: dict[Value, Joined] = {}
    for op in program.ops:
        if op.kind is not OpKind.UNIT_LOWER_INVERSE:
            continue
        (x,), gram, result = op.inputs, program.producer(op.inputs[0]), op.result
        factors, skipped = tuple[Value, ...](), tuple[Value, ...]()
        if gram.kind is OpKind.MUL:
            readers, factors = _readers(program, result), gram.inputs[1:]
            if len(readers) != 1 or readers[0].kind is not OpKind.MUL:
                continue
            rows, result = readers[0].inputs[1:], readers[0].result
            turned = [row for row in map(program.producer, rows) if row.kind is OpKind.TRANSPOSE]
            if [row.inputs for row in turned] != [factors]:
                continue
            skipped = (x, *rows, result)
            gram = program.producer(gram.inputs[0])
        alone = len(_readers(program, gram.result)) == len(_readers(program, x)) == 1
        if alone and gram.kind is OpKind.GATED_GRAM:
            found[op.result] = Joined(gram.result, factors, result, skipped)
    return found


def _readers(program: Program, value: Value) -> list[Op]:
    return [op for op in program.ops if value in op.inputs]


def tasks(program: Program, target: Target, *, whole: bool = False, ahead: bool = False) -> tuple[Task, ...]:
    """The ops that compute, in program order, with macro-ops cut at their changes of unit; inverses are not where
    ``whole``, nor where Cube could not leave their result as it is wanted. ``ahead``: as in :class:`~.model.Options`;
    a cast of what is joined on Cube has a second input, in whose memory its result lies."""
    found: list[Task] = []
    on_cube: set[Value] = set()
    inverses = joined(program) if ahead else {}
    skipped = {value for inverse in inverses.values() for value in inverse.skipped}
    beside: dict[Value, Value] = {}
    shared: dict[tuple[Value, Value, str], Value] = {}
    inverted: tuple[Value, ...] = ()
    for op in program.ops:
        if op.kind in (OpKind.LOAD, OpKind.STORE, OpKind.CARRY) or is_widening(op):
            continue
        if op.output in skipped:
            continue
        if target.split and op.kind is OpKind.GATED_GRAM:
            *parts, product, triangle = _gram_parts(program, op, shared, levels=bool(inverses))
            if inverses:
                product = replace(product, output=op.result)
                if all(op.result != inverse.gram for inverse in inverses.values()):
                    beside[op.result] = Value(f"{op.result.name}_diagonal", replace(op.result.type, dtype=DType.IO))
                    parts.append(Task(op, Unit.VEC, triangle.inputs[1:], beside[op.result], "diagonal"))
                on_cube.add(op.result)
            found += [*parts, product, *([] if inverses else [triangle])]
            continue
        if op.kind is OpKind.UNIT_LOWER_INVERSE and op.result in inverses:
            inverse = inverses[op.result]
            beside[inverse.result] = Value(f"{op.result.name}_rounded", replace(op.result.type, dtype=DType.IO))
            found += _joined_parts(program, op, inverse, beside[inverse.result])
            on_cube.add(inverse.result)
            continue
        if op.kind is OpKind.CAST and op.inputs[0] in beside:
            found.append(Task(op, Unit.CUBE, (op.inputs[0], beside[op.inputs[0]]), op.result))
            on_cube.add(op.result)
            continue
        if target.split and op.kind is OpKind.GATED_DOT:
            found += _weighted_parts(program, op, shared)
            continue
        if target.split and target.narrows and op.kind is OpKind.UNIT_LOWER_INVERSE and not whole:
            found += _inverse_parts(program, op)
            on_cube.add(op.result)
            inverted = op.inputs
            continue
        if target.split and op.kind is OpKind.EYE:  # scales an inverse: made when that is, not chunks before
            found.append(Task(op, Unit.VEC, inverted, op.result))
            continue
        unit = _unit(op, on_cube, target) if target.split else Unit.CORE
        if unit is Unit.CUBE:
            on_cube.add(op.result)
        found.append(Task(op, unit, tuple(narrow_source(program, v) for v in op.inputs), op.result))
    return tuple(found)


def is_product(op: Op) -> bool:
    """A product Cube takes: a matrix by a matrix (a single row or column is Vec's, and keeps fp32)."""
    if op.kind is not OpKind.DOT:
        return False
    a, b = op.inputs[0].type, op.inputs[1].type
    return 1 not in (*a.shape, *b.shape)


def is_widening(op: Op) -> bool:
    """A cast that loses nothing: its reader widens on arrival."""
    return op.kind is OpKind.CAST and op.inputs[0].type.dtype is DType.IO


def narrow_source(program: Program, value: Value) -> Value:
    """What ``value`` was before lossless widening."""
    op = program.producer(value)
    return op.inputs[0] if is_widening(op) else value


def _unit(op: Op, on_cube: set[Value], target: Target) -> Unit:
    cast_on_store = target.narrows and op.kind is OpKind.CAST and op.inputs[0] in on_cube
    return Unit.CUBE if is_product(op) or cast_on_store else Unit.VEC


def _gram_parts(program: Program, op: Op, shared: dict[tuple[Value, Value, str], Value], *, levels: bool) -> list[Task]:
    """``gated_gram`` by its changes of unit; ``shared`` has the scaled rows and columns that other ops use too.

    One gate per channel, or ``levels``: Vec scales rows and columns, level by level, around the middle of every two
    blocks, Cube multiplies, Vec fills the diagonal blocks and selects the triangle. One gate per token: Cube multiplies
    what was loaded, Vec scales.
    """
    x, y, gate = (narrow_source(program, v) for v in op.inputs)
    rows, cols = op.inputs[0].type.shape
    parts: list[Task] = []
    raw = Value(f"{op.result.name}_raw", TileType(rows, rows, DType.ACC))
    left, right = x, y
    levels = levels or gate.type.cols != 1
    if levels:
        half = TileType(_half_of_levels(rows), cols, DType.IO)
        for source, part, name in ((x, "rows", op.result.name), (y, "cols", y.name)):
            if (source, gate, part) not in shared:
                shared[source, gate, part] = Value(f"{name}_{part}", half)
                parts.append(Task(op, Unit.VEC, (source, gate), shared[source, gate, part], part))
        left, right = shared[x, gate, "rows"], shared[y, gate, "cols"]
    elif x.type.dtype is not DType.IO:
        left = Value(f"{op.result.name}_rows", TileType(rows, cols, DType.IO))
        parts.append(Task(op, Unit.VEC, (x,), left, "rows"))
    parts.append(Task(op, Unit.CUBE, (left, right), raw, "product"))
    finish = (raw, x, y, gate) if levels else (raw, gate)
    parts.append(Task(op, Unit.VEC, finish, op.result, "triangle"))
    return parts


def _weighted_parts(program: Program, op: Op, shared: dict[tuple[Value, Value, str], Value]) -> list[Task]:
    """``gated_dot`` by its changes of unit.

    One gate per token: Vec puts the decays to the weights, once for both directions, and Cube multiplies. One per
    channel, which decays every column of a product differently: Cube multiplies level by level what Vec has scaled for
    the Gram matrices already, and Vec scales the products' rows again and adds the diagonal blocks.
    """
    weights, y, gate = (narrow_source(program, v) for v in op.inputs)
    parts: list[Task] = []
    if gate.type.cols == 1:
        if (weights, gate, "decayed") not in shared:
            decayed = Value(f"{weights.name}_decayed", replace(weights.type, dtype=DType.IO))
            parts.append(Task(op, Unit.VEC, (weights, gate), decayed, "decayed"))
            shared[weights, gate, "decayed"] = decayed
        return [*parts, Task(op, Unit.CUBE, (shared[weights, gate, "decayed"], y), op.result, "product")]
    scaled = shared.get((y, gate, "rows" if op.attr("trans_a", False) else "cols"))
    if scaled is None or weights.type.dtype is not DType.IO:
        raise TileProgramError("pairs that a gate per channel decays are those of a Gram matrix, and narrow", str(op))
    raw = Value(f"{op.result.name}_levels", replace(scaled.type, dtype=DType.ACC))
    parts.append(Task(op, Unit.CUBE, (weights, scaled), raw, "product"))
    return [*parts, Task(op, Unit.VEC, (raw, weights, y, gate), op.result, "pairs")]


def _half_of_levels(rows: Dim) -> str:
    """Rows of what a level scales, over all levels: half a chunk each, as blocks of SUB_CHUNK double to the chunk."""
    return f"{rows}*log({rows}/{SUB_CHUNK}, 2)/2"


def _inverse_parts(program: Program, op: Op) -> list[Task]:
    """``unit_lower_inverse``: Vec inverts the diagonal blocks of one fractal by forward substitution, and negates what
    is below them; Cube joins two neighbours x and y into ``[[x, 0], [y l x, y]]``, level by level. All in one tile.

    With a gate per channel the diagonal blocks are inverted where they are made, without Cube, and what Vec does later
    goes by elements. What Cube makes on the way, y l of all levels, has as many elements as ``left`` says.
    """
    (x,), size, name = op.inputs, op.result.type.rows, op.result.name
    blocks = Value(f"{name}_blocks", TileType(size, size, DType.ACC))
    left = Value(f"{name}_left", TileType(f"{size}/2", f"{size} - {SUB_CHUNK}", DType.ACC))
    gram, factors = program.producer(x), tuple[Value, ...]()
    if gram.kind is OpKind.MUL:
        gram, factors = program.producer(gram.inputs[0]), gram.inputs[1:]
    first, source = list[Task](), (x,)
    if gram.kind is OpKind.GATED_GRAM and gram.inputs[2].type.cols != 1:
        inverted = Value(f"{name}_inverted", x.type)
        inputs = tuple(narrow_source(program, value) for value in (*gram.inputs[1:], *factors))
        first, source = [Task(op, Unit.VEC, inputs, inverted, "diagonal")], (x, inverted)
    return [
        *first,
        Task(op, Unit.VEC, source, blocks, "blocks"),
        Task(op, Unit.CUBE, (blocks,), left, "left"),
        Task(op, Unit.CUBE, (left, blocks), op.result, "join"),
    ]


def _joined_parts(program: Program, op: Op, inverse: Joined, narrow: Value) -> list[Task]:
    """The same of an inverse that Cube joins without Vec: what is below the diagonal blocks, negated, it has put beside
    them itself. Every block is rounded as it is stored, and those that are joined further are stored in fp32 as well:
    as (y l) x and as y (l x), so that Cube need not let Vec cast one."""
    size = op.result.type.rows
    gram = program.producer(inverse.gram)
    inputs = tuple(narrow_source(program, value) for value in (*gram.inputs[1:], *inverse.factors))
    blocks = Value(f"{op.result.name}_inverted", op.result.type)
    left = Value(f"{op.result.name}_left", TileType(size, f"3*{size}/4 - {SUB_CHUNK}", DType.ACC))
    return [
        Task(op, Unit.VEC, inputs, blocks, "diagonal"),
        Task(op, Unit.VEC, inputs, narrow, "diagonal"),
        Task(op, Unit.CUBE, (inverse.gram, blocks), left, "left"),
        Task(op, Unit.CUBE, (left, blocks), inverse.result, "join"),
    ]


class _Legaliser:
    """The program written again op by op, as the rules above ask for."""

    def __init__(self, program: Program, target: Target, accumulate: bool, ahead: bool = False) -> None:
        self.program, self.split = program, target.split
        self.chains = target.accumulates
        self.accumulate = accumulate and target.accumulates
        self.stays = self.accumulate and target.split and target.narrows  # a triangular inverse, on Cube
        self.ops: list[Op] = []
        self.new: dict[Value, Value] = {}  # value of the old program -> of the new one
        self.producer: dict[Value, Op] = {}  # of the new program
        self.names = {op.output.name for op in program.ops if op.output is not None and op.kind is not OpKind.CAST}
        self.narrowed: dict[Value, Value] = {}
        self.negated: dict[Value, Value] = {}
        self.inverses: set[Value] = set()  # by a diagonal matrix
        self.joined = joined(program) if ahead else {}
        self.readers: dict[Value, int] = {}
        for op in program.ops:
            for value in op.inputs:
                self.readers[value] = self.readers.get(value, 0) + 1

    def run(self) -> Program:
        operands = {v for op in self.program.ops if is_product(op) for v in op.inputs[:2]}
        for op in self.program.ops:
            if op.kind is OpKind.DOT:
                self.new[op.result] = self.dot(op)
            elif op.kind is OpKind.CAST and (known := self.narrowed.get(self.new[op.inputs[0]])) is not None:
                self.new[op.result] = known  # a product has it so already
            elif op.kind is OpKind.MUL and (scaled := self.scaled_inverse(op)) is not None:
                self.new[op.result] = scaled
            elif op.kind in (OpKind.ADD, OpKind.SUB) and (total := self.sum(op)) is not None:
                self.new[op.result] = total
            else:
                inputs = tuple(self.new[v] for v in op.inputs)
                made = self.append(Op(op.kind, inputs, op.output, op.attrs))
                if op.output is None:
                    continue
                self.new[op.output] = made
            if op.result in operands:  # narrowed where it is made, by the unit that made it
                self.narrow_down(self.new[op.result])
        carry, reverse = (
            None if carry is None else replace(carry, step=self.new[carry.step])
            for carry in (self.program.carry, self.program.reverse)
        )
        program = replace(self.program, ops=tuple(self.ops), carry=carry, reverse=reverse)
        program = replace(program, ops=_live(program))
        validate(program)
        return program

    def dot(self, op: Op) -> Value:
        if not is_product(op):
            inputs = tuple(self.new[v] for v in op.inputs)
            return self.append(Op(op.kind, inputs, op.output, op.attrs))
        x, y = (self.new[v] for v in op.inputs[:2])
        acc = self.new[op.inputs[2]] if len(op.inputs) == 3 else None
        attrs = dict(op.attrs)
        if not self.split:
            return self.product(op, x, y, acc, attrs, op.result.name)
        negate = bool(attrs.pop("negate", False))
        sums = acc is not None and self._chains(op.inputs[2], acc)
        if negate and sums:
            x, negate = self.negative(x), False
        if acc is not None and not (sums and self.chains):
            raw = self.product(op, x, y, None, attrs, self.fresh(_product_name(op)))
            kind = OpKind.SUB if negate else OpKind.ADD
            return self.emit(kind, (acc, raw), op.result.name)
        if negate:
            x = self.negative(x)
        return self.product(op, x, y, acc, attrs, op.result.name)

    def _chains(self, old: Value, acc: Value) -> bool:
        made = self.producer[acc]
        return self.readers[old] == 1 and made.kind is OpKind.DOT and is_product(made)

    def sum(self, op: Op) -> Value | None:
        """``acc + x @ y`` or ``acc - x @ y`` written as two ops, as one product where Cube can form it."""
        if not self.split or not self.accumulate:
            return None
        pairs = [op.inputs] if op.kind is OpKind.SUB else [op.inputs, op.inputs[::-1]]
        for acc, term in pairs:
            made = self.producer[self.new[term]]
            if len(made.inputs) == 2 and self._chains(acc, self.new[acc]) and self._chains(term, self.new[term]):
                x, y = (self._wide(v) for v in made.inputs)
                x = self.negative(x) if op.kind is OpKind.SUB else x
                return self.product(made, x, y, self.new[acc], dict(made.attrs), op.result.name)
        return None

    def scaled_inverse(self, op: Op) -> Value | None:
        """A triangular inverse by a row of factors."""
        x, row = op.inputs
        if x in self.joined and op.result == self.joined[x].result:
            self.inverses.add(op.result)
        if not self.is_inverse(self.new[x]) or self.readers[x] != 1 or row.type.rows != 1:
            return None
        return self.times_diagonal(self.new[x], self.new[row], op.result.name)

    def times_diagonal(self, x: Value, row: Value | None, name: str) -> Value:
        """``x`` with its columns times ``row``, or times 1, as a product of fp32 tiles."""
        right = self.emit(OpKind.EYE, (), self.fresh(f"{name}_ones"), dim=x.type.cols)
        if row is not None:
            right = self.emit(OpKind.MUL, (right, row), self.fresh(f"{name}_factors"))
        result = self.emit(OpKind.DOT, (x, right), name)
        self.inverses.add(result)
        return result

    def is_inverse(self, x: Value) -> bool:
        return self.stays and x not in self.joined and self.producer[x].kind is OpKind.UNIT_LOWER_INVERSE

    def product(self, op: Op, x: Value, y: Value, acc: Value | None, attrs: dict[str, Attr], name: str) -> Value:
        operands = (self.narrow_down(x), self.narrow_down(y))
        return self.emit(op.kind, operands if acc is None else (*operands, acc), name, **attrs)

    def narrow_down(self, x: Value) -> Value:
        """``x`` in the inputs' dtype; what was loaded in it is taken as it was."""
        if x.type.dtype is DType.IO:
            return x
        made = self.producer[x]
        if is_widening(made):
            return made.inputs[0]
        if x not in self.narrowed:
            wide = self.times_diagonal(x, None, self.fresh(f"{x.name}_joined")) if self.is_inverse(x) else x
            self.narrowed[x] = self.narrowed[wide] = self.emit(
                OpKind.CAST, (wide,), self.fresh(f"{x.name}_io"), to=DType.IO.value
            )
        return self.narrowed[x]

    def negative(self, x: Value) -> Value:
        """``-x``, with the sign moved through products to where Vec can take it at no price."""
        if x in self.negated:
            return self.negated[x]
        made = self.producer[x]
        if made.kind is OpKind.CAST and not is_widening(made):
            return self.negative(made.inputs[0])
        if is_product(made) and len(made.inputs) == 2:
            wide = [self._wide(v) for v in made.inputs]
            at = 1 if self._cost(wide[1]) < self._cost(wide[0]) else 0
            wide[at] = self.negative(wide[at])
            result = self.product(made, wide[0], wide[1], None, dict(made.attrs), self.fresh(f"{x.name}_neg"))
        else:
            result = self.emit(OpKind.NEG, (x,), self.fresh(f"{x.name}_neg"))
        self.negated[x] = result
        return result

    def _wide(self, value: Value) -> Value:
        made = self.producer[value]
        return made.inputs[0] if made.kind is OpKind.CAST else value

    def _cost(self, value: Value) -> tuple[bool, bool]:
        """Negating is free on what Vec makes for this product alone, a tensor more on what is loaded or shared, and two
        hand-overs more on an inverse."""
        made = self.producer[value]
        if value in self.inverses:
            return (True, True)
        return (made.kind in (OpKind.LOAD, OpKind.CARRY), self.readers.get(value, 0) > 1)

    def emit(self, kind: OpKind, inputs: tuple[Value, ...], name: str, **attrs: Attr) -> Value:
        value = Value(name, infer(kind, inputs, attrs, name))
        return self.append(Op(kind, inputs, value, tuple(sorted(attrs.items()))))

    def append(self, op: Op) -> Value:
        self.ops.append(op)
        if op.output is None:
            return op.inputs[0]
        self.producer[op.output] = op
        self.names.add(op.output.name)
        return op.output

    def fresh(self, name: str) -> str:
        fresh, n = name, 0
        while fresh in self.names:
            n += 1
            fresh = f"{name}_{n}"
        return fresh


def _product_name(op: Op) -> str:
    """A name for the product inside ``acc + x @ y``: the change of a carry is called by what it changes."""
    name = op.result.name
    return f"d{name.removesuffix('_next')}" if name.endswith("_next") else f"{name}_product"


def _live(program: Program) -> tuple[Op, ...]:
    needed = {carry.step for carry in program.carries}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if op.output is None or op.output in needed or op.kind is OpKind.CARRY:
            needed.update(op.inputs)
            kept.append(op)
    return tuple(reversed(kept))
