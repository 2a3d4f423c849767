"""Which workspaces may share bytes: what is certain to be over before something else begins.

Cube and Vec run side by side, so two buffers whose lifetimes do not meet on paper may still meet in time. What is
certain is only this: a unit does its own tasks in order, and a task begins after those whose results it reads have
ended. :class:`Order` is the closure of that over neighbouring steps; a buffer may take another's bytes, or its own for
the next step, only where every reader of the old contents comes before the writer of the new ones in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ..stages import SCANS, Buffer, Stage, Task
from ..target import Unit
from .split import Graph, PlacedRun

_WINDOW = 6  # steps looked at: tasks work at most two steps ahead, and all windows are alike


def slots(runs: Sequence[PlacedRun | Stage]) -> int:
    """Copies of what crosses in a section whose steps are independent: two where Cube has one run, so that Vec makes
    the next step's tiles meanwhile, and loads nothing that Vec loads too: with two copies the Ascend compiler leaves
    out Cube's load of such a tile (ascendnpu-ir 1.2.0). What goes up and down more often it does step by step."""
    made = {task.output for run in runs for task in run.tasks}
    loaded = {run.unit: {v for r in runs if r.unit is run.unit for t in r.tasks for v in t.inputs} for run in runs}
    shared = loaded.get(Unit.CUBE, set()) & loaded.get(Unit.VEC, set()) - made
    once = sum(run.unit is Unit.CUBE for run in runs) == 1 < len(runs)
    return 2 if runs[0].section not in SCANS and once and not shared else 1


class Order:
    """What comes before what among the tasks of one section, over ``_WINDOW`` steps (one outside the scan)."""

    def __init__(self, graph: Graph, runs: Sequence[PlacedRun]) -> None:
        self.graph = graph
        self._slots = slots(runs) if runs else 1
        self.steps = _WINDOW if runs and runs[0].section in SCANS and graph.next else 1
        self._ahead = {task: run.shift.get(task.name, 0) for run in runs for task in run.tasks}
        self.period = sum(len(run.tasks) for run in runs)
        self._index: dict[tuple[Task, int], int] = {}
        queues: dict[str, list[tuple[Task, int]]] = {}
        for period in range(self.steps):
            for run in runs:
                for task in run.tasks:
                    node = (task, period + self._ahead[task])  # (task, the step it works for)
                    if node not in self._index:  # what is made again in a later stage is never waited for
                        self._index[node] = len(self._index)
                        queues.setdefault(run.unit.value, []).append(node)
        self._before = self._closure(queues)

    def _closure(self, queues: Mapping[str, Sequence[tuple[Task, int]]]) -> list[int]:
        """For every node the nodes before it, as bits."""
        earlier: dict[int, list[int]] = {i: [] for i in self._index.values()}
        for queue in queues.values():
            for a, b in pairwise(queue):
                earlier[self._index[b]].append(self._index[a])
        for a, b, distance in self.graph.edges():
            for (task, step), i in self._index.items():
                if task is b and (a, step - distance) in self._index:
                    earlier[i].append(self._index[a, step - distance])
        before = [0] * len(earlier)
        changed = True
        while changed:
            changed = False
            for i, sources in earlier.items():
                bits = before[i]
                for source in sources:
                    bits |= before[source] | (1 << source)
                if bits != before[i]:
                    before[i], changed = bits, True
        return before

    def precedes(self, a: tuple[Task, int], b: tuple[Task, int]) -> bool:
        """Whether task ``a`` (for its step) is over before ``b`` begins; False outside the window."""
        if a not in self._index or b not in self._index:
            return False
        return bool(self._before[self._index[b]] >> self._index[a] & 1)

    def over(self, old: Buffer, old_step: int, new: Buffer, new_step: int) -> bool:
        """Whether ``old``'s contents of one step have been read before ``new``'s of another are written."""
        writer = (self._task(new.name), new_step)
        readers = [t for t in self.graph.readers(self._task(old.name).output) if t in self._ahead]
        return all(self.precedes((reader, old_step), writer) for reader in readers)

    def copies(self, buffer: Buffer) -> int:
        """How many copies a buffer needs: 1 where a step's contents are read before the next step writes.

        Two otherwise, with the reader releasing each to the writer; see :func:`slots` for sections without a carry.
        """
        middle = self.steps // 2
        if self.steps == 1:
            return self._slots
        return 1 if self.over(buffer, middle - 1, buffer, middle) else 2

    def conflict(self, a: Buffer, b: Buffer) -> bool:
        """Whether ``a`` and ``b`` of any steps may be alive at once."""
        if max(a.copies, b.copies) > 1:
            return self.steps > 1 or not (self.over(a, 0, b, 0) or self.over(b, 0, a, 0))
        middle = self.steps // 2
        near = range(max(middle - 1, 0), min(middle + 2, self.steps))
        return any(not self.over(a, middle, b, j) and not self.over(b, j, a, middle) for j in near)

    def _task(self, name: str) -> Task:
        return next(task for task in self._ahead if task.name == name)
