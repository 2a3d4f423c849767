"""Small models with linear attention inside, and helpers that run them compiled and plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.compare import copies, tensors, worst_error

Function = Callable[..., Any]


def gated_delta_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over [B, T, H, D], one token at a time."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        old = (state * k[:, t].unsqueeze(-1)).sum(-2)
        state = state + k[:, t].unsqueeze(-1) * ((v[:, t] - old) * beta[:, t].unsqueeze(-1)).unsqueeze(-2)
        outs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outs, dim=1)


def gated_linear_parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Linear attention with a scalar gate over [B, T, H, D], in closed form (any T)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    total = g.transpose(1, 2).cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    return ((q @ k.transpose(-1, -2) * decay) @ v).transpose(1, 2)


def gla_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of gated linear attention, [B, H, D] against a state [B, H, K, V]."""
    state = state * g.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Layer(nn.Module):
    """Projections around a mixer with q, k, v, a log gate and beta per head; the mixer's text is an argument."""

    def __init__(self, mixer: Function = gated_delta_loop, width: int = 12, heads: int = 3, size: int = 4) -> None:
        super().__init__()
        self.mixer, self.heads, self.size = mixer, heads, size
        self.qkv = nn.Linear(width, 3 * heads * size, bias=False)
        self.gates = nn.Linear(width, 2 * heads)
        self.out = nn.Linear(heads * size, width, bias=False)

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.size)).unbind(-3)
        gate, beta = wide(self.gates(x)).unflatten(-1, (2, self.heads)).unbind(-2)
        k = torch.nn.functional.normalize(k, dim=-1)
        return self.mixer(q, k, v, -torch.nn.functional.softplus(gate), beta.sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mixed(x).to(x.dtype).flatten(-2))


# All sizes differ: equal ones leave the roles of dimensions open, and each way to fill them takes a proof.
BATCH, LENGTH, HEADS, KEY, VALUE = 2, 5, 3, 4, 6


def delta_arguments(batch: int = BATCH, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, g, beta for ``gated_delta_loop``."""
    rng = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, length, HEADS, KEY, generator=rng) for _ in range(2))
    v = torch.randn(batch, length, HEADS, VALUE, generator=rng)
    g, beta = (torch.rand(batch, length, HEADS, generator=rng) for _ in range(2))
    return q, k / k.norm(dim=-1, keepdim=True), v, -g, beta


def step_arguments(seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, g, state for ``gla_step``."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v, _, _ = delta_arguments(seed=seed)
    g = -torch.rand(BATCH, HEADS, KEY, generator=rng)
    return q[:, 0], k[:, 0], v[:, 0], g, torch.randn(BATCH, HEADS, KEY, VALUE, generator=rng)


def compiled(fn: Function, inner: str = "eager", **keywords: Any) -> Function:
    """``torch.compile(fn, backend="kda")`` in a process that has forgotten everything compiled before."""
    torch._dynamo.reset()
    # Functions are not lifted here (tests/lifting does that): what is tested is the captured graph, however small.
    how = {"kda.inner": inner, "kda.lift": False, "kda.cost_model": False}
    options: Any = {**how, **keywords.pop("options", {})}
    keywords = {"fullgraph": True, "dynamic": False, **keywords}
    return torch.compile(fn, backend="kda", options=options, **keywords)


def patterns(report: Report) -> list[str]:
    return [match.pattern for match in report.matches]


def codes(report: Report) -> set[str]:
    return {rejection.code for rejection in report.rejections}


def run_both(
    fn: Function, arguments: Sequence[Tensor], inner: str = "eager", **keywords: Any
) -> tuple[Any, Any, Report]:
    """Results of the compiled and of the plain function on equal copies, with the report."""
    with collecting() as report:
        ours = compiled(fn, inner, **keywords)(*copies(arguments))
    return ours, fn(*copies(arguments)), report


def gradients(outputs: Any, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a fixed random projection of all outputs; zeros where an input has none."""
    rng = torch.Generator().manual_seed(3)
    loss = torch.zeros(())
    for out in tensors(outputs):
        loss = loss + (out.float() * torch.randn(out.shape, generator=rng)).sum()
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    pairs: Any = zip(wanted, found, strict=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in pairs]


def train_both(
    fn: Function, arguments: Sequence[Tensor], inner: str = "eager", parameters: Sequence[Tensor] = (), **keywords: Any
) -> tuple[float, float, Report]:
    """Largest relative errors of outputs and of all gradients, with the report."""
    ours, plain = ([x.detach().clone().requires_grad_() for x in arguments] for _ in range(2))
    with collecting() as report:
        have = compiled(fn, inner, **keywords)(*ours)
        have_gradients = gradients(have, [*ours, *parameters])
    want = fn(*plain)
    return worst_error(have, want), worst_error(have_gradients, gradients(want, [*plain, *parameters])), report
