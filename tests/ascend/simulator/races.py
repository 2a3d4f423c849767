"""Races: two accesses of the same bytes, one of them a write, that nothing puts in order.

Every pipe of every core is a thread with a vector clock. A pipe starts its instructions in the order in which the
scalar unit hands them out, but the next may begin before the last has ended: only a barrier or a flag says that it has.
Flags between pipes and between cores are releases by the pipe that sets them and acquires by the one that waits, and
between the blocks of a launch there is nothing. So a race is seen whatever order the simulator has run things in.

Two things are no race: a product that adds to another's sum finds it there, and a read before a write in one pipe. And
where the compiler lets both Vec cores of a block do the same work, the second may store what is already there.

A shadow of each memory keeps, for every cell of a few bytes, every thread's last write and last read.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from .memory import BOOL, Array, View

PIPES = ("S", "MTE1", "MTE2", "MTE3", "V", "M", "FIX")
CORES = ("AIC", "AIV0", "AIV1")
THREADS = tuple(f"{core}.{pipe}" for core in CORES for pipe in PIPES)
_IN_ORDER = ("S", "M")  # pipes of which an instruction sees what the one before has done
_ON_CHIP_CELL = 32  # bytes: what a Vec instruction or a transfer moves at least
_GLOBAL_CELL = 2
_NOBODY, _SEVERAL = -1, -2

Clock = Array  # by thread, the instruction of it that is known to have ended


class RaceError(RuntimeError):
    """Nothing orders two accesses of the same bytes."""


class Shadow:
    """What is known of the accesses of one memory."""

    def __init__(self, name: str, size: int, cell: int, *, shared: bool) -> None:
        self.name, self.cell, self.shared = name, cell, shared
        self.count = -(-size // cell) + 1
        self._last: dict[tuple[int, bool], Array] = {}
        self.by = {write: np.full(self.count if shared else 0, _NOBODY, np.int16) for write in (True, False)}

    def last(self, thread: int, write: bool) -> Array:
        """By cell, the last instruction of a thread that wrote it, or that read it."""
        key = (thread, write)
        if key not in self._last:
            self._last[key] = np.zeros(self.count, np.int32)
        return self._last[key]

    def others(self, write: bool) -> Iterator[tuple[int, bool, Array]]:
        """What an access has to come after: of a write everything, of a read what was written."""
        return ((thread, wrote, last) for (thread, wrote), last in self._last.items() if write or wrote)

    def cells(self, view: View) -> Any:
        """An index of the cells that a view touches: a range, or a list of them."""
        if view.dtype == BOOL:
            sizes, strides, run = (), (), -(-math.prod(view.sizes) // 8)
        else:
            sizes, strides, run = _runs(view.dtype.itemsize, tuple(view.sizes), tuple(view.strides))
        first, last = view.offset // self.cell, (view.offset + run - 1) // self.cell
        if not sizes:
            return slice(first, last + 1)
        starts = np.array([view.offset])
        for size, stride in zip(sizes, strides, strict=True):
            starts = (starts[:, None] + np.arange(size) * stride).ravel()
        cells = starts[:, None] // self.cell + np.arange(last - first + 1)
        cells = np.where(cells * self.cell < starts[:, None] + run, cells, starts[:, None] // self.cell)
        return np.unique(cells)


@cache
def _runs(run: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A view as runs of adjacent bytes: how many of them by dimension, how far apart, and the bytes of one; ``run``
    are those of an element."""
    kept = [(n, s) for n, s in zip(sizes, strides, strict=True) if n > 1]
    while kept and kept[-1][1] == run:
        run *= kept.pop()[0]
    return tuple(n for n, _ in kept), tuple(s for _, s in kept), run


class Launch:
    """The memories that all blocks of a launch share."""

    def __init__(self) -> None:
        self._shadows: dict[int, Shadow] = {}

    def add(self, view: View, name: str) -> None:
        self._shadows[id(view.buffer)] = Shadow(name, view.buffer.size, _GLOBAL_CELL, shared=True)

    def shadow(self, view: View) -> Shadow | None:
        return self._shadows.get(id(view.buffer))


