"""MLA decoding on the CPU: what a latent cache costs expanded at every step, and what it costs absorbed.

    python -m kdacompile.bench.latent [--cache 4096] [--heads 16] [--batch 1] [--threads 2]

One token of DeepSeek-V3's attention (latent 512, heads of 128 + 64 and 128 channels) over a filled cache, as
transformers writes it: ``kv_b_proj`` of the whole cache, the key filled part by part, eager attention. Inductor alone
and ``backend="kda"`` compile the same module in this process, and are timed in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kdacompile.bench import measure
from kdacompile.report.collect import collecting

NOPE, ROPE, RANK, VALUE = 128, 64, 512, 128
GOAL = 20.0
"""How many times faster than Inductor alone a step over 4096 tokens is meant to be."""


class NaiveDecode(nn.Module):
    """The attention of one layer, from queries and a latent cache to the heads' outputs."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_b_proj = nn.Linear(RANK, heads * (NOPE + VALUE), bias=False)
        self.scale = (NOPE + ROPE) ** -0.5

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """q ``[B, H, T, 192]``, latent ``[B, 1, S, 512]``, rope ``[B, 1, S, 64]``; returns ``[B, T, H, 128]``."""
        expanded = self.kv_b_proj(latent).view(q.shape[0], latent.shape[2], -1, NOPE + VALUE).transpose(1, 2)
        nope, v = torch.split(expanded, [NOPE, VALUE], dim=-1)
        k = expanded.new_empty(*expanded.shape[:-1], NOPE + ROPE)
        k[..., :NOPE].copy_(nope)
        k[..., NOPE:].copy_(rope.expand(-1, self.heads, -1, -1))
        weights = torch.softmax(q @ k.transpose(2, 3) * self.scale, dim=-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).transpose(1, 2).contiguous()


def compare(heads: int, cached: int, batch: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step by contender, and ours' relative error against Inductor's result."""
    torch.manual_seed(0)
    module = NaiveDecode(heads)
    inputs = (
        torch.randn(batch, heads, 1, NOPE + ROPE),
        torch.randn(batch, 1, cached, RANK),
        torch.randn(batch, 1, cached, ROPE),
    )
    calls: dict[str, Callable[[], Tensor]] = {}
    with torch.no_grad(), collecting() as report:
        for backend in ("inductor", "kda"):
            torch.compiler.reset()
            compiled = torch.compile(module, backend=backend, dynamic=False)
            calls[backend] = lambda compiled=compiled: compiled(*inputs)
            calls[backend]()
        results = {name: call() for name, call in calls.items()}
        timed = measure.timings(calls, rounds=rounds)
    if [match.pattern for match in report.matches] != ["mla"]:
        raise SystemExit(str(report))
    medians = {name: timing.median for name, timing in timed.items()}
    return {**medians, "error": measure.relative_error(results["kda"], results["inductor"])}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kdacompile.bench.latent", description=__doc__)
    for name, default in (("cache", 4096), ("heads", 16), ("batch", 1), ("threads", 2), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    found = compare(args.heads, args.cache, args.batch, args.rounds)
    ratio = found["inductor"] / found["kda"]
    print(f"one token, {args.heads} heads, cache {args.cache}, batch {args.batch}, fp32, {args.threads} threads")
    print(f"  inductor alone  {1e3 * found['inductor']:9.2f} ms")
    print(f"  kda             {1e3 * found['kda']:9.2f} ms   {ratio:.1f} times faster, error {found['error']:.1e}")
    if (args.cache, args.heads, args.batch) == (4096, 16, 1):
        print(f"  goal            {GOAL:9.0f} times faster: {'met' if ratio >= GOAL else 'MISSED'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
