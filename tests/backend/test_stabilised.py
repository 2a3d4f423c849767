"""mLSTM with its stabiliser: every row of decays is divided by its largest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kdacompile
from tests.compare import copies, worst_error

BATCH, HEADS, TOKENS, KEYS, VALUES = 2, 3, 7, 4, 5
EAGER: dict[str, Any] = {"kda.inner": "eager"}
Sums = Callable[[Tensor, Tensor], Tensor]


def differences(f: Tensor, i: Tensor) -> Tensor:
    """Of running sums, masked."""
    total = f.cumsum(-1)
    mask = torch.ones(f.shape[-1], f.shape[-1], dtype=torch.bool).tril()
    return torch.where(mask, total[..., :, None] - total[..., None, :] + i[..., None, :], -torch.inf)


def running(f: Tensor, i: Tensor) -> Tensor:
    """Sums of the columns of a matrix that has each gate below the diagonal."""
    later = f[..., None].repeat(1, 1, 1, f.shape[-1]).tril(-1).cumsum(-2)
    mask = torch.ones(f.shape[-1], f.shape[-1], dtype=torch.bool).triu(1)
    return later.masked_fill(mask, -torch.inf) + i[..., None, :]


def one_token_late(f: Tensor, i: Tensor) -> Tensor:
    """The gate of the token itself decays its own write."""
    return differences(f, i + f)


def window(f: Tensor, i: Tensor) -> Tensor:
    return differences(f, i).masked_fill(torch.ones(f.shape[-1], f.shape[-1], dtype=torch.bool).tril(-3), -torch.inf)


def not_causal(f: Tensor, i: Tensor) -> Tensor:
    total = f.cumsum(-1)
    return total[..., :, None] - total[..., None, :] + i[..., None, :]


def squared(f: Tensor, i: Tensor) -> Tensor:
    """A distance that is no sum of gates."""
    return differences(f, i) - differences(f, i).exp().square()


def cell(sums: Sums, *, rows: bool = True) -> Callable[..., Tensor]:
    def parallel(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
        logs = sums(F.logsigmoid(f), i)
        m = logs.amax(-1, keepdim=True) if rows else logs.amax((-1, -2), keepdim=True)
        weights = (q @ k.mT) * KEYS**-0.5 * (logs - m).exp()
        least = torch.maximum(weights.sum(-1, keepdim=True).abs(), (-m).exp())
        return (weights / (least + 1e-6)) @ v

    return parallel


def as_published(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    """As several people write it: added in place, the maximum without its dimension, which comes back."""
    total, mask = F.logsigmoid(f).cumsum(-1), torch.ones(f.shape[-1], f.shape[-1], dtype=torch.bool).tril()
    logs = torch.where(mask[None, None], total[..., None] - total[..., None, :], -torch.inf)
    logs += i[..., None, :]
    m = torch.max(logs, -1)[0]
    weights = q @ (k.mT / KEYS**0.5) * torch.exp(logs - m[..., None])
    least = torch.maximum(torch.abs(torch.sum(weights, -1)), torch.exp(-m)) + 1e-6
    return (weights / least[..., None]) @ v


def off_the_tape(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    """The maximum is a number to gradients."""
    logs = differences(F.logsigmoid(f), i)
    with torch.no_grad():
        m = torch.max(logs, dim=-1, keepdim=True)[0]
    weights = q @ k.mT * KEYS**-0.5 * torch.exp(logs - m)
    return weights @ v / (torch.maximum(weights.sum(-1, keepdim=True).abs(), torch.exp(-m)) + 1e-6)


def detached(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    logs = differences(F.logsigmoid(f), i)
    m = logs.amax(-1).detach().unsqueeze(-1)
    weights = q @ k.mT * KEYS**-0.5 * torch.exp(logs - m)
    return weights @ v / torch.maximum(weights.sum(-1, keepdim=True).abs(), torch.exp(-m))


def projected(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
    """Gates that come with tokens before heads, of a product."""
    f, i = (torch.addmm(x[0, 0, :HEADS], x.mT.flatten(0, 1), torch.eye(HEADS)) for x in (f, i))
    f, i = (x.unflatten(0, (BATCH, -1)).permute(0, 2, 1) for x in (f, i))
    return cell(differences)(q, k, v, f, i)


def inputs(tokens: int = TOKENS) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (BATCH, HEADS, tokens)
    q, k, v = (torch.randn(*sizes, size) for size in (KEYS, KEYS, VALUES))
    return [q, k, v, torch.randn(sizes), 3 * torch.randn(sizes)]


SPELLINGS = [cell(differences), cell(running), as_published, off_the_tape, detached, projected]


@pytest.mark.parametrize("fn", SPELLINGS)
def test_matched_with_gradients(fn: Callable[..., Tensor]) -> None:
    own = [x.requires_grad_() for x in inputs()]
    theirs = copies(own)
    torch._dynamo.reset()
    report = kdacompile.explain(fn, options=EAGER)(*own)
    assert [match.pattern for match in report.matches] == ["simple_gla"], str(report)
    expected = fn(*theirs)
    assert worst_error(report.result, expected) < 1e-5
    cotangent = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(x, y, cotangent) for x, y in ((report.result, own), (expected, theirs)))
    assert worst_error(found, wanted) < 1e-4


@pytest.mark.parametrize("fn", [cell(window), cell(not_causal), cell(squared), cell(differences, rows=False)])
def test_near_misses(fn: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    report = kdacompile.explain(fn, options=EAGER)(*inputs())
    assert worst_error(report.result, fn(*inputs())) < 1e-5
    assert not report.matches


def test_a_gate_that_decays_its_own_write() -> None:
    torch._dynamo.reset()
    fn = cell(one_token_late)
    assert worst_error(kdacompile.explain(fn, options=EAGER)(*inputs()).result, fn(*inputs())) < 1e-5


@pytest.mark.parametrize(("place", "number"), [(2, -torch.inf), (0, -torch.inf), (3, -1e9), (4, 60.0), (0, -1e9)])
@pytest.mark.parametrize("gate", [3, 4])
def test_gates_far_out(gate: int, place: int, number: float) -> None:
    """Tokens that write nothing, forget all, or outweigh all others; rows that are finite stay so."""
    given = inputs()
    given[gate][..., place] = number
    torch._dynamo.reset()
    have = torch.compile(cell(running), backend="kda", options=EAGER)(*given)
    want = cell(running)(*given)
    finite = want.isfinite()
    assert worst_error(have[finite], want[finite]) < 1e-5


def test_several_lengths() -> None:
    torch._dynamo.reset()
    run = torch.compile(cell(differences), backend="kda", options=EAGER)
    for tokens in (7, 12, 19):
        assert worst_error(run(*inputs(tokens)), cell(differences)(*inputs(tokens))) < 1e-5


# -- token by token ----------------------------------------------------------------------------------------------------


def loop(start: float = 0.0, *, of_state: bool = False) -> Callable[..., Tensor]:
    """``of_state``: exponents depend on what the state holds."""

    def tokens(q: Tensor, k: Tensor, v: Tensor, f: Tensor, i: Tensor) -> Tensor:
        c, n = q.new_zeros(*q.shape[:2], KEYS, VALUES), q.new_zeros(*q.shape[:2], KEYS)
        m = q.new_full((*q.shape[:2], 1), start)
        rows: list[Tensor] = []
        for t in range(q.shape[2]):
            forget = F.logsigmoid(f[:, :, t, None]) + m
            write = i[:, :, t, None] + (n.sum(-1, keepdim=True) if of_state else 0.0)
            m = torch.maximum(forget, write)
            decay, share, key = (forget - m).exp(), (write - m).exp(), k[:, :, t] * KEYS**-0.5
            c = decay[..., None] * c + share[..., None] * key[..., None] * v[:, :, t, None]
            n = decay * n + share * key
            least = torch.maximum((n * q[:, :, t]).sum(-1, keepdim=True).abs(), (-m).exp())
            rows.append((q[:, :, t, None] @ c)[..., 0, :] / (least + 1e-6))
        return torch.stack(rows, 2)

    return tokens


@pytest.mark.parametrize("start", [0.0, -torch.inf])
@pytest.mark.parametrize("grad", [False, True])
def test_a_loop_with_the_largest_exponent_so_far_is_a_gated_recurrence(start: float, grad: bool) -> None:
    """As NX-AI's sequences have it: gates are made of maxima in a chain, and are pieces of no tensor."""
    own, theirs = (copies(x.requires_grad_(grad) for x in inputs()) for _ in range(2))
    torch._dynamo.reset()
    report = kdacompile.explain(loop(start), options=EAGER)(*own)
    expected = loop(start)(*theirs)
    assert [match.pattern for match in report.matches] == ["simple_gla"], str(report)
    assert worst_error(report.result, expected) <= 1e-5
    if grad:
        weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        ours, others = (
            torch.autograd.grad((x * weight).sum(), xs) for x, xs in ((report.result, own), (expected, theirs))
        )
        assert worst_error(ours, others) <= 1e-4


def test_the_largest_exponent_of_what_the_state_holds_is_left() -> None:
    given = inputs()
    torch._dynamo.reset()
    report = kdacompile.explain(loop(of_state=True), options=EAGER)(*given)
    assert not report.matches
    assert worst_error(report.result, loop(of_state=True)(*given)) == 0.0


def test_one_number_divides_a_row_of_one_head() -> None:
    """Heads one by one: what a token's row is divided by has no dimension (``torch.dot``)."""

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c, n = q.new_zeros(KEYS, VALUES), q.new_zeros(KEYS)
        rows: list[Tensor] = []
        for t in range(q.shape[0]):
            c, n = c + torch.outer(k[t], v[t]), n + k[t]
            rows.append((q[t] @ c) / torch.maximum(torch.dot(n, q[t]).abs(), v[t].sum().exp()))
        return torch.stack(rows)

    given = [x[0, 0] for x in inputs()[:3]]
    torch._dynamo.reset()
    report = kdacompile.explain(head, options=EAGER)(*given)
    assert "linear_attention" in [match.pattern for match in report.matches], str(report)
    assert worst_error(report.result, head(*given)) <= 1e-5
