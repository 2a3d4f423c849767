"""The stage split: which tasks stay in the scan, and the fewest changes of unit they can be run with.

A *hand-over* is a change of unit between consecutive stages of the scan, per step, the wrap to the next step included.

Why the number found is the least. In a steady state of any schedule that runs h changes of unit a step, give every
task the position ``h * (step it is late by) + (index of its stage)``. A task that reads another's result has to stand
at the same position or later, minus h for each step the result is carried over; and a position's parity is its unit's.
These are difference constraints: they have a solution exactly if no cycle of dependences demands more than it is
given, and cycles are closed by the carry alone. So h changes suffice if and only if no way from a reader of the carry
to the carry's next value, closed into a ring, changes unit more than h times (and h >= 2 where both units have work in
the scan). :func:`circuit_bound` computes that maximum; :func:`arrange` finds positions for it. The tests compare both
with an exhaustive search over all orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..ir import OpKind, Program
from ..partition import Flow, carried, partition, reversed_steps
from ..stages import Section, Task
from ..target import Unit
from .fold import Carried


@dataclass(frozen=True)
class Run:
    """Neighbouring tasks of one unit. ``shift``: tasks that work for a later step than the run's own, by how many."""

    unit: Unit
    tasks: tuple[Task, ...]
    shift: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class PlacedRun:
    """A stage before it is one: its name and section, and where its tasks stand in the section's order."""

    name: str
    section: Section
    unit: Unit
    tasks: tuple[Task, ...]
    shift: Mapping[str, int]
    start: int


class Graph(Flow[Task]):
    """The tasks of a program and who reads what of them; the carry's value comes from the step before."""

    def __init__(self, program: Program, tasks: Sequence[Task], folded: Carried = ()) -> None:
        super().__init__(tasks, {**dict(folded), **carried(program)}, reversed_steps(program))
        self.program = program
        self.tasks = self.nodes

    def edges(self) -> list[tuple[Task, Task, int]]:
        """(earlier, later, steps in between)."""
        within = [(a, b, 0) for b in self.tasks for a in self.before(b)]
        made = {value: self.made.get(step) for value, step in self.next.items()}
        across = [(a, b, 1) for value, a in made.items() if a is not None for b in self.readers(value)]
        return within + across


def place(graph: Graph, *, hoist: bool, outputs: Section, values: str = "prologue") -> dict[Task, Section]:
    """The section of every task; ``hoist``: what is free of the carry leaves the scan.

    ``outputs``, ``values``: as in :class:`~kdacompile.lowering.target.Target`. A product goes where its sum with
    another product is formed, and a cast to the inputs' dtype where its operand is made.
    """
    if not graph.next:
        return dict.fromkeys(graph.tasks, Section.PROLOGUE)
    if not hoist:
        return dict.fromkeys(graph.tasks, Section.SCAN)

    def narrows(task: Task, scan: set[Task]) -> bool:
        if task.op.kind is not OpKind.CAST:
            return False
        source = task.inputs[0]
        made = graph.made.get(graph.next.get(source, source))
        return made is not None and made in scan and made.unit is task.unit

    def summed(task: Task) -> list[Task]:
        """The products that a task adds to another, in Cube's accumulator or on Vec."""
        if task.op.kind is OpKind.DOT and len(task.inputs) == 3 and task.unit is Unit.CUBE:
            return [graph.made[task.inputs[2]]]
        terms = [graph.made[v] for v in task.inputs if v in graph.made] if task.op.kind is OpKind.ADD else []
        products = [t for t in terms if t.op.kind is OpKind.DOT and t.unit is Unit.CUBE]
        return products if len(products) == 2 else []

    return partition(
        graph, outputs=outputs, values=values, joins_scan=narrows, summed=summed, apart=_over_tokens, stays=_scaled
    )


def _scaled(task: Task) -> bool:
    """Whether a task scales for products what every channel has a decay of its own for: all of it is made at once."""
    return task.part in ("rows", "cols")


def _over_tokens(task: Task) -> bool:
    """Whether a task sums over tokens on Vec: their gates, or pairs of which every channel has a decay of its own."""
    return task.op.kind in (OpKind.CUMSUM, OpKind.REDUCE) or task.part == "pairs"


