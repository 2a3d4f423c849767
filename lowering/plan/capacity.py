"""What a stage keeps on chip at once, against what its core has.

A unit does its tasks of a section in order, step after step. A tile it makes is on chip until it is last read there; a
tile it loads, from the first to the last task of a stage that reads it. Cube keeps narrow operands in L1 and fp32
results in L0C, and takes operands through L0A and L0B in pieces; each of a group's Vec cores keeps its rows of every
tile in UB. On a GPU narrow tiles are in shared memory and fp32 ones in registers.

Two figures a stage and memory: what is alive at the worst moment, which no layout can go below, and every tile in a
place of its own, which is what the Ascend compiler lays out (``tests/ascend/test_compiler.py`` compares them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import CapacityError
from ..ir import DType, OpKind, Value
from ..stages import Stage, Task, evaluate, size
from ..target import Target, Unit
from .split import Graph

STREAM_ROWS = 16  # rows of a piece where a tile is handed over row by row
_PIECE = 2 * 32  # bytes of one row or column of an operand in L0A, L0B: one fractal deep, and the next being loaded
_ELEMENTWISE = (OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.SCALE, OpKind.NEG, OpKind.CAST)
_HOME = {
    (Unit.CUBE, DType.IO): "L1",
    (Unit.CUBE, DType.ACC): "L0C",
    (Unit.VEC, DType.IO): "UB",
    (Unit.VEC, DType.ACC): "UB",
    (Unit.CORE, DType.IO): "shared",
    (Unit.CORE, DType.ACC): "registers",
}


@dataclass(frozen=True)
class Need:
    """The most bytes a stage has in one memory of one core, and the tiles that make them up.

    ``apart``: every tile the stage ever has there, each once; a sum of products is one tile, and so is a carried value
    with what it becomes. Empty for L0A and L0B, through which Cube takes its operands in pieces.
    """

    stage: str
    memory: str
    bytes: int
    available: int
    tiles: tuple[tuple[str, int], ...]
    apart: tuple[tuple[str, int], ...] = ()

    @property
    def apart_bytes(self) -> int:
        return _total(self.apart)

    @property
    def over(self) -> int:
        return self.bytes - self.available

    def check(self) -> None:
        if self.over > 0:
            largest = max(self.tiles, key=lambda tile: tile[1])[0]
            raise CapacityError(self.stage, self.memory, largest, self.bytes, self.available, self.tiles)


@dataclass(frozen=True)
class Chip:
    """The sizes everything is measured with."""

    target: Target
    sizes: Mapping[str, int]
    widths: Mapping[DType, int]

    def bytes(self, value: Value, unit: Unit, *, streamed: bool) -> int:
        """Bytes of a tile in one core: the Vec cores of a group share its rows."""
        rows, cols = (evaluate(size(dim), self.sizes) for dim in value.type.shape)
        if unit is Unit.VEC:
            rows = -(-rows // self.target.vec_cores)
        if streamed:
            rows = min(rows, STREAM_ROWS)
        return rows * cols * self.widths[value.type.dtype]


def needs(graph: Graph, stages: Sequence[Stage], chip: Chip) -> tuple[list[Need], dict[str, frozenset[str]]]:
    """The needs of every stage, and by stage the tiles to hand over row by row.

    Whole tiles are handed over where they fit: a streamed one costs a synchronisation a piece.
    """
    found: list[Need] = []
    streamed: dict[str, frozenset[str]] = {}
    for stage in stages:
        ring = [s for s in stages if s.section is stage.section and s.unit is stage.unit]
        whole = _stage_needs(graph, stage, ring, chip, frozenset())
        if stage.unit is Unit.VEC and any(need.over > 0 for need in whole):
            streamed[stage.name] = _streamable(graph, stage, ring)
            whole = _stage_needs(graph, stage, ring, chip, streamed[stage.name])
        found += whole
    return found, streamed


def _streamable(graph: Graph, stage: Stage, ring: Sequence[Stage]) -> frozenset[str]:
    """Tiles a stage may take and leave row by row: all it does with them is elementwise, and it does not keep them."""
    kept = {value.name for value, (first, last) in _made(graph, ring).items() if last - first >= _length(ring)}
    touching: dict[str, list[Task]] = {}
    for task in stage.tasks:
        for value in (*task.inputs, task.output):
            touching.setdefault(value.name, []).append(task)
    held = {value.name for pair in graph.next.items() for value in pair} | kept
    wraps = {value.name for value, (_, last) in _made(graph, ring).items() if last >= _length(ring)}
    return frozenset(
        name
        for name, tasks in touching.items()
        if name not in held | wraps and all(task.op.kind in _ELEMENTWISE for task in tasks)
    )


def _stage_needs(graph: Graph, stage: Stage, ring: Sequence[Stage], chip: Chip, streamed: frozenset[str]) -> list[Need]:
    start = sum(len(s.tasks) for s in ring[: ring.index(stage)])
    made, period = _made(graph, ring), _length(ring)
    loaded = _loaded(graph, stage, made)
    peak: dict[str, list[tuple[str, int]]] = {}
    for i, task in enumerate(stage.tasks):
        alive = [v for v, (lo, hi) in loaded.items() if lo <= i <= hi]
        at = start + i
        alive += [
            v for v, (lo, hi) in made.items() if any(lo <= at + k * period <= hi for k in range(hi // period + 1))
        ]
        gone = _overwritten(graph, task, loaded, made, i, at, period)
        held: dict[str, list[tuple[str, int]]] = {}
        for value in alive:
            if value != gone:
                bytes = chip.bytes(value, stage.unit, streamed=value.name in streamed)
                operand = stage.unit is Unit.CUBE and value in loaded
                held.setdefault("L1" if operand else _HOME[stage.unit, value.type.dtype], []).append(
                    (value.name, bytes)
                )
        for memory, tiles in held.items():
            if _total(tiles) > _total(peak.get(memory, [])):
                peak[memory] = tiles
    apart = _apart(graph, stage, chip)
    found = [(memory, tiles, tuple(apart.get(memory, {}).items())) for memory, tiles in sorted(peak.items())]
    found += [(memory, [piece], ()) for memory, piece in _pieces(stage, chip).items()]
    return [
        Need(stage.name, memory, _total(tiles), capacity, tuple(tiles), places)
        for memory, tiles, places in found
        if (capacity := chip.target.capacity(memory)) is not None
    ]


def _apart(graph: Graph, stage: Stage, chip: Chip) -> dict[str, dict[str, int]]:
    """Every tile of a stage once, by memory. Cube has its operands in L1 and its sums in L0C: a cast is on store."""
    places: dict[str, dict[str, int]] = {}
    sums: dict[Value, Value] = {}  # a product -> the one that its sum begins with
    for task in stage.tasks:
        values = (*task.inputs, task.output)
        if stage.unit is Unit.CUBE:
            if task.op.kind is OpKind.CAST:
                continue
            sums[task.output] = sums.get(task.inputs[2], task.inputs[2]) if len(task.inputs) > 2 else task.output
            values = (*task.inputs[:2], sums[task.output])
        for value in values:
            value = graph.last.get(value, value)
            operand = stage.unit is Unit.CUBE and value in task.inputs[:2]
            memory = "L1" if operand else _HOME[stage.unit, value.type.dtype]
            places.setdefault(memory, {})[value.name] = chip.bytes(value, stage.unit, streamed=False)
    return places


def _pieces(stage: Stage, chip: Chip) -> dict[str, tuple[str, int]]:
    """The largest operand a stage takes through L0A (by rows) and L0B (by columns), and the bytes of its pieces."""
    widest: dict[str, tuple[str, int]] = {}
    if stage.unit is not Unit.CUBE:
        return widest
    for task in stage.tasks:
        if task.op.kind is OpKind.CAST:
            continue
        for memory, operand, dim in zip(("L0A", "L0B"), task.inputs, task.output.type.shape, strict=False):
            bytes = evaluate(size(dim), chip.sizes) * _PIECE
            if bytes > widest.get(memory, ("", 0))[1]:
                widest[memory] = (operand.name, bytes)
    return widest


def _made(graph: Graph, ring: Sequence[Stage]) -> dict[Value, tuple[int, int]]:
    """What this unit makes in this section: from its task to its last reader on the unit, in positions of the ring."""
    where: dict[Task, tuple[int, int]] = {}
    for stage in ring:
        for task in stage.tasks:
            where.setdefault(task, (len(where), stage.shift.get(task.name, 0)))
    period = _length(ring)
    alive: dict[Value, tuple[int, int]] = {}
    for task, (at, ahead) in where.items():
        reads = [(t, ahead) for t in graph.readers(task.output)]
        if task.output in graph.last:
            reads += [(t, ahead + 1) for t in graph.readers(graph.last[task.output])]
        ends = [where[t][0] + period * (lead - where[t][1]) for t, lead in reads if t in where]
        alive[task.output] = (at, max([at, *ends]))
    return alive


def _loaded(graph: Graph, stage: Stage, made: Mapping[Value, object]) -> dict[Value, tuple[int, int]]:
    """What a stage reads that its unit has not made in this section, from the first to the last task that does."""
    found: dict[Value, tuple[int, int]] = {}
    for i, task in enumerate(stage.tasks):
        for value in task.inputs:
            if value not in made and value not in graph.next:
                found[value] = (found.get(value, (i, i))[0], i)
    return found


def _overwritten(
    graph: Graph,
    task: Task,
    loaded: Mapping[Value, tuple[int, int]],
    made: Mapping[Value, tuple[int, int]],
    i: int,
    at: int,
    period: int,
) -> Value | None:
    """The operand whose memory the result takes: it dies here, is of the same type, and the op goes by elements."""
    if task.op.kind not in (*_ELEMENTWISE, OpKind.EXP, OpKind.DOT, OpKind.MASK):
        return None
    operands = task.inputs[2:] if task.op.kind is OpKind.DOT else task.inputs
    operands = tuple(graph.next.get(v, v) for v in operands)
    dying = {v for v, (_, hi) in loaded.items() if hi == i} | {v for v, (_, hi) in made.items() if hi % period == at}
    return next((v for v in operands if v in dying and v.type == task.output.type), None)


def _length(ring: Sequence[Stage]) -> int:
    return sum(len(stage.tasks) for stage in ring)


def _total(tiles: Sequence[tuple[str, int]]) -> int:
    return sum(bytes for _, bytes in tiles)
