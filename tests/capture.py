"""``python -m tests.capture``: how long Dynamo takes to capture a prompt of the tiny kimi_linear, in fresh processes.

From the call of the compiled model to the moment its graph would go to Inductor; a process before has left the verdict
on disk. Beside it torch.compile alone, with the same function replaced by hand (what Dynamo takes for a model of that
size whose lengths are open), and as the model is written, for a prompt of one chunk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

CONTENDERS = {
    "kda": "backend kda",
    "by hand": "torch.compile alone, the function replaced by hand",
    "alone": "torch.compile alone",
}
LENGTHS = {"kda": (64, 640, 65536), "by hand": (65536,), "alone": (64,)}
ROW = "| {} | {} | {} | {:.2f} | {:.2f} |"


class Captured(BaseException):
    """Ends the compilation: not an error of a backend, which Dynamo would wrap."""


def by_hand(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **others: Any) -> Any:
    """transformers' chunked KDA as one op."""
    from kdacompile import ops

    return ops.linear_attention(query, key, value, g, beta, output_final_state=True, qk_l2norm=1e-6)


def worker(contender: str, length: int) -> str:
    """Capture in this process; returns a row of the table."""
    from transformers.models.kimi_linear import modeling_kimi_linear as modeling

    from kdacompile import backend
    from tests.models.zoo import CASES

    case = CASES["kimi_linear"]
    model = case.build()
    inputs = case.prefill_inputs(model, length, cache=True, batch=1)
    nodes = 0

    def end(gm: fx.GraphModule, *args: Any) -> Any:
        nonlocal nodes
        nodes = len(gm.graph.nodes)
        raise Captured

    replaced = by_hand if contender == "by hand" else modeling.chunk_kimi_delta_attention
    if contender == "by hand":
        torch._dynamo.mark_dynamic(inputs["input_ids"], 1)
    run: Any = torch.compile(model, backend="kda" if contender == "kda" else end)
    with (
        torch.no_grad(),
        patch.object(backend, "_compiled", end),
        patch.object(modeling, "chunk_kimi_delta_attention", replaced),
    ):
        cpu, wall = time.process_time(), time.perf_counter()
        with contextlib.suppress(Captured):
            run(**inputs)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return ROW.format(CONTENDERS[contender], length, nodes, cpu, wall)


def main() -> int:
    parser = argparse.ArgumentParser(description="how long capture takes in a fresh process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=2, metavar=("CONTENDER", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(worker(arguments.worker[0], int(arguments.worker[1])))
        return 0
    print("| captured with | tokens | nodes | CPU s | wall s |\n| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as caches:

        def start(contender: str, length: int) -> str:
            command = [sys.executable, "-m", "tests.capture", "--worker", contender, str(length)]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches}
            return subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout

        start("kda", 200)  # proves the function
        for _ in range(arguments.rounds):
            for contender, lengths in LENGTHS.items():
                for length in lengths:
                    print(start(contender, length), end="", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
