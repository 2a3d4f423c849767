"""MLA prompts on the CPU, forward and in training, beside Inductor: what the cost model of the rewrite rests on.

    python -m kdacompile.bench.latent_prompts [--json docs/results/fits/mla-cpu.json] [--seconds 3] [--small]

Expanded keys and values, as models write them, fp32, one thread. Inductor alone and ``backend="kda"`` compile the same
module in this process and take turns; times are of the processor, and the ratio is the median of the turns' own. The
last lines are the constants of :mod:`kdacompile.lowering.cpu.attention_cost` that fit these rows best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdacompile.lowering.cpu.attention_cost import Constants, Prompt
from kdacompile.report.collect import collecting

SMALL, LARGE = (8, 64, 32, 64, 256), (16, 128, 64, 128, 512)


class Layer(nn.Module):
    """One layer's attention, from queries and the latent to the heads' outputs."""

    def __init__(self, sizes: Prompt) -> None:
        super().__init__()
        self.sizes = sizes
        self.kv_b_proj = nn.Linear(sizes.rank, sizes.heads * (sizes.nope + sizes.value), bias=False)

    def forward(self, q: Tensor, latent: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        """q ``[B, H, T, N + D]``, latent ``[B, T, R]``, rope ``[B, T, D]``; returns ``[B, T, H, V]``."""
        sizes = self.sizes
        rows = self.kv_b_proj(latent).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        nope, v = torch.split(rows, [sizes.nope, sizes.value], dim=-1)
        k = torch.cat([nope, rope.unsqueeze(1).expand(-1, sizes.heads, -1, -1)], dim=-1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return o.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Row:
    """One case: processor seconds of a call by contender, and quartiles of their ratio, kda over Inductor."""

    prompt: Prompt
    inductor: float
    kda: float
    ratio: float
    low: float
    high: float


def cases(small: bool) -> Iterator[Prompt]:
    """All of the grid; ``small``: three cases, to see that it runs."""
    for causal, sizes, lengths in (
        (True, SMALL, (64, 128, 256, 512, 1024)),
        (True, LARGE, (64, 128, 256, 512)),
        (False, SMALL, (128, 256, 512)),
        (False, LARGE, (256,)),
    ):
        for tokens in lengths[:1] if small else lengths:
            for train in (False, True):
                yield Prompt(1, tokens, tokens, *sizes, causal=causal, train=train)
    if not small:
        yield from (Prompt(8, 64, 64, *SMALL, causal=True, train=train) for train in (False, True))


def measure(case: Prompt, seconds: float) -> Row:
    torch.manual_seed(0)
    layer = Layer(case)
    shapes = (case.batch, case.heads, case.tokens, case.nope + case.rope), (case.batch, case.tokens, case.rank)
    inputs = [torch.randn(shape) for shape in (*shapes, (case.batch, case.tokens, case.rope))]
    mask = None if case.causal else torch.ones(case.tokens, case.tokens).tril().bool()[None, None]
    calls: dict[str, Callable[[], object]] = {}
    with collecting() as report:
        chosen: list[tuple[str, Any]] = [("inductor", None), ("kda", {"kda.cost_model": False})]
        for backend, options in chosen:
            torch.compiler.reset()
            compiled = torch.compile(layer, backend=backend, dynamic=False, options=options)
            calls[backend] = lambda compiled=compiled: _call(compiled, layer, inputs, mask, case.train)
            calls[backend]()
            calls[backend]()
    if {match.pattern for match in report.matches} != {"mla"}:
        raise SystemExit(str(report))
    times = _alternating(calls, seconds)
    ratios = [ours / theirs for ours, theirs in zip(times["kda"], times["inductor"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return Row(case, medians["inductor"], medians["kda"], ratio, low, high)


def _call(
    compiled: Callable[..., Tensor], layer: Layer, inputs: list[Tensor], mask: Tensor | None, train: bool
) -> None:
    if not train:
        with torch.no_grad():
            compiled(*inputs, mask)
        return
    layer.zero_grad()
    compiled(*(x.detach().requires_grad_() for x in inputs), mask).sum().backward()


def _alternating(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Processor seconds of each call, in turns that begin with the one and with the other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, end = list(calls), time.process_time() + seconds
    while len(times[order[0]]) < 8 or time.process_time() < end:
        order.reverse()
        for name in order:
            start = time.process_time()
            calls[name]()
            times[name].append(time.process_time() - start)
    return times


def fitted(measured: Sequence[tuple[Prompt, float, float]]) -> Constants:
    """The constants that estimate these seconds of Inductor and of the op best, relative to each (least squares)."""
    pairs = [(prompt.terms(op=op), times[op]) for prompt, *times in measured for op in (False, True)]
    relative = torch.tensor([[x / time for x in terms] for terms, time in pairs], dtype=torch.float64)
    scale = relative.amax(0)
    found = torch.linalg.lstsq(relative / scale, relative.new_ones(len(pairs))).solution / scale
    return tuple(float(f"{x:.3g}") for x in found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kdacompile.bench.latent_prompts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--seconds", type=float, default=3.0, help="processor time for each case")
    parser.add_argument("--small", action="store_true", help="some cases only")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for case in cases(args.small):
        rows.append(row := measure(case, args.seconds))
        print(f"{case}: inductor {1e3 * row.inductor:.2f} ms, kda {1e3 * row.kda:.2f} ms, ", end="")
        print(f"ratio {row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})", flush=True)
    if args.json:
        setting = {"torch": torch.__version__, "threads": 1, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(setting, indent=1) + "\n", encoding="utf-8")
    print("TRAINING =", fitted([(row.prompt, row.inductor, row.kda) for row in rows if row.prompt.train]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
