"""Linear attention over sequences on the CPU, forward and in training, beside Inductor: what the cost model of the
rewrite rests on.

    python -m kdacompile.bench.recurrent_prompts [--json docs/results/fits/recurrence-cpu.json] [--seconds 1] [--small]
        [--part 0/4]

Spellings that multiply queries with keys, which is what may be faster for a short prompt, on one thread. Inductor alone
and ``backend="kda"`` compile the same function in this process and take turns. The last lines are the constants of
:mod:`kdacompile.lowering.cpu.recurrence_cost` that fit these rows best.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from kdacompile.bench import turns
from kdacompile.lowering.cpu import costs
from kdacompile.lowering.cpu.costs import Priced

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# -- spellings: q, k ``[B, H, T, K]``, v ``[B, H, T, V]``, log gates and write gates ``[B, H, T]`` --------------------


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v


def mamba2(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    total = g.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).masked_fill(~_causal(q), -torch.inf)
    return (q @ k.mT * since.exp().to(q.dtype)) @ (v * beta[..., None])


def lightning(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """In blocks, as MiniMax does it."""
    block, rates = 64, _rates(q.shape[1])
    n = torch.arange(block) + 1.0
    for_queries = torch.exp(rates[..., 0] * n)[..., None].to(q.dtype)
    for_keys = torch.exp(rates[..., 0] * (block - n))[..., None].to(q.dtype)
    since = n[:, None] - n
    within = torch.where(since >= 0, torch.exp(rates * since), 0.0).to(q.dtype)
    state, outs = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for at in range(0, q.shape[2], block):
        q_i, k_i, v_i = (x[:, :, at : at + block] for x in (q, k, v))
        count = q_i.shape[2]
        own = (q_i @ k_i.mT * within[:, :count, :count]) @ v_i
        outs.append((q_i * for_queries[:, :count]) @ state + own)
        state = state * torch.exp(rates * count).to(q.dtype) + (k_i * for_keys[:, -count:]).mT @ v_i
    return torch.cat(outs, 2)


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    total = (g[..., None] * torch.linspace(0.1, 1.0, q.shape[-1])).cumsum(-2)
    scores = (q * total.exp().to(q.dtype)) @ (k * (-total).exp().to(q.dtype)).mT
    return scores.tril() @ v


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The delta rule in one chunk."""
    old = ((k * beta[..., None]) @ k.mT).tril(-1).float()
    written = (v * beta[..., None]).float()
    new = torch.linalg.solve_triangular(old + torch.eye(q.shape[2]), written, upper=False, unitriangular=True)
    return (q @ k.mT).tril() @ new.to(v.dtype)


def _rates(heads: int) -> Tensor:
    return torch.log(1 - torch.exp2(-5.0 - torch.arange(heads)))[:, None, None]


def _causal(q: Tensor) -> Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()


SPELLINGS: dict[str, Spelling] = {each.__name__: each for each in (plain, mamba2, lightning, gla, delta)}


# -- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    spelling: str
    tokens: int
    heads: int
    width: int
    train: bool
    dtype: str


SIZES = ((4, 32), (8, 64), (16, 128))
"""Heads, and the width of keys and values."""


def cases(small: bool) -> Iterator[Case]:
    """All of the grid; ``small``: two cases, to see that it runs."""
    if small:
        yield from (Case("plain", 16, 4, 32, train, "float32") for train in (False, True))
        return
    for dtype, train, (heads, width) in itertools.product(("float32", "bfloat16"), (False, True), SIZES):
        for spelling in ("plain", "mamba2", "lightning"):
            for tokens in (16, 64, 256):
                yield Case(spelling, tokens, heads, width, train, dtype)
        yield Case("delta", 64, heads, width, train, dtype)
        yield Case("gla", 64, heads, width, train, dtype)
        yield Case("plain", 1024, heads, width, train, dtype)


def measure(case: Case, seconds: float) -> tuple[Priced, turns.Times]:
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    rows = (1, case.heads, case.tokens, case.width)
    q, k, v = torch.randn(rows), F.normalize(torch.randn(rows), dim=-1), torch.randn(rows)
    inputs = [*(x.to(dtype) for x in (q, k, v)), -0.1 * torch.rand(rows[:3]), torch.rand(rows[:3]).to(dtype)]
    calls: dict[str, Callable[[], object]] = {}
    found: list[Priced] = []
    with patch.object(costs, "loses", found.append):
        for backend in ("inductor", "kda"):
            torch.compiler.reset()
            compiled = torch.compile(SPELLINGS[case.spelling], backend=backend, dynamic=False)
            calls[backend] = _training(compiled, inputs) if case.train else _inference(compiled, inputs)
            calls[backend]()
            calls[backend]()
    if not found:
        raise SystemExit(f"{case}: not recognised")
    return found[-1], turns.compare(calls, seconds)


def _inference(compiled: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return compiled(*inputs)

    return call


def _training(compiled: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        compiled(*leaves).sum().backward()

    return call


def main(argv: Sequence[str] | None = None) -> int:
    return turns.measure_all(argv, __doc__, cases, measure)


if __name__ == "__main__":
    raise SystemExit(main())
