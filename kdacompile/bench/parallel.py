"""The suite of several GPUs: linear attention over the tokens of all ranks beside one GPU that has them all.

    python -m kdacompile bench --suite parallel

One process a GPU. Calls on one GPU and over the ranks are timed in turn, in a burst each, by CUDA events; that of the
ranks is as long as the slowest rank's. The table has medians, how many times faster the ranks are, and the share that
one all-gather of the maps would have, timed alone. :mod:`.parallel_models` adds layers under tensor parallelism.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.bench import record, rows
from kdacompile.bench.ranks import interleaved, slowest
from kdacompile.bench.record import Figures


@dataclass(frozen=True)
class Case:
    """``row``: "kda" (gate and norms inside, as the cuda suite's), "gdn" or "gla" (log gates); T of all ranks."""

    name: str
    row: str
    train: bool = False
    order: str = "contiguous"
    method: str = "maps"
    length: int = 131072
    heads: int = 32
    width: int = 128


CASES = (
    Case("kda-forward", "kda"),
    Case("kda-training", "kda", train=True),
    Case("kda-zigzag-forward", "kda", order="zigzag"),
    Case("kda-zigzag-training", "kda", train=True, order="zigzag"),
    Case("kda-heads-forward", "kda", method="heads"),
    Case("gdn-forward", "gdn"),
    Case("gdn-training", "gdn", train=True),
    Case("gla-forward", "gla"),
    Case("gla-training", "gla", train=True),
)
MODEL_CASES = ("kimi-prefill", "kimi-training")


def main(only: Sequence[str] | None, json_path: Path) -> int:
    """Start a process for each GPU, each of which runs :func:`measure`."""
    record.cuda_device("parallel", 2)
    count, names = torch.cuda.device_count(), record.chosen([*(case.name for case in CASES), *MODEL_CASES], only)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return subprocess.call([*command, "-m", "kdacompile.bench.parallel", str(json_path), *names])


def measure(json_path: Path, names: Sequence[str]) -> None:
    """Every rank: all cases in turn. Rank 0 prints the table and writes the JSON after each."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", timeout=timedelta(minutes=2), device_id=device)
    results: dict[str, Figures] = {}
    by_name = {case.name: case for case in CASES}
    for name in names:
        if name in by_name:
            results[name] = {**asdict(by_name[name]), **operator(by_name[name])}
        else:
            from kdacompile.bench import parallel_models  # transformers is slow to import

            results[name] = parallel_models.measured(name.removeprefix("kimi-"))
        if dist.get_rank() == 0:
            _write(json_path, results)
            print(_line(name, results[name]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _write(json_path: Path, results: dict[str, Figures]) -> None:
    device = f"{dist.get_world_size()} of {torch.cuda.get_device_name()}"
    cases = [
        {"name": name, **found, "results": {"one": {"device_us": one}, "ranks": {"device_us": all_ranks}}}
        for name, found in results.items()
        for one, all_ranks in [(found["one_us"], found["ranks_us"])]
    ]
    record.write(json_path, "parallel", cases, device=device)


def _line(name: str, found: Figures) -> str:
    one, ranks, sent = (found[key] for key in ("one_us", "ranks_us", "communication_us"))
    said = f"| {name} | {one / 1e3:.2f} ms | {ranks / 1e3:.2f} ms | {one / ranks:.2f}x | {sent:.0f} us |"
    return f"{said} {100 * sent / ranks:.0f}% | {found.get('difference', 0):.1e} |"


def operator(case: Case) -> Figures:
    """One op, on one GPU and over the ranks."""
    from kdacompile.distributed import ContextParallel
    from kdacompile.ops import linear_attention

    context = ContextParallel(order=case.order, method=case.method)
    tensors, options = inputs(case)
    whole = {name: x.requires_grad_(case.train) for name, x in tensors.items()}
    mine = {n: (context.shard(x).contiguous() if n in rows.TOKENS else x).detach() for n, x in tensors.items()}
    mine = {name: x.requires_grad_(case.train) for name, x in mine.items()}

    grad = torch.randn(tensors["v"].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()

    def call(given: dict[str, Tensor], where: Any) -> Callable[[], object]:
        def forward() -> Tensor:
            return linear_attention(**given, **options, context_parallel=where)[0]  # type: ignore[arg-type]

        leaves = list(given.values())
        mine = grad if where is None else where.shard(grad)
        return (lambda: torch.autograd.grad(forward(), leaves, mine)) if case.train else forward

    with torch.set_grad_enabled(case.train):
        one, ranks = call(whole, None), call(mine, context)
        found = {"difference": _difference(one(), ranks(), context)}
        return found | interleaved(one, ranks) | {"communication_us": _sends(case, context)}


def _difference(one: Any, ranks: Any, context: Any) -> float:
    """How far o, or the gradient of q, is from one GPU's on any rank; its own rounding to bf16 is some 4e-3."""
    whole, mine = (x[0] if isinstance(x, tuple) else x for x in (one, ranks))
    want = context.shard(whole).double()
    found = (mine.double() - want).norm() / want.norm()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def inputs(case: Case) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Operands of a row in bf16, the same on every rank, and the op's options."""
    kind = "token" if case.row == "gdn" else "channel"
    given = rows.random_arguments(
        kind, "sigmoid" if case.row == "kda" else "log", case.length, delta=case.row != "gla", sigmoid_beta=True,
        heads=case.heads, value_heads=case.heads, width=case.width, value_width=case.width,
    )  # fmt: skip
    if case.row != "kda":
        given["g"] = given["g"].bfloat16()
    tensors = rows.tensors_of(given)
    return tensors, {name: x for name, x in given.items() if name not in tensors}


def _sends(case: Case, context: Any) -> float:
    """What is sent in a call, alone: maps forward, and with gradients B' as well; or the operands and o."""
    from kdacompile.distributed import collectives
    from kdacompile.distributed.cost import Layer, communication

    sizes: Any = {"heads": case.heads, "value_heads": case.heads, "keys": case.width, "values": case.width}
    layer = Layer(case.length, **sizes, delta=case.row != "gla", channel_gate=case.row != "gdn")
    cost = communication(layer, context.ranks, method=case.method, order=case.order)
    if case.method == "heads":
        x = torch.empty(context.ranks, cost.held // 2 // context.ranks, device="cuda", dtype=torch.bfloat16)
        return statistics.median(slowest(lambda: collectives.exchange(x, context.name), 10) for _ in range(3))
    maps = torch.empty(cost.held // context.ranks // 4, device="cuda")
    written = maps[: maps.numel() // 2]
    several = [maps, written] if case.train else [maps]

    def gather() -> None:
        for x in several:
            collectives.gather(x, context.name, context.ranks)

    return statistics.median(slowest(gather, 10) for _ in range(3))


if __name__ == "__main__":
    measure(Path(sys.argv[1]), sys.argv[2:])