def of_gates(program: Program, run: Sequence[Task]) -> list[Task]:
    """The tasks of a prologue's first run on Vec that need a gate per channel, directly or not, up to where they round
    what they make; and the scaled queries."""
    gated = {op.result for op in program.ops if op.attrs == (("port", "g"),)}
    gated |= {op.result for op in program.ops if set(op.inputs) & gated and len(op.inputs) == 1}
    own: list[Task] = []
    for task in run:
        if gated & {*task.inputs, *task.op.inputs} or task.name == "q_scaled":
            own.append(task)
            if task.op.kind is not OpKind.CAST:
                gated.add(task.output)
    return own


def gates_first(graph: Graph, runs: Sequence[Run]) -> list[Run]:
    """The runs of a prologue in which what needs a gate per channel, a kernel of its own, has the first run for itself:
    other tasks wait for the next run of Vec, unless Cube does not. Elsewhere Cube ends its first run with the Gram
    matrices, which lie in a tensor, or the compiler would have one flag for them and the tile behind them."""
    if runs and runs[0].unit is Unit.CUBE:
        in_tensors = [t for t in runs[0].tasks if t.op.kind is OpKind.GATED_GRAM]
        others = [t for t in runs[0].tasks if t not in in_tensors]
        return [Run(Unit.CUBE, (*others, *in_tensors)), *runs[1:]]
    if len(runs) < 3 or not any(task.part == "cols" for task in runs[0].tasks):
        return list(runs)
    first, cube, then, *rest = runs
    own = of_gates(graph.program, first.tasks)
    waited = set(cube.tasks)
    for task in reversed(first.tasks):
        if waited.intersection(graph.readers(task.output)):
            waited.add(task)
    late = tuple(t for t in first.tasks if t not in own and t not in waited)
    kept = tuple(t for t in first.tasks if t not in late)
    return [Run(first.unit, kept), cube, Run(then.unit, (*late, *then.tasks)), *rest]


def move_ahead(cut: Mapping[Section, Sequence[Run]]) -> dict[Section, list[Run]]:
    """The products of a prologue at the end of Cube's part of the scan, for the next step: Cube does them while Vec is
    at the state."""
    own = {task for run in cut[Section.PROLOGUE] if run.unit is Unit.CUBE for task in run.tasks}
    scan: list[Run] = []
    for run in cut[Section.SCAN]:
        ahead = tuple(t for r in cut[Section.PROLOGUE] if run.unit is r.unit is Unit.CUBE for t in r.tasks)
        scan.append(Run(run.unit, (*run.tasks, *ahead), {**run.shift, **{task.name: 1 for task in ahead}}))
    rest = [run for run in cut[Section.PROLOGUE] if not own.intersection(run.tasks)]
    return {section: list(runs) for section, runs in cut.items()} | {Section.PROLOGUE: rest, Section.SCAN: scan}


def in_order(tasks: Iterable[Task]) -> list[Run]:
    """Runs of the tasks just as they stand."""
    runs: list[list[Task]] = []
    for task in tasks:
        if runs and runs[-1][-1].unit is task.unit:
            runs[-1].append(task)
        else:
            runs.append([task])
    return [Run(run[0].unit, tuple(run)) for run in runs]


def fewest_runs(graph: Graph, tasks: Sequence[Task]) -> list[Run]:
    """The fewest runs of a section without a ring: from either unit, always do all that can be done before changing.

    Doing more of what is ready never delays anything, so this is the least for the unit it starts with.
    """
    units = list(dict.fromkeys(task.unit for task in tasks))
    options = [_closure_runs(graph, tasks, start) for start in sorted(units, reverse=True)]
    return min(options, key=len, default=[])


def _closure_runs(graph: Graph, tasks: Sequence[Task], start: Unit) -> list[Run]:
    waiting, done = list(tasks), {t for t in graph.tasks if t not in tasks}
    unit, runs = start, list[Run]()
    while waiting:
        run: list[Task] = []
        for task in waiting:
            if task.unit is unit and all(t in done for t in graph.before(task)):
                run.append(task)
                done.add(task)
        waiting = [task for task in waiting if task not in done]
        if run:
            runs.append(Run(unit, tuple(run)))
        unit = Unit.VEC if unit is Unit.CUBE else Unit.CUBE
    return runs


