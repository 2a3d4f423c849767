"""Cells that project a token at a time, rotate it and lay out its heads: one recurrence; what only looks so is left."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdacompile.explainer import explain
from kdacompile.report.report import Report
from tests.compare import copies, worst_error

B, T, H, K, V, D = 2, 6, 3, 4, 5, 12
BOUND = 1e-5

Heads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Cell(nn.Module):
    """The gated delta rule with all that a token needs made of it in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, H * K, bias=False), nn.Linear(D, H * K)
        self.v = nn.Linear(D, H * V, bias=False)
        self.gates, self.out = nn.Linear(D, 2 * H), nn.Linear(H * V, D)
        self.norm = nn.RMSNorm(V)

    def heads(self, x: Tensor) -> Heads:
        q, k, v = self.q(x).view(-1, H, K), self.k(x).view(-1, H, K), self.v(x).view(-1, H, V)
        g, beta = self.gates(x).chunk(2, -1)
        return q, F.normalize(k, dim=-1), v, F.logsigmoid(g), beta.sigmoid()

    def token(self, x: Tensor, t: int) -> Heads:
        return self.heads(x[:, t])

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.out(self.norm(o).flatten(1))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows: list[Tensor] = []
        for t in range(x.shape[1]):
            q, k, v, g, beta = self.token(x, t)
            state = state * g.exp()[..., None, None]
            write = beta[..., None] * (v - (k[..., None] * state).sum(-2))
            state = state + k[..., None] * write[..., None, :]
            rows.append(self.read((q[..., None] * state).sum(-2), x[:, t]))
        return torch.stack(rows, 1), state


class InOne(Cell):
    """One projection for all, whose heads are cut afterwards; a gate on what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(D, H * (2 * K + V + 2))

    def heads(self, x: Tensor) -> Heads:
        found = self.all(x).view(-1, H, 2 * K + V + 2)
        q, k, v = found[..., :K], found[..., K : 2 * K], found[..., 2 * K : 2 * K + V]
        return q, F.normalize(k, dim=-1), v, -F.softplus(found[..., -2]), found[..., -1].sigmoid()

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return x + self.out((self.norm(o) * self.v(x).view(-1, H, V).sigmoid()).reshape(len(x), -1))


class Split(InOne):
    """The projection is cut before its heads are apart; queries have a weight of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(H, K) + 0.5)

    def heads(self, x: Tensor) -> Heads:
        q, k, v, g, beta = self.all(x).split([H * K, H * K, H * V, H, H], -1)
        q, k = q.reshape(-1, H, K) * self.scale, F.normalize(k.reshape(-1, H, K), dim=-1)
        return q, k, v.reshape(-1, H, V), F.logsigmoid(g), beta.sigmoid()


class Rotated(Cell):
    """Rotary positions in the loop."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(T)[:, None] * torch.tensor([1.0, 0.1])
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotated(self, x: Tensor, t: int) -> Tensor:
        left, right = x.chunk(2, -1)
        cos, sin = self.get_buffer("cos")[t], self.get_buffer("sin")[t]
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    def token(self, x: Tensor, t: int) -> Heads:
        q, k, v, g, beta = self.heads(x[:, t])
        return self.rotated(q, t), self.rotated(k, t), v, g, beta


class PerHead(Cell):
    """A matrix for each head, by ``bmm``, and one for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices, self.mixed = nn.Parameter(torch.randn(H, V, V)), nn.Parameter(torch.randn(K, K))

    def heads(self, x: Tensor) -> Heads:
        q, k, v, g, beta = super().heads(x)
        return q @ self.mixed, k, torch.bmm(v.transpose(0, 1), self.matrices).transpose(0, 1), g, beta


