"""Runs to stages: names, the order of tasks inside a stage, and what a stage reads, writes and costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import sympy

from ..ir import DType, OpKind
from ..stages import SCANS, Buffer, Scope, Section, Stage, Task, op_flops, size, symbol
from ..target import Unit
from .buffers import Rule, allocate, buffers, is_cheap
from .hazards import Order
from .split import Graph, PlacedRun, Run

_MOST_ORDERS = 300  # of one stage's tasks; the family's stages have a few dozen


def name_runs(graph: Graph, cut: Mapping[Section, Sequence[Run]]) -> list[PlacedRun]:
    """Runs with their stage names: ``scan.1.cube``, or just the section where one core does everything."""
    placed: list[PlacedRun] = []
    for section in Section:
        start = 0
        for i, run in enumerate(_recomputed(graph, cut[section]), 1):
            name = section.value if run.unit is Unit.CORE else f"{section.value}.{i}.{run.unit.value}"
            placed.append(PlacedRun(name, section, run.unit, run.tasks, run.shift, start))
            start += len(run.tasks)
    return placed


def _recomputed(graph: Graph, runs: Sequence[Run]) -> list[Run]:
    """The runs with what is quicker made again from a port than handed on placed in every run that reads it."""
    cheap = [t for t in graph.tasks if is_cheap(graph, t)]
    result: list[Run] = []
    for run in runs:
        own = [t for t in run.tasks if t not in cheap]
        again = [t for t in cheap if t.unit is run.unit and any(t.output in o.inputs for o in own)]
        loose = [t for t in run.tasks if t in cheap and t not in again and _crosses(graph, t)]
        kept = [t for t in run.tasks if t not in again and (t not in cheap or t in loose)]
        tasks = (*again, *kept)
        result.append(Run(run.unit, tasks, run.shift))
    return [run for run in result if run.tasks]


def _crosses(graph: Graph, task: Task) -> bool:
    """Whether another unit, or the caller, reads what a cheap task makes."""
    readers = graph.readers(task.output)
    return not readers or any(t.unit is not task.unit for t in readers)


def order_scan(
    graph: Graph,
    cut: Mapping[Section, Sequence[Run]],
    rule: Rule,
    tiles: int,
    sizes: Mapping[str, int],
    widths: Mapping[DType, int],
) -> dict[Section, list[Run]]:
    """The same stages, with the tasks of each scan stage in the order that keeps the fewest workspace bytes alive.

    The first such order in program order is taken, so that a stage that gains nothing stays as it was written. Stages
    that work for several steps keep theirs: it is what makes them overlap.
    """
    best = {section: list(runs) for section, runs in cut.items()}
    if sum(bool(run.shift) for run in best[Section.SCAN]) > 1:
        return best

    def alive() -> int:
        placed = name_runs(graph, best)
        scan = [run for run in placed if run.section is Section.SCAN]
        found = workspaces(buffers(graph, placed, rule, tiles), scan)
        return allocate(found, Order(graph, scan), sizes, widths, reuse=True)[1]

    least = alive()
    if not least:
        return best
    for i, run in enumerate(best[Section.SCAN]):
        chosen = run
        for order in islice(_orders(graph, run), _MOST_ORDERS):
            best[Section.SCAN][i] = Run(run.unit, order, run.shift)
            if (now := alive()) < least:
                least, chosen = now, best[Section.SCAN][i]
        best[Section.SCAN][i] = chosen
    return best


def workspaces(found: Sequence[Buffer], runs: Sequence[PlacedRun]) -> list[Buffer]:
    """The buffers that pass through memory inside these runs."""
    names = {run.name for run in runs}
    return [b for b in found if b.lifetime is not None and b.producer in names]


def _orders(graph: Graph, run: Run, done: tuple[Task, ...] = ()) -> Iterator[tuple[Task, ...]]:
    """All orders of a run's tasks that its dependences allow; tasks of different steps are independent."""
    if len(done) == len(run.tasks):
        yield done
        return
    for task in run.tasks:
        if task in done:
            continue
        waits = [t for t in graph.before(task) if t in run.tasks and _same_step(run, t, task)]
        if run.shift.get(task.name, 0):
            nexts = {graph.next[v] for v in task.inputs if v in graph.next}
            waits += [t for t in run.tasks if t.output in nexts and not run.shift.get(t.name, 0)]
        if all(t in done for t in waits):
            yield from _orders(graph, run, (*done, task))


def _same_step(run: Run, a: Task, b: Task) -> bool:
    return run.shift.get(a.name, 0) == run.shift.get(b.name, 0)


def make_stage(run: PlacedRun, found: Sequence[Buffer], graph: Graph) -> Stage:
    """A stage with what it reads, writes and costs.

    ``rounding``: casts to the inputs' dtype that lose something, and values whose buffer is planned narrow.
    """
    reads = tuple(sorted((b for b in found if run.name in b.consumers and b.scope is not Scope.LOCAL), key=_name))
    writes = tuple(sorted((b for b in found if b.producer == run.name and _leaves(b)), key=_name))
    casts = [t.name for t in run.tasks if t.op.kind is OpKind.CAST]
    narrowed = [b.name for b in writes if b.dtype is DType.IO and b.scope is not Scope.PORT]
    flops = sum((task_flops(task) for task in run.tasks), sympy.Integer(0))
    moved = sum((_bytes(b) for b in (*reads, *writes) if b.layout != "lane"), sympy.Integer(0))
    domain = ("lane",) if run.section in SCANS and graph.next else ("lane", "step")
    return Stage(
        run.name,
        run.section,
        run.unit,
        run.tasks,
        reads,
        writes,
        domain,
        tuple(dict.fromkeys((*casts, *narrowed))),
        sympy.expand(flops),
        sympy.expand(moved),
        dict(run.shift),
    )


def _leaves(buffer: Buffer) -> bool:
    return buffer.scope in (Scope.PORT, Scope.TENSOR, Scope.WORKSPACE)


def task_flops(task: Task) -> sympy.Expr:
    """Multiplies and adds of a task; the parts of a gated Gram matrix share the count of the whole.

    Cube multiplies full tiles, so its part counts the square and not the triangle.
    """
    if not task.part:
        return op_flops(task.op)
    rows, cols = task.op.result.type.shape
    if task.part == "product" and task.op.kind is OpKind.GATED_DOT:
        return 2 * size(rows) * size(rows) * size(cols)
    if task.part == "product":
        return 2 * size(rows) * size(cols) * size(task.op.inputs[0].type.cols)
    return size(task.output.type.rows) * size(task.output.type.cols)


def _bytes(buffer: Buffer) -> sympy.Expr:
    return buffer.elements * symbol(f"{buffer.dtype.value}_bytes")


def _name(buffer: Buffer) -> str:
    return buffer.name