def hand_overs(runs: Sequence[Run]) -> int:
    """Changes of unit around the ring of runs."""
    return sum(a.unit is not b.unit for a, b in zip(runs, [*runs[1:], *runs[:1]], strict=True))


def circuit_bound(graph: Graph, tasks: Sequence[Task]) -> int:
    """The least hand-overs any schedule of these scan tasks can have; see the module's text."""
    units = {task.unit for task in tasks}
    if len(units) < 2:
        return 0
    inside = set(tasks)
    edges = [(a, b, d) for a, b, d in graph.edges() if a in inside and b in inside]
    h = 2
    while not _solvable(tasks, edges, h):
        h += 2
    return h


def _solvable(tasks: Sequence[Task], edges: Sequence[tuple[Task, Task, int]], h: int) -> bool:
    """Whether no ring of dependences changes unit more than ``h`` times for each step it is carried over."""
    ahead = dict.fromkeys(tasks, 0)
    for _ in range(len(tasks) + 1):
        changed = False
        for a, b, distance in edges:
            least = ahead[a] + (a.unit is not b.unit) - distance * h
            if least > ahead[b]:
                ahead[b], changed = least, True
        if not changed:
            return True
    return False


def arrange(graph: Graph, tasks: Sequence[Task], *, pipeline: bool, lookahead: bool = False) -> list[Run]:
    """Stages of the scan with the fewest hand-overs; ``pipeline`` allows tasks of several steps side by side, and with
    ``lookahead`` Cube begins with the later step's.

    Without it a step's tasks stay together, except that the first and the last run merge across the wrap where they
    are of one unit: what the next step begins with is done when this one ends.
    """
    runs = _rotate(fewest_runs(graph, tasks))
    if not pipeline:
        return runs
    least = circuit_bound(graph, tasks)
    return _positions(graph, tasks, least, lookahead) if least < hand_overs(runs) else runs


def _rotate(runs: list[Run]) -> list[Run]:
    if len(runs) < 3 or runs[0].unit is not runs[-1].unit:
        return runs
    first, *middle, last = runs
    return [*middle, Run(last.unit, (*last.tasks, *first.tasks), {task.name: 1 for task in first.tasks})]


def _positions(graph: Graph, tasks: Sequence[Task], h: int, lookahead: bool) -> list[Run]:
    """The earliest solution of the difference constraints for h changes of unit (even runs on Cube, odd on Vec)."""
    inside = set(tasks)
    edges = [(a, b, d) for a, b, d in graph.edges() if a in inside and b in inside]
    parity = {Unit.CUBE: 0, Unit.VEC: 1}
    at = {task: parity[task.unit] for task in tasks}
    changed = True
    while changed:  # ends: circuit_bound has shown that no cycle is positive
        changed = False
        for a, b, distance in edges:
            least = at[a] - distance * h
            least += (least - parity[b.unit]) % 2
            if least > at[b]:
                at[b], changed = least, True
    latest = max(position // h for position in at.values())
    runs: list[Run] = []
    for slot in range(h):
        later_first = lookahead and slot % 2 == parity[Unit.CUBE]
        here = _in_a_stage([t for t in tasks if at[t] % h == slot], at, edges, h, later_first=later_first)
        shift = {t.name: latest - at[t] // h for t in here if at[t] // h != latest}
        runs.append(Run(Unit.CUBE if slot % 2 == 0 else Unit.VEC, tuple(here), shift))
    return [run for run in runs if run.tasks]


def _in_a_stage(
    tasks: Sequence[Task],
    at: dict[Task, int],
    edges: Sequence[tuple[Task, Task, int]],
    h: int,
    *,
    later_first: bool,
) -> list[Task]:
    """The order of a stage whose tasks work for several steps.

    A stage ends the earlier step first, so that what it read may be written again; or, ``later_first``, begins with
    what waits for nothing that the other unit is still at.
    """
    waiting = sorted(tasks, key=lambda t: at[t] if later_first else -at[t])
    order: list[Task] = []
    while waiting:
        for task in waiting:
            before = {a for a, b, distance in edges if b is task and at[a] - distance * h == at[b]}
            if not before & (set(waiting) - {task}):
                order.append(task)
                waiting.remove(task)
                break
    return order
