"""Activations written inside the loop: every token's, or every chunk's, is taken out in front of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kdacompile
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.canonical import hoist, rules
from kdacompile.report.collect import collecting
from tests.compare import copies, worst_error

BATCH, LENGTH, HEADS, SIZE, VALUES = 2, 4, 3, 6, 5


def tokens(count: int, *rest: int) -> list[Tensor]:
    return [torch.randn(BATCH, LENGTH, HEADS, *rest) for _ in range(count)]


def read(state: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", state, key)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        key = F.normalize(k[:, t], dim=-1)
        s = s * torch.exp(-F.softplus(gate[:, t]))[..., None, None]
        fresh = torch.sigmoid(logit[:, t])[..., None] * (v[:, t] - read(s, key))
        s = s + torch.einsum("bhk,bhv->bhkv", key, fresh)
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, dim=1)


def gated_in_chunks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    q, k, v, gate = (x.transpose(1, 2) for x in (q, k, v, gate))
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for i in range(0, q.shape[2], 2):
        total = (F.logsigmoid(gate[:, :, i : i + 2]) / 16).cumsum(-1)[..., None]
        left, right = q[:, :, i : i + 2] * total.exp(), k[:, :, i : i + 2] * (-total).exp()
        rows.append(left @ s + (left @ right.mT).tril() @ v[:, :, i : i + 2])
        s = total[:, :, -1:].exp() * (s + right.mT @ v[:, :, i : i + 2])
    return torch.cat(rows, dim=2)


def left_over(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """What one gate leaves over, features from ``elu + 1`` and keys over their norm: calls that follow activations."""
    forget = torch.sigmoid(gate)
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        key = k[:, t] / k[:, t].norm(dim=-1, keepdim=True)
        s = (1 - forget[:, t])[..., None, None] * s
        s = s + torch.einsum("bhk,bhv->bhkv", key, v[:, t] - read(s, key))
        rows.append(read(s, F.elu(q[:, t]) + 1))
    return torch.stack(rows, dim=1)


def two_exponentials(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """mLSTM's memory: exponential gates to forget and to write."""
    gate = F.logsigmoid(gate)
    s = q.new_zeros(BATCH, HEADS, VALUES, SIZE)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        write = v[:, t, :, :, None] * k[:, t, :, None, :]
        s = gate[:, t].exp()[..., None, None] * s + logit[:, t].exp()[..., None, None] * write
        rows.append((s @ q[:, t, :, :, None]).squeeze(-1))
    return torch.stack(rows, dim=1)


