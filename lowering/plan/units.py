"""Each op of a program on one of its target's units: products of matrices on Cube, everything else on Vec.

An op that changes units within (a Gram matrix with gates, a triangular inverse) becomes several tasks. A cast that
follows a product is Cube's where it stores what it casts (``Target.narrows``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..decay import SUB_CHUNK
from ..errors import TileProgramError
from ..ir import Dim, DType, Op, OpKind, Program, TileType, Value
from ..stages import Task
from ..target import Target, Unit


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
