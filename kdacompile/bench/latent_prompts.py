"""MLA prompts on the CPU, forward and in training, beside Inductor: what the cost model of the rewrite rests on.

    python -m kdacompile.bench.latent_prompts [--json docs/results/fits/mla-cpu.json] [--seconds 3] [--small]
        [--part 0/4]

Expanded keys and values, as models write them, in fp32 and bf16, on one thread. Inductor alone and ``backend="kda"``
compile the same module in this process and take turns; times are of the processor, and the ratio is the median of the
turns' own. The last lines are the constants of :mod:`kdacompile.lowering.cpu.attention_cost` that fit these rows best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kdacompile.bench import turns
from kdacompile.lowering.cpu.attention_cost import Prompt
from kdacompile.report.collect import collecting

TINY, SMALL, LARGE = (4, 12, 8, 20, 24), (8, 64, 32, 64, 256), (16, 128, 64, 128, 512)


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


def cases(small: bool) -> Iterator[Prompt]:
    """All of the grid; ``small``: two cases, to see that it runs."""
    for half, sizes, lengths in (
        (False, SMALL, (64, 128, 256, 512, 1024)),
        (False, LARGE, (16, 64, 128, 256, 512)),
        (False, TINY, (16, 64, 256)),
        (True, SMALL, (16, 64, 256, 512)),
        (True, LARGE, (16, 64, 256, 512)),
        (True, TINY, (64, 256)),
    ):
        for tokens in lengths[:1] if small else lengths:
            for train in (False, True):
                yield Prompt(1, tokens, tokens, *sizes, causal=True, train=train, half=half)
        if small:
            return
    for sizes, tokens in ((SMALL, 128), (SMALL, 256), (SMALL, 512), (LARGE, 256)):
        yield from (Prompt(1, tokens, tokens, *sizes, train=train) for train in (False, True))
    yield from (Prompt(8, 64, 64, *SMALL, causal=True, train=train) for train in (False, True))


def measure(case: Prompt, seconds: float) -> tuple[Prompt, turns.Times]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.half else torch.float32
    layer = Layer(case).to(dtype)
    shapes = (case.batch, case.heads, case.tokens, case.nope + case.rope), (case.batch, case.tokens, case.rank)
    inputs = [torch.randn(shape, dtype=dtype) for shape in (*shapes, (case.batch, case.tokens, case.rope))]
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
    return case, turns.compare(calls, seconds)


def _call(
    compiled: Callable[..., Tensor], layer: Layer, inputs: list[Tensor], mask: Tensor | None, train: bool
) -> None:
    if not train:
        with torch.no_grad():
            compiled(*inputs, mask)
        return
    layer.zero_grad()
    compiled(*(x.detach().requires_grad_() for x in inputs), mask).sum().backward()


def main(argv: Sequence[str] | None = None) -> int:
    return turns.measure_all(argv, __doc__, cases, measure)


if __name__ == "__main__":
    raise SystemExit(main())