class Flat(Cell):
    """Nothing but heads that are apart in the loop alone."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = self.heads(x.flatten(0, 1))
        rows: list[Tensor] = []
        q, k, v, g, beta = (y.reshape(B, T, -1) for y in (q, k, v, g, beta))
        for t in range(T):
            key = k[:, t].view(-1, H, K)
            state = state * g[:, t].exp()[..., None, None]
            write = beta[:, t, :, None] * (v[:, t].view(-1, H, V) - (key[..., None] * state).sum(-2))
            state = state + key[..., None] * write[..., None, :]
            rows.append((q[:, t].view(-1, H, K)[..., None] * state).sum(-2).reshape(-1, H * V))
        return torch.stack(rows, 1), state


def ran(cell: nn.Module, grad: bool = True) -> tuple[Report, float]:
    """The report, and the worst error of results and gradients, parameters' included."""
    inputs = [torch.randn(B, T, D), torch.randn(B, H, K, V)]
    torch._dynamo.reset()
    plain = copy.deepcopy(cell)  # one of them writes its buffer
    own, theirs = (copies(x.requires_grad_(grad) for x in inputs) for _ in range(2))
    with torch.set_grad_enabled(grad):
        report = explain(cell, options={"kda.lift": False})(*own)
        expected = plain(*theirs)
    error = worst_error(report.result, expected)
    if grad:
        taken = [
            torch.autograd.grad(
                sum((x.sin().sum() for x in results), torch.zeros(())),
                [*given, *module.parameters()],
                allow_unused=True,
                materialize_grads=True,
            )
            for module, results, given in ((cell, report.result, own), (plain, expected, theirs))
        ]
        error = max(error, worst_error(*taken))
    return report, error


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [Cell, InOne, Split, Rotated, PerHead, Flat])
def test_cells(kind: Callable[[], nn.Module], grad: bool) -> None:
    torch.manual_seed(0)
    report, error = ran(kind(), grad)
    assert [match.pattern for match in report.matches] == ["gated_delta_rule"], str(report)
    assert error < BOUND


class LateQuery(Cell):
    """Queries of the token before."""

    def token(self, x: Tensor, t: int) -> Heads:
        return self.heads(x[:, max(t - 1, 0)])[0], *self.heads(x[:, t])[1:]


class LatePosition(Rotated):
    def token(self, x: Tensor, t: int) -> Heads:
        q, k, v, g, beta = self.heads(x[:, t])
        return self.rotated(q, t), self.rotated(k, max(t - 1, 0)), v, g, beta


class OtherWeight(PerHead):
    """Another matrix at one token."""

    def token(self, x: Tensor, t: int) -> Heads:
        q, k, v, g, beta = Cell.heads(self, x[:, t])
        return q @ (self.mixed if t != 3 else self.mixed.mT), k, v, g, beta


class ChangedWeight(PerHead):
    """A matrix that is written in the middle of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.randn(K, K))

    def token(self, x: Tensor, t: int) -> Heads:
        q, k, v, g, beta = Cell.heads(self, x[:, t])
        turned = self.get_buffer("turned")
        if t == 3:
            turned.mul_(-1.0)
        return q @ turned, k, v, g, beta


class Cut(Cell):
    """The gradient of a projection is cut in the loop."""

    def heads(self, x: Tensor) -> Heads:
        q, k, v, g, beta = super().heads(x)
        return q, k.detach(), v, g, beta


class CutWeight(PerHead):
    def heads(self, x: Tensor) -> Heads:
        q, k, v, g, beta = Cell.heads(self, x)
        return q @ self.mixed.detach(), k, v, g, beta


class CutOnce(Cell):
    def token(self, x: Tensor, t: int) -> Heads:
        return self.heads(x[:, t].detach() if t == 2 else x[:, t])


class Fed(Cell):
    """What is projected is what the token before has read."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows: list[Tensor] = []
        last = x[:, 0]
        for _ in range(T):
            q, k, v, g, beta = self.heads(last)
            state = state * g.exp()[..., None, None]
            state = state + k[..., None] * (beta[..., None] * (v - (k[..., None] * state).sum(-2)))[..., None, :]
            last = self.read((q[..., None] * state).sum(-2), last)
            rows.append(last)
        return torch.stack(rows, 1), state


class OtherOut(Cell):
    """What is read is projected with what another token read."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = super().forward(x, state)
        return out[:, [1, 0, *range(2, T)]], state


@pytest.mark.parametrize(
    "kind", [LateQuery, LatePosition, OtherWeight, ChangedWeight, Cut, CutWeight, CutOnce, Fed, OtherOut]
)
def test_what_looks_like_a_cell(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    cell = kind()
    report, error = ran(cell, grad=kind is not ChangedWeight)  # of what is overwritten eager mode has no gradient
    assert error < BOUND, str(report)
    matched = [match.pattern for match in report.matches if match.mode == "sequence"]
    assert not matched or kind in (CutWeight, Cut, CutOnce, OtherOut), str(report)