class Clocks:
    """The threads of one block: its cores by their pipes."""

    def __init__(self, launch: Launch, block: int) -> None:
        self._launch, self.block = launch, block
        self._clock = np.zeros((len(THREADS), len(THREADS)), np.int32)
        self._count = [0] * len(THREADS)
        self._flags: defaultdict[Any, deque[Clock]] = defaultdict(deque)
        self._local: dict[int, Shadow] = {}

    def add(self, core: str, space: str, memory: Array) -> None:
        self._local[id(memory)] = Shadow(f"{space} of {core}", memory.size, _ON_CHIP_CELL, shared=False)

    # ---- order

    def release(self, core: str, pipe: str, flag: Any) -> None:
        """Everything that ``pipe`` was given before, and all it knows of, has ended for who acquires ``flag``."""
        thread = self._begin(core, pipe)
        snapshot = self._clock[thread].copy()
        snapshot[thread] = self._count[thread]
        self._flags[flag].append(snapshot)

    def acquire(self, core: str, pipe: str, flag: Any) -> None:
        thread = _thread(core, pipe)
        np.maximum(self._clock[thread], self._flags[flag].popleft(), out=self._clock[thread])

    def barrier(self, core: str, pipe: str) -> None:
        """What ``pipe``, or every one with "ALL", was given before has ended for what it is given from now on."""
        threads = [_thread(core, name) for name in (PIPES if pipe == "ALL" else (pipe,))]
        for thread in threads:
            self._clock[thread, thread] = self._count[thread]
        self._clock[threads] = self._clock[threads].max(axis=0)

    def follow(self, core: str, first: str, then: str) -> None:
        """The next instruction of ``then`` waits for all of ``first``."""
        self.release(core, first, (core, first, then))
        self.acquire(core, then, (core, first, then))

    def _begin(self, core: str, pipe: str) -> int:
        thread = _thread(core, pipe)
        np.maximum(self._clock[thread], self._clock[_thread(core, "S")], out=self._clock[thread])
        return thread

    # ---- accesses

    def instruction(
        self, core: str, pipe: str, name: str, reads: list[Any], writes: list[Any], *, same: bool = False
    ) -> None:
        """An instruction of ``pipe``; raises :class:`RaceError` where an earlier access is not known to have ended.

        ``same``: it writes what is there already.
        """
        thread = self._begin(core, pipe)
        self._count[thread] += 1
        if pipe in _IN_ORDER:
            self._clock[thread, thread] = self._count[thread]
        for write, views in ((False, reads), (True, writes)):
            for view in views:
                if isinstance(view, View) and 0 not in view.sizes:
                    self._access(thread, view, write, name, same=same)

    def _access(self, thread: int, view: View, write: bool, name: str, *, same: bool) -> None:
        shadow = self._local.get(id(view.buffer)) or self._launch.shadow(view)
        if shadow is None:
            return
        cells, known = shadow.cells(view), self._clock[thread]
        if shadow.shared:
            self._check_blocks(shadow, cells, thread, write, name)
        for other, wrote, last in shadow.others(write):
            if other == thread and not wrote:
                continue
            if same and write and _twins(thread, other):
                continue
            if self._count[other] > known[other] and last[cells].max() > known[other]:
                what = f"{'writes' if write else 'reads'} what {THREADS[other]} {'wrote' if wrote else 'reads'}"
                raise RaceError(f"block {self.block}, {THREADS[thread]}, {name}: {what} in {shadow.name}")
        shadow.last(thread, write)[cells] = self._count[thread]

    def _check_blocks(self, shadow: Shadow, cells: Any, thread: int, write: bool, name: str) -> None:
        for earlier, by in shadow.by.items():
            if write or earlier:
                others = by[cells]
                others = others[(others != _NOBODY) & (others != self.block)]
                if others.size:
                    other = "several blocks" if others[0] == _SEVERAL else f"block {others[0]}"
                    what = f"{'writes' if write else 'reads'} what {other} {'wrote' if earlier else 'reads'}"
                    raise RaceError(f"block {self.block}, {THREADS[thread]}, {name}: {what} in {shadow.name}")
        by = shadow.by[write]
        known = by[cells]
        by[cells] = np.where((known == _NOBODY) | (known == self.block), self.block, _SEVERAL)


def _twins(thread: int, other: int) -> bool:
    """Two Vec cores of a block."""
    return {THREADS[thread].partition(".")[0], THREADS[other].partition(".")[0]} == set(CORES[1:])


def _thread(core: str, pipe: str) -> int:
    return CORES.index(core) * len(PIPES) + PIPES.index(pipe)
