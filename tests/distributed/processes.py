"""Checks that run in several processes over gloo, on GPUs NCCL. Starting one costs seconds, so a start runs many."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SECONDS = 400.0
"""How long all checks of a start may take."""


@dataclass(frozen=True)
class Ranks:
    """What a check is given: this process, how many there are, and a folder that all see."""

    rank: int
    world: int
    folder: Path


def in_processes(checks: Sequence[str], world: int, folder: Path) -> None:
    """Run ``module:function`` of each check in ``world`` processes, one check after the other.

    What a process printed is the message where it fails, and the others, which wait for it, are ended at once.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [folder / f"output-{rank}" for rank in range(world)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, path in enumerate(paths):
            command = [sys.executable, "-m", "tests.distributed.processes", str(rank), str(world), str(folder), *checks]
            with path.open("wb") as output:
                one = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            started.append(one)
        failed = _first_failure(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert failed is None, f"rank {failed} of {world}: {paths[failed].read_text()[-4000:]}"


def torchrun(world: int, folder: Path, *arguments: str) -> str:
    """``torchrun --nproc-per-node world arguments``, and what it printed, which is the message where it fails."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world))
    environment, path = {**os.environ, "OMP_NUM_THREADS": "1"}, folder / "output"
    with (
        path.open("wb") as output,
        subprocess.Popen(
            [sys.executable, *launch, *arguments], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as agent,
    ):
        try:
            code = agent.wait(SECONDS)
        except subprocess.TimeoutExpired:
            agent.terminate()  # and it ends its ranks
            code = agent.wait()
    printed = path.read_text()
    assert code == 0, printed[-4000:]
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


def _first_failure(started: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The rank that failed first, or that has not come back in time."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        codes = [process.poll() for process in started]
        if any(codes):
            return next(rank for rank, code in enumerate(codes) if code)
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.05)
    return next(rank for rank, process in enumerate(started) if process.poll() is None)


def main(ranks: Ranks, checks: Sequence[str]) -> None:
    os.environ.update(RANK=str(ranks.rank), LOCAL_RANK=str(ranks.rank), WORLD_SIZE=str(ranks.world))
    store = dist.FileStore(str(ranks.folder / "store"), ranks.world)
    on_gpus = torch.cuda.device_count() >= ranks.world
    if on_gpus:
        torch.cuda.set_device(ranks.rank)
    backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world)
    for check in checks:
        start = time.monotonic()
        print(check, flush=True)
        torch.manual_seed(0)
        torch.compiler.reset()
        module, name = check.split(":")
        getattr(importlib.import_module(module), name)(ranks)
        dist.barrier()
        print(f"    {time.monotonic() - start:.1f} s", flush=True)
    os._exit(0)  # gloo ends its threads in no order when a process ends, and may abort it then


if __name__ == "__main__":
    main(Ranks(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])), sys.argv[4:])
