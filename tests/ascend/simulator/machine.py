"""One AI core: a Cube core and two Vec cores over poisoned memory, with the flags between and inside them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Sequence
from functools import cache
from typing import Any

import numpy as np

from .memory import Array, flat_view
from .parse import Module, UnsupportedError
from .races import CORES, Clocks, Launch

ON_CHIP = {"ub": 262144, "cbuf": 524288, "cc": 262144}  # at least the largest of the targets; the compiler checks fits
POISON = 0xFF  # NaN in every float type

Run = Generator[bool, None, None]  # yields True after progress, False while blocked


class DeadlockError(RuntimeError):
    """Every core that has not finished waits for a flag."""


class FlagError(RuntimeError):
    """Sets and waits do not balance."""


class Flags:
    """The flags between the cores of one block. A set of the Cube core is seen by both Vec cores; a wait of the Cube
    core needs one set from each."""

    def __init__(self, clocks: Clocks) -> None:
        self._to_vec: list[Counter[int]] = [Counter() for _ in CORES[1:]]
        self._to_cube: list[Counter[int]] = [Counter() for _ in CORES[1:]]
        self.clocks = clocks
        self.sets = 0

    def _lines(self, core: Core, *, incoming: bool) -> list[Counter[int]]:
        towards_vec = core.is_cube != incoming
        lines = self._to_vec if towards_vec else self._to_cube
        return lines if core.is_cube else [lines[core.sub_block]]

    def set(self, core: Core, pipe: str, flag: int) -> None:
        """A set by ``pipe`` of ``core``."""
        self.sets += 1
        for line in self._lines(core, incoming=False):
            line[flag] += 1
            self.clocks.release(core.name, pipe, (id(line), flag))

    def take(self, core: Core, pipe: str, flag: int) -> bool:
        """Consume a set of every core on the other side, for ``pipe``; False where one is missing."""
        lines = self._lines(core, incoming=True)
        if not all(line[flag] for line in lines):
            return False
        for line in lines:
            line[flag] -= 1
            self.clocks.acquire(core.name, pipe, (id(line), flag))
        return True

    def left(self) -> dict[str, int]:
        """Sets that nobody waited for."""
        sides = {"to vec": self._to_vec, "to cube": self._to_cube}
        return {f"{side} {i}": sum(line.values()) for side, lines in sides.items() for i, line in enumerate(lines)}


class Core:
    """The memory and the pipe flags of one core."""

    def __init__(self, is_cube: bool, sub_block: int, block: int, flags: Flags) -> None:
        self.is_cube, self.sub_block, self.block, self.flags = is_cube, sub_block, block, flags
        self.memory = {space: np.full(size, POISON, np.uint8) for space, size in ON_CHIP.items()}
        self.clocks = flags.clocks
        for space, memory in self.memory.items():
            self.clocks.add(self.name, space, memory)
        self._pipes: Counter[tuple[str, str, int]] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return "AIC" if self.is_cube else f"AIV{self.sub_block}"

    def set_flag(self, source: str, target: str, event: int) -> None:
        self._pipes[source, target, event] += 1
        self.clocks.release(self.name, source, (self.name, source, target, event))

    def wait_flag(self, source: str, target: str, event: int) -> None:
        key = (source, target, event)
        if not self._pipes[key]:
            raise FlagError(f"{self.name}: wait without a set, {source} -> {target}, event {event}")
        self._pipes[key] -= 1
        self.clocks.acquire(self.name, target, (self.name, *key))

    def left(self) -> dict[tuple[str, str, int], int]:
        return {key: count for key, count in self._pipes.items() if count}


class Simulator:
    """Runs the kernels of a module, all blocks of a launch at once.

    The core that runs next is the first of ``order`` (and of the lowest block) that can, and runs as far as it can:
    without a synchronisation that matters, some order reads what is not there yet. With a ``seed`` it is any core that
    can, up to its next wait.
    """

    def __init__(self, module: Module, order: Sequence[str] = CORES, seed: int | None = None) -> None:
        from .instructions import Decoder  # instructions import this module for the core they act on

        self._functions = module.functions
        decoder = Decoder(module.maps)
        self._decoded = cache(lambda name: decoder.function(self._functions[name]))
        self._order = list(order)
        self._random = None if seed is None else random.Random(seed)
        self.calls: Counter[str] = Counter()

    def run(self, kernel: str, arguments: Sequence[Array | int | float], grid: int, workspace_bytes: int) -> None:
        """Run ``kernel`` on ``grid`` blocks. Arrays are flat and are written in place."""
        workspace = flat_view(np.full(workspace_bytes * grid, POISON, np.uint8).view(np.int8))
        lock = flat_view(np.zeros(64, np.int8))
        tensors: list[Any] = [flat_view(x) if isinstance(x, np.ndarray) else x for x in arguments]
        launch = Launch()
        launch.add(workspace, "the workspace")
        for i, x in enumerate(arguments):
            if isinstance(x, np.ndarray):
                launch.add(tensors[i], f"argument {i}")
        values: list[Any] = [0, lock, workspace, *tensors, grid, 1, 1]
        runs: dict[Core, Run] = {}
        for block in range(grid):
            runs.update(self._block(kernel, values, Flags(Clocks(launch, block)), block))
        cores = list(runs)
        self._run(runs)
        for core in cores:
            self._check_ended(core)
            self.calls += core.calls

    def _block(self, kernel: str, arguments: list[Any], flags: Flags, block: int) -> dict[Core, Run]:
        if kernel in self._functions:
            return {(core := Core(False, 0, block, flags)): self._start(kernel, arguments, core)}
        cores = [Core(True, 0, block, flags), Core(False, 0, block, flags), Core(False, 1, block, flags)]
        names = [f"{kernel}_mix_{'aic' if core.is_cube else 'aiv'}" for core in cores]
        return {core: self._start(name, arguments, core) for core, name in zip(cores, names, strict=True)}

    def _start(self, name: str, arguments: list[Any], core: Core) -> Run:
        names = self._functions[name].regions[0].arguments
        if len(names) != len(arguments):
            raise UnsupportedError(f"the kernel takes {len(names)} arguments, got {len(arguments)}")
        return self._decoded(name).run(dict(zip(names, arguments, strict=True)), core)

    def _run(self, runs: dict[Core, Run]) -> None:
        waiting: set[Core] = set()
        while runs:
            able = [core for core in runs if core not in waiting]
            if not able:
                names = sorted(f"{core.name} of block {core.block}" for core in runs)
                raise DeadlockError(f"{', '.join(names)} wait for flags nobody sets")
            core = self._random.choice(able) if self._random else min(able, key=self._rank)
            sets = core.flags.sets
            passed = next(runs[core], None)
            if core.flags.sets != sets:
                waiting = {other for other in waiting if other.flags is not core.flags}
            if passed is None:
                del runs[core]
            elif not passed:
                waiting.add(core)

    def _rank(self, core: Core) -> tuple[int, int]:
        return self._order.index(core.name), core.block

    @staticmethod
    def _check_ended(core: Core) -> None:
        left, pipes = {name: n for name, n in core.flags.left().items() if n}, core.left()
        if left or pipes:
            raise FlagError(f"sets that nobody waited for: {left} {core.name} {pipes}")
