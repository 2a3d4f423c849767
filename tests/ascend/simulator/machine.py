"""One AI core: a Cube core and two Vec cores over poisoned memory, with the flags between and inside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from .memory import Array, flat_view
from .parse import Module, Op, UnsupportedError

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

    def __init__(self, vec_cores: int) -> None:
        self._to_vec: list[Counter[int]] = [Counter() for _ in range(vec_cores)]
        self._to_cube: list[Counter[int]] = [Counter() for _ in range(vec_cores)]
        self.sets = 0

    def _lines(self, core: Core, *, incoming: bool) -> list[Counter[int]]:
        towards_vec = core.is_cube != incoming
        lines = self._to_vec if towards_vec else self._to_cube
        return lines if core.is_cube else [lines[core.sub_block]]

    def set(self, core: Core, flag: int) -> None:
        self.sets += 1
        for line in self._lines(core, incoming=False):
            line[flag] += 1

    def take(self, core: Core, flag: int) -> bool:
        """Consume a set of every core on the other side; False where one is missing."""
        lines = self._lines(core, incoming=True)
        if not all(line[flag] for line in lines):
            return False
        for line in lines:
            line[flag] -= 1
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
        self._pipes: Counter[tuple[str, str, int]] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return "AIC" if self.is_cube else f"AIV{self.sub_block}"

    def set_flag(self, source: str, target: str, event: int) -> None:
        self._pipes[source, target, event] += 1

    def wait_flag(self, source: str, target: str, event: int) -> None:
        key = (source, target, event)
        if not self._pipes[key]:
            raise FlagError(f"{self.name}: wait without a set, {source} -> {target}, event {event}")
        self._pipes[key] -= 1

    def left(self) -> dict[tuple[str, str, int], int]:
        return {key: count for key, count in self._pipes.items() if count}


class Simulator:
    """Runs the kernels of a module, one block after the other.

    ``order`` is the order in which the cores of a block are let run, each as far as it can: without a
    synchronisation that matters, some order reads what is not there yet.
    """

    def __init__(self, module: Module, order: Sequence[str] = ("AIC", "AIV0", "AIV1")) -> None:
        from .instructions import Decoder  # instructions import this module for the core they act on

        self._functions = module.functions
        self._decoder = Decoder(module.maps)
        self._order = list(order)
        self.calls: Counter[str] = Counter()

    def run(self, kernel: str, arguments: Sequence[Array | int | float], grid: int, workspace_bytes: int) -> None:
        """Run ``kernel`` on ``grid`` blocks. Arrays are flat and are written in place."""
        workspace = np.full(workspace_bytes * grid, POISON, np.uint8)
        lock = np.zeros(8, np.int64)
        tensors: list[Any] = [flat_view(x) if isinstance(x, np.ndarray) else x for x in arguments]
        values: list[Any] = [0, flat_view(lock.view(np.int8)), flat_view(workspace.view(np.int8)), *tensors, grid, 1, 1]
        for block in range(grid):
            self._run_block(kernel, values, block)

    def _run_block(self, kernel: str, arguments: list[Any], block: int) -> None:
        flags = Flags(2)
        if kernel in self._functions:
            cores = [Core(False, 0, block, flags)]
            bodies = [self._functions[kernel]]
        else:
            cores = [Core(True, 0, block, flags), Core(False, 0, block, flags), Core(False, 1, block, flags)]
            bodies = [self._functions[f"{kernel}_mix_{'aic' if core.is_cube else 'aiv'}"] for core in cores]
            cores, bodies = map(list, zip(*sorted(zip(cores, bodies, strict=True), key=self._rank), strict=True))
        runs = {core: self._start(body, arguments, core) for core, body in zip(cores, bodies, strict=True)}
        while runs:
            waiting, sets = len(runs), flags.sets
            progress = [self._advance(core, runs) for core in list(runs)]
            if len(runs) == waiting and flags.sets == sets and not any(progress):
                raise DeadlockError(f"{', '.join(core.name for core in runs)} wait for flags nobody sets")
        left = {name: count for name, count in flags.left().items() if count}
        pipes = {core.name: core.left() for core in cores if core.left()}
        if left or pipes:
            raise FlagError(f"sets that nobody waited for: {left} {pipes}")
        for core in cores:
            self.calls += core.calls

    def _rank(self, pair: tuple[Core, Op]) -> int:
        return self._order.index(pair[0].name)

    def _start(self, function: Op, arguments: list[Any], core: Core) -> Run:
        block = function.regions[0]
        if len(block.arguments) != len(arguments):
            raise UnsupportedError(f"the kernel takes {len(block.arguments)} arguments, got {len(arguments)}")
        return self._decoder.function(function).run(dict(zip(block.arguments, arguments, strict=True)), core)

    @staticmethod
    def _advance(core: Core, runs: dict[Core, Run]) -> bool:
        """Let a core run until it blocks or ends; whether it got past a wait."""
        progress = False
        for moved in runs[core]:
            if not moved:
                return progress
            progress = True
        del runs[core]
        return True
