"""What is computed twice, what is read where it was stored, and loops over requests and heads as well as tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kdacompile
from tests.compare import copies, worst_error

EAGER: dict[str, Any] = {"kda.inner": "eager", "kda.lift": False}
BATCH, LENGTH, HEADS, SIZE, VALUES = 2, 5, 3, 6, 4


def rwkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """RWKV-7's step: the state is decayed, ``(S a) b^T`` and ``v k^T`` are added."""
    decay = torch.exp(-torch.exp(w))
    state = r.new_zeros(BATCH, HEADS, VALUES, SIZE)
    outs: list[Tensor] = []
    for t in range(r.shape[1]):
        state = state * decay[:, t, :, None] + state @ a[:, t, :, :, None] @ b[:, t, :, None]
        state = state + v[:, t, :, :, None] @ k[:, t, :, None]
        outs.append((state @ r[:, t, :, :, None]).squeeze(-1))
    return torch.stack(outs, 1)


def tied(r: Tensor, w: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """One key to erase and to write: KDA. The decay is computed here and in the recurrence."""
    key, decay = F.normalize(k, dim=-1), torch.exp(-torch.exp(w))
    write = key * beta[..., None]
    return rwkv7(r, w, write, v, -(key * decay), write)


def not_tied(r: Tensor, w: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Another rate to erase with than to write: no member of the family."""
    key, decay = F.normalize(k, dim=-1), torch.exp(-torch.exp(w))
    return rwkv7(r, w, key, v, -(key * decay), key * beta[..., None])


def other_decay(r: Tensor, w: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """What is erased was decayed otherwise than the state."""
    key, decay = F.normalize(k, dim=-1), torch.exp(-torch.exp(w + 0.5))
    write = key * beta[..., None]
    return rwkv7(r, w, write, v, -(key * decay), write)


def drawn(grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    wide = (BATCH, LENGTH, HEADS)
    inputs = [torch.randn(*wide, n) for n in (SIZE, SIZE, SIZE, VALUES)] + [torch.rand(*wide)]
    return [x.requires_grad_(grad) for x in inputs]


def explained(fn: Callable[..., Any], inputs: list[Tensor]) -> tuple[kdacompile.Report, float]:
    """The report, and the error of results and of arguments that are written to."""
    torch._dynamo.reset()
    own, theirs = copies(inputs), copies(inputs)
    report = kdacompile.explain(fn, options=EAGER)(*own)
    return report, worst_error((report.result, own), (fn(*theirs), theirs))


def test_a_decay_computed_twice() -> None:
    report, error = explained(tied, drawn())
    assert [match.pattern for match in report.matches] == ["kda"], str(report)
    assert error < 1e-5


def test_gradients_of_what_is_shared() -> None:
    torch._dynamo.reset()
    own, theirs = drawn(grad=True), drawn(grad=True)
    report = kdacompile.explain(tied, options=EAGER)(*own)
    weight = torch.randn(report.result.shape)
    found, expected = (
        torch.autograd.grad((x * weight).sum(), given) for x, given in ((report.result, own), (tied(*theirs), theirs))
    )
    assert report.matches and worst_error(found, expected) < 1e-4, str(report)


@pytest.mark.parametrize("fn", [not_tied, other_decay])
def test_other_transitions_are_left(fn: Callable[..., Any]) -> None:
    report, error = explained(fn, drawn())
    assert not report.matches and error < 1e-6, str(report)


# -- one request, its heads in a loop ---------------------------------------------------------------------------------


def decode(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A step of KDA, head by head; queries and keys have one head."""
    new, o = state.clone(), torch.zeros(1, v.shape[1], VALUES)
    for h in range(v.shape[1]):
        gate = torch.exp(-rate[h].exp() * F.softplus(a[0, h, :]))
        query, key = F.normalize(q[0, 0, :], dim=0) * SIZE**-0.5, F.normalize(k[0, 0, :], dim=0)
        write = torch.sigmoid(b[0, h]) * (v[0, h, :] - state[0, h] @ (gate * key))
        new[0, h] = gate[None, :] * state[0, h] + write[:, None] * key[None, :]
        o[0, h, :] = new[0, h] @ query
    return o, new


def step_arguments() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, 1, SIZE), (1, 1, SIZE), (1, 2, VALUES), (1, 2, SIZE), (1, 2), (2,), (1, 2, VALUES, SIZE))
    return [torch.randn(*shape) for shape in shapes]


def test_heads_in_a_loop() -> None:
    report, error = explained(decode, step_arguments())
    assert {match.pattern for match in report.matches} == {"kda"}, str(report)
    assert error < 1e-5
