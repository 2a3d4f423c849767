"""When things happen: the scan of one core group task by task, and heads over core groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..stages import SCANS, Buffer, Scope, Section, Stage, Task
from .cost import crossing_seconds, section_seconds, sharing, task_seconds, transfer_seconds
from .model import PlanData


@dataclass(frozen=True)
class Event:
    """Something on a lane ("cube", "vec", or a buffer's name) for one step of the scan, in seconds from its start."""

    lane: str
    label: str
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A scan of one core group. ``period`` is the time between steps once it runs evenly."""

    events: tuple[Event, ...]
    steps: int
    period: float
    section: Section = Section.SCAN

    def lane(self, name: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.lane == name)

    @property
    def end(self) -> float:
        return max((event.end for event in self.events), default=0.0)


def timeline(plan: PlanData, steps: int = 4, *, sync: float | None = None, section: Section = Section.SCAN) -> Timeline:
    """Play ``steps`` steps of a scan: each unit does its tasks in order, each as soon as what it reads is there.

    A hand-over costs the tile's way through memory and ``sync`` seconds (by default the target's figure).
    """
    wait = sync if sync is not None else (plan.target.rates["sync"].value if "sync" in plan.target.rates else 0.0)
    return _Player(plan, steps, wait, section).play()


class _Player:
    """When every unit is free and every task of every step has ended, as far as the scan has been played."""

    def __init__(self, plan: PlanData, steps: int, wait: float, section: Section) -> None:
        self.plan, self.steps, self.wait, self.section = plan, steps, wait, section
        self.stages = plan.section(section)
        self.home = {task: stage for stage in self.stages for task in stage.tasks}
        names = {stage.name for stage in self.stages}
        self.crossing = {b.name: b for b in plan.in_memory if b.producer in names}
        self.free: dict[str, float] = {}
        self.ended: dict[tuple[str, int], float] = {}
        self.events: list[Event] = []
        self.next = {value.name: step.name for value, step in plan.carried}
        self.length = {task.name: self.seconds(stage, task) for task, stage in self.home.items()}

    def play(self) -> Timeline:
        for stage in self.stages:  # what works a step ahead has been done once before the loop
            for task in stage.tasks:
                for step in range(stage.shift.get(task.name, 0)):
                    self.run(stage, task, step)
        for period in range(self.steps):
            for stage in self.stages:
                for task in stage.tasks:
                    step = period + stage.shift.get(task.name, 0)
                    if step < self.steps:
                        self.run(stage, task, step)
        self.show_buffers()
        made = {task.name for task in self.home}
        last = next((name for name in self.next.values() if name in made), "")
        finished = [self.ended[last, n] for n in range(self.steps) if (last, n) in self.ended]
        period = finished[-1] - finished[-2] if len(finished) > 1 else max(self.free.values(), default=0.0)
        return Timeline(tuple(self.events), self.steps, period, self.section)

    def run(self, stage: Stage, task: Task, step: int) -> None:
        unit = stage.unit.value
        start = self.free.get(unit, 0.0)
        for value in task.inputs:
            start = max(start, self.ready(value.name, stage, step))
        length = self.length[task.name]
        self.free[unit] = self.ended[task.name, step] = start + length
        if length:
            self.events.append(Event(unit, task.name, step, start, start + length))

    def ready(self, name: str, stage: Stage, step: int) -> float:
        if name in self.next:
            name, step = self.next[name], step - 1
        ended = self.ended.get((name, step), 0.0)
        buffer = self.crossing.get(name)
        if ended and buffer is not None and stage.name in buffer.consumers and stage.name != buffer.producer:
            ended += self.wait
        return ended

    def seconds(self, stage: Stage, task: Task) -> float:
        """What it takes in any step."""
        return task_seconds(self.plan, task, sharing(self.plan, stage)) + self.moved(stage, task)

    def moved(self, stage: Stage, task: Task) -> float:
        """Its workspace tiles' way through memory, and its share of what the stage streams in and out meanwhile."""
        own = 0.0
        for value in (*task.inputs, task.output):
            buffer = self.crossing.get(value.name)
            if buffer is None:
                continue
            if value == task.output:
                own += crossing_seconds(self.plan, buffer, out=True)
            elif stage.name in buffer.consumers and self._first_reader(stage, value.name) == task:
                own += crossing_seconds(self.plan, buffer, out=False)
        streamed = transfer_seconds(self.plan, stage, (Scope.PORT, Scope.TENSOR))
        arithmetic = sum(task_seconds(self.plan, t, sharing(self.plan, stage)) for t in stage.tasks)
        slack = max(streamed - arithmetic, 0.0) / len(stage.tasks)
        return own + slack

    def _first_reader(self, stage: Stage, name: str) -> Task | None:
        return next((t for t in stage.tasks if any(v.name == name for v in t.inputs)), None)

    def show_buffers(self) -> None:
        for name, buffer in self.crossing.items():
            for step in range(self.steps):
                if (name, step) in self.ended:
                    read = self._last_read(buffer, step)
                    self.events.append(Event(f"buffer {name}", name, step, self.ended[name, step], read))

    def _last_read(self, buffer: Buffer, step: int) -> float:
        readers = [t for t in self.home if any(v.name == buffer.name for v in t.inputs)]
        return max((self.ended.get((t.name, step), 0.0) for t in readers), default=self.ended[buffer.name, step])


# ---- heads over core groups


@dataclass(frozen=True)
class Group:
    """What one core group does: the lanes (batch entry and head) it scans, one after the other."""

    index: int
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Lanes over core groups, with modelled seconds.

    ``prologue``, ``scan``, ``epilogue``: one step of one lane on one group. ``low`` and ``high``: the whole sequence
    with hand-overs at no price, and at twice the target's figure.
    """

    groups: tuple[Group, ...]
    steps: int
    prologue: float
    scan: float
    epilogue: float
    low: float
    high: float


def schedule(plan: PlanData) -> Schedule:
    """Spread lanes over the target's core groups: one lane a group, no traffic between groups.

    With more lanes than groups, groups take several in turn; with fewer, those left over are idle in the scan. Prologue
    and epilogue are kernels before and after it, over the chunks of all lanes at once.
    """
    count = int(plan.target.groups.value)
    lanes = plan.sizes.get("B", 1) * plan.sizes.get("H", 1)
    groups = tuple(Group(i, tuple(range(i, lanes, count))) for i in range(count))
    steps = -(-plan.sizes["T"] // plan.sizes["C"]) if {"T", "C"} <= plan.sizes.keys() else 1
    outer = [section_seconds(plan, section) for section in (Section.PROLOGUE, Section.EPILOGUE, Section.SUMS)]
    sync = plan.target.rates["sync"].value if "sync" in plan.target.rates else 0.0
    tiles = plan.tiles
    both = [section for section in SCANS if plan.section(section)]
    scans = [
        sum(timeline(plan, sync=price, section=section).period for section in both) * tiles
        for price in (0.0, sync, 2 * sync)
    ]
    low, high = (_whole(groups, lanes, steps, sum(outer), scan) for scan in (scans[0], scans[2]))
    return Schedule(groups, steps, outer[0], scans[1], outer[1], low, high)


def _whole(groups: Sequence[Group], lanes: int, steps: int, outer: float, scan: float) -> float:
    rounds = max(len(group.lanes) for group in groups)
    return rounds * steps * scan + lanes * steps * outer / len(groups)
