"""Functions that run in several processes over gloo, each started by its module, name, rank, world and store."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SECONDS = 500


def together(module: str, arguments: Callable[[int], Sequence[str]], world: int) -> list[str]:
    """What ``python -m module`` prints in each of ``world`` processes; one that fails is an assertion."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    printed: list[str] = []
    try:
        for process in started:
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, output[-3000:]
            printed.append(output)
    finally:
        for process in started:  # one that waits for another that failed
            process.kill()
            process.communicate()
    return printed


@contextmanager
def one_rank() -> Generator[None]:
    """A process group of this process alone, without gloo's threads: a test run that ends beside them may hang."""
    # Torch-private: registers the backend "fake", whose collectives do nothing, which is right for one rank.
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_processes(module: str, name: str, world: int, folder: Path) -> None:
    """Run ``module.name(rank, world)`` in ``world`` processes."""
    store = str(folder / f"store-{name}-{world}")
    together("tests.distributed.processes", lambda rank: [module, name, str(rank), str(world), store], world)


def main(module: str, name: str, rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(0)
    getattr(importlib.import_module(module), name)(rank, world)
    dist.barrier()
    os._exit(0)  # gloo ends its threads in no order when a process ends, and may abort it then


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
