"""Compile one function in a fresh process and print what happened, for test_cache.py.

Its argument: ``plain``, ``stale`` (the rewrite changes but its fingerprint does not: what the fingerprint guards
against) or ``changed`` (both change, as when a file is edited).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._dynamo.utils import counters  # torch-private: hits and misses

from kdacompile import backend
from kdacompile.report.collect import collecting
from kdacompile.rewrite import linear_attention as rewrite
from tests.backend.layers import delta_arguments, gated_delta_loop


def change_the_rewrite() -> None:
    """Twice the scale, whatever was proven."""
    call = rewrite.LinearAttentionSplice.call

    def doubled(self: rewrite.LinearAttentionSplice, *args: Any, **options: Any) -> torch.fx.Node:
        return call(self, *args, **options, scale=2 * self.match.binding.scale)

    rewrite.LinearAttentionSplice.call = doubled  # type: ignore[method-assign]


def main(variant: str) -> None:
    if variant in ("stale", "changed"):
        change_the_rewrite()
    if variant == "changed":
        fingerprint = backend.source_fingerprint()
        backend.source_fingerprint = lambda: f"{fingerprint} edited"  # type: ignore[assignment]
    options: Any = {"kda.expect": {"gated_delta_rule": 1}, "kda.lift": False, "kda.cost_model": False}
    arguments = [x.requires_grad_() for x in delta_arguments()]
    with collecting() as report:
        run = torch.compile(gated_delta_loop, backend="kda", fullgraph=True, options=options)
        out = run(*arguments)
        gradient = torch.autograd.grad(out.sum(), arguments[2])[0]
    plain = gated_delta_loop(*arguments)
    result = {
        "ratio": round(float((out / plain).median()), 4),
        "gradient_ratio": round(float((gradient / torch.autograd.grad(plain.sum(), arguments[2])[0]).median()), 4),
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "matches": [match.pattern for match in report.matches],
        "from_cache": [graph.from_cache for graph in report.graphs],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