def keys_gated_in_chunks(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """A gate per channel of the keys, applied token by token, in chunks of three tokens and one."""
    rows, s, write, keep = [], q.new_zeros(BATCH, HEADS, SIZE, VALUES), torch.sigmoid(q), torch.sigmoid(gate)
    for first in range(0, LENGTH, 3):
        q_c, k_c, v_c, write_c, keep_c = (x[:, first : first + 3] for x in (q, k, v, write, keep))
        for t in range(q_c.shape[1]):
            s = s * keep_c[:, t, :, None, None]
            s = s + torch.einsum("bhk,bhv->bhkv", write_c[:, t] * k_c[:, t], v_c[:, t])
            rows.append(read(s, q_c[:, t]))
    return torch.stack(rows, dim=1)


def keys_gated_in_the_last_chunk(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Tokens of the first chunk are written as they are."""
    rows, s, write, keep = [], q.new_zeros(BATCH, HEADS, SIZE, VALUES), torch.sigmoid(q), torch.sigmoid(gate)
    for first in range(0, LENGTH, 3):
        q_c, k_c, v_c, write_c, keep_c = (x[:, first : first + 3] for x in (q, k, v, write, keep))
        for t in range(q_c.shape[1]):
            key = write_c[:, t] * k_c[:, t] if first else k_c[:, t]
            s = s * keep_c[:, t, :, None, None] + torch.einsum("bhk,bhv->bhkv", key, v_c[:, t])
            rows.append(read(s, q_c[:, t]))
    return torch.stack(rows, dim=1)


def one_head_after_the_other(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """Norms of vectors, as a number each; the heads of one request in a loop of their own, their keys shared."""
    q, k, v, gate, logit = (x[:1] for x in (q[:, :, :1], k[:, :, :1], v, gate.sigmoid(), logit.sigmoid()))
    out = torch.zeros_like(v)
    for head in range(v.shape[2]):
        s = q.new_zeros(SIZE, VALUES)
        for t in range(q.shape[1]):
            query, key = (x / torch.sqrt((x * x).sum() + 1e-6) for x in (q[0, t, 0], k[0, t, 0]))
            s = s * gate[0, t, head]
            fresh = logit[0, t, head] * (v[0, t, head] - (s * key[:, None]).sum(0))
            s = s + key[:, None] * fresh
            out[0, t, head] = (s * query[:, None]).sum(0)
    return out


IN_LOOP = [
    (one_head_after_the_other, "gated_delta_rule"),
    (keys_gated_in_chunks, "simple_gla"),
    (gated_delta, "gated_delta_rule"),
    (gated_in_chunks, "simple_gla"),
    (left_over, "gated_delta_rule"),
    (two_exponentials, "simple_gla"),
]


def overwritten_between(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    """The logits of later tokens change while the loop runs: taken out, they would be the old ones."""
    logit = logit.clone()
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], torch.sigmoid(logit[:, t])[..., None] * v[:, t])
        logit.add_(1.0)
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, dim=1)


def another_at_one_token(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        beta = torch.sigmoid(logit[:, t]) if t != 2 else torch.tanh(logit[:, t])
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[..., None] * (v[:, t] - read(s, k[:, t])))
        rows.append(read(s, q[:, t]))
    return torch.stack(rows, dim=1)


def explained(fn: Callable[..., Any], grad: bool = False) -> tuple[Any, Any, kdacompile.Report]:
    """(results and gradients of the backend, those of eager, the report)."""
    torch.manual_seed(0)
    inputs = [*tokens(2, SIZE), *tokens(1, VALUES), *tokens(2)]
    own, theirs = (copies(x.requires_grad_(grad) for x in inputs) for _ in range(2))
    torch._dynamo.reset()
    report = kdacompile.explain(fn, options={"kda.lift": False})(*own)
    ours, expected = report.result, fn(*theirs)
    if not grad:
        return ours, expected, report
    weight = torch.randn(ours.shape)
    left, right = (
        torch.autograd.grad((x * weight).sum(), given, allow_unused=True, materialize_grads=True)
        for x, given in ((ours, own), (expected, theirs))
    )
    return (ours, left), (expected, right), report


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("fn", "pattern"), IN_LOOP)
def test_activations_in_the_loop(fn: Callable[..., Any], pattern: str, grad: bool) -> None:
    ours, expected, report = explained(fn, grad)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == [pattern], str(report)


@pytest.mark.parametrize("fn", [overwritten_between, another_at_one_token, keys_gated_in_the_last_chunk])
def test_what_differs_between_tokens_stays(fn: Callable[..., Any]) -> None:
    ours, expected, report = explained(fn)
    assert worst_error(ours, expected) <= 1e-5
    assert report.matches or report.rejections


def test_without_a_new_match_the_graph_is_as_captured() -> None:
    """A saturated state is no recurrence: what was taken out is put back, call by call."""

    def saturated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
        s = q.new_zeros(BATCH, HEADS, SIZE, VALUES)
        rows: list[Tensor] = []
        for t in range(q.shape[1]):
            s = torch.tanh(s + torch.einsum("bhk,bhv->bhkv", k[:, t], logit[:, t].sigmoid()[..., None] * v[:, t]))
            rows.append(read(s, q[:, t]))
        return torch.stack(rows, dim=1)

    ours, expected, report = explained(saturated)
    assert torch.equal(ours, expected)
    assert not report.matches
    assert report.rejections


def wrong_dimension(op: Op, place: int, rank: int) -> list[rules.Step]:
    """A normalisation along heads instead of channels: the same sizes, other numbers."""
    return [rules.Step(op.target, (*op.args[:place], [-2], *op.args[place + 1 :]), op.kwargs)]


def test_a_wrong_hoist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the proof of the hoist sees it: past it, the region after it is a recurrence, and the results are wrong."""
    monkeypatch.setattr(rules, "_along", wrong_dimension)
    ours, expected, report = explained(gated_delta)
    assert worst_error(ours, expected) <= 1e-5
    assert not report.matches
    assert report.rejections
    monkeypatch.setattr(hoist, "agrees", lambda edit, pairs, inside: True)  # type: ignore[reportUnknownLambdaType]
    ours, expected, report = explained(gated_delta)
    assert [match.pattern for match in report.matches] == ["gated_delta_rule"]
    assert worst_error(ours, expected) > 1e-2


def test_results_stay_tensors_of_their_own() -> None:
    """What a loop returns of its activations is no view of the whole, even where it lies like one."""

    def returning(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> tuple[Tensor, ...]:
        first = logit.transpose(0, 1).contiguous()
        sums = torch.stack([torch.sigmoid(x).sum() for x in first])
        twice = [torch.sigmoid(first[0])[..., None] for _ in range(2)]
        return gated_delta(q, k, v, gate, logit), sums, *twice

    ours, expected, _ = explained(returning)
    assert worst_error(ours, expected) <= 1e-5
    assert [x.stride() for x in ours] == [x.stride() for x in expected]
    assert ours[2].untyped_storage().data_ptr() != ours[3].untyped_storage().data_ptr()


def test_readers_that_ask_for_a_layout() -> None:
    """A piece of the whole could not be viewed as the loop views its own tensor: that reader keeps the loop's."""

    def flat(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
        rows = [torch.sigmoid(logit[:, t]).view_as(q[0, 0].new_zeros(BATCH * HEADS)) for t in range(LENGTH)]
        return gated_delta(q, k, v, gate, logit), torch.stack(rows).sum(0)

    ours, expected, report = explained(flat)
    assert worst_error(ours, expected) <= 1e-5
    assert [match.pattern for match in report.matches] == ["gated_delta_rule"], str(report)


def any_batch(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, logit: Tensor) -> Tensor:
    s = q.new_zeros(q.shape[0], HEADS, SIZE, VALUES)
    rows: list[Tensor] = []
    for t in range(LENGTH):
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], torch.sigmoid(logit[:, t])[..., None] * v[:, t])
        rows.append(F.layer_norm(read(s, q[:, t]), (VALUES,)))
    return torch.stack(rows, dim=1)


def test_a_symbolic_batch() -> None:
    """Calls in front of the loop and behind it are made at every size."""
    torch.manual_seed(0)
    inputs = [*tokens(2, SIZE), *tokens(1, VALUES), *tokens(2)]
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.reset()
    run = torch.compile(any_batch, backend="kda", fullgraph=True, options={"kda.inner": "eager", "kda.lift": False})
    with collecting() as report:
        for batch in (BATCH, 5):
            given = [x[:1].repeat(batch, *[1] * (x.dim() - 1)) for x in inputs] if batch != BATCH else inputs
            assert worst_error(run(*given), any_batch(*given)) <= 1e-5
    assert [match.pattern for match in report.matches] == ["linear_attention"] * len(report.graphs), str(report)
    assert len(report.graphs) <= 2


def test_nothing_random_moves() -> None:
    """Tokens that draw numbers of their own would draw others together."""
    read = Value(1, (2, 3), torch.float32)

    def made(target: Any, *args: Any) -> Op:
        op = Op(target, (read, *args), {}, [read])
        op.outs.append(Value(2, (2, 3), torch.float32, op))
        return op

    aten = torch.ops.aten
    assert rules.batched(made(aten.sigmoid.default), [read]) is not None
    for random in (
        made(aten.bernoulli.default),
        made(aten.native_dropout.default, 0.5, True),
        made(aten.rand_like.default),
    ):
        assert rules.batched(random, [read]) is None
