"""Symbolic sizes: one compiled graph for many, matched where the match holds at all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from kdacompile.search import matching
from tests.backend.layers import (
    codes,
    compiled,
    delta_arguments,
    gated_delta_loop,
    gated_linear_parallel,
    gla_step,
    patterns,
    run_both,
    step_arguments,
)
from tests.compare import relative_error, tensors
from tests.spellings import REGISTRY

Function = Callable[..., Any]
SSD = REGISTRY["mamba2_ssd_minimal"]


def close(ours: Any, plain: Any) -> bool:
    pairs = zip(tensors(ours), tensors(plain), strict=True)
    return all(relative_error(x, y) < 1e-5 and x.dtype == y.dtype for x, y in pairs)


def at_each(
    fn: Function, calls: Sequence[Sequence[Tensor]], dims: dict[int, tuple[int, ...]] | None = None, **keywords: Any
) -> tuple[list[bool], Report]:
    """Whether each call agrees with eager, all on one compiled function; ``dims`` marks dimensions of arguments."""
    keywords = {"dynamic": None, **keywords}
    run = compiled(fn, **keywords)
    agreed: list[bool] = []
    with torch.no_grad(), collecting() as report:
        for arguments in calls:
            given = [x.clone() for x in arguments]
            for index, marked in (dims or {}).items():
                torch._dynamo.maybe_mark_dynamic(given[index], list(marked))
            agreed.append(close(run(*given), fn(*[x.clone() for x in arguments])))
    return agreed, report


def every(count: int, *dims: int) -> dict[int, tuple[int, ...]]:
    return dict.fromkeys(range(count), dims)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_the_batch_is_symbolic(inner: str) -> None:
    calls = [delta_arguments(batch=batch) for batch in (2, 3, 7)]
    agreed, report = at_each(gated_delta_loop, calls, every(5, 0), inner=inner)
    assert all(agreed)
    assert patterns(report) == ["gated_delta_rule"]  # one graph for all


def test_length_and_batch_of_a_closed_form_are_symbolic() -> None:
    calls = [delta_arguments(batch, length)[:4] for batch, length in ((2, 5), (3, 9), (4, 70))]
    agreed, report = at_each(gated_linear_parallel, calls, every(4, 0, 1))
    assert all(agreed)
    assert patterns(report) == ["simple_gla"]


def test_everything_is_symbolic() -> None:
    calls = [delta_arguments(length=length)[:4] for length in (5, 9)]
    agreed, report = at_each(gated_linear_parallel, calls, dynamic=True)
    assert all(agreed)
    assert patterns(report) == ["simple_gla"]


def test_a_step_with_symbolic_batch() -> None:
    calls = [[x.repeat_interleave(times, 0) for x in step_arguments()] for times in (1, 2, 4)]
    agreed, report = at_each(gla_step, calls, every(5, 0))
    assert all(agreed)
    assert patterns(report) == ["gla"]


def test_state_space_duality_with_symbolic_length() -> None:
    """Chunks by reshape: T is symbolic, and one graph serves every multiple of the chunk."""
    calls = [SSD.make_inputs(T=SSD.multiple * count) for count in (4, 2, 7)]
    names = {index: (1,) for index, x in enumerate(calls[0]) if x.dim() > 1}
    agreed, report = at_each(SSD.fn, calls, names)
    assert all(agreed)
    assert set(patterns(report)) == {"simple_gla"}


def test_retention_with_symbolic_length() -> None:
    spelling = REGISTRY["retention_parallel"]
    calls = [spelling.make_inputs(T=length) for length in (6, 11, 40)]
    names = {index: (0, 2 if spelling.layout == "bhtd" else 1) for index, x in enumerate(calls[0]) if x.dim() > 1}
    agreed, report = at_each(spelling.fn, calls, {index: dims[1:] for index, dims in names.items()})
    assert all(agreed)
    assert set(patterns(report)) == {"retention"}


def test_gradients_with_symbolic_sizes() -> None:
    run = compiled(gated_linear_parallel, "aot_eager", dynamic=True)
    with collecting() as report:
        for length in (5, 8):
            ours = [x.requires_grad_() for x in delta_arguments(length=length)[:4]]
            plain = [x.detach().clone().requires_grad_() for x in ours]
            have = torch.autograd.grad(run(*ours).square().sum(), ours)
            want = torch.autograd.grad(gated_linear_parallel(*plain).square().sum(), plain)
            assert all(relative_error(x, y) < 1e-5 for x, y in zip(have, want, strict=True))
    assert set(patterns(report)) == {"simple_gla"}


# -- what holds at one size only -----------------------------------------------------------------------------------


def scaled_by_length(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return gated_linear_parallel(q, k, v, g) * q.shape[1] ** -0.5


def query_scaled_by_length(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return gated_linear_parallel(q * (1.0 / q.shape[1]), k, v, g)


def scaled_by_batch(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return gated_linear_parallel(q * (q.shape[0] * 0.25), k, v, g)


def _windowed(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    place = torch.arange(q.shape[2])
    gap = place[:, None] - place[None, :]
    mask = ((gap >= 0) & (gap < width)).to(q.dtype)
    return ((q @ k.transpose(-1, -2) * mask) @ v).transpose(1, 2)


def window_of_20(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal and nothing else as long as T is at most 20."""
    return _windowed(q, k, v, 20)


def window_of_the_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _windowed(q, k, v, q.shape[1])


def triangle_of_the_first_20(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2)).tril()
    return torch.cat([scores[..., :20], scores[..., 20:] * 2], dim=-1).matmul(v).transpose(1, 2)


def decay_of_the_distance_over_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    place = torch.arange(q.shape[2])
    gap = (place[:, None] - place[None, :]).to(q.dtype)
    decay = torch.exp(-gap / q.shape[2]).tril()
    return ((q @ k.transpose(-1, -2) * decay) @ v).transpose(1, 2)


DECLINED = {
    scaled_by_length: 4,
    query_scaled_by_length: 4,
    scaled_by_batch: 4,
    window_of_20: 3,
    triangle_of_the_first_20: 3,
    decay_of_the_distance_over_length: 3,
}


@pytest.mark.parametrize("fn", DECLINED, ids=lambda fn: fn.__name__)
def test_what_depends_on_a_size_is_not_burned_in(fn: Function) -> None:
    """Equal to eager at every size: by declining, or by taking a part that does not depend on it."""
    count = DECLINED[fn]
    calls = [delta_arguments(batch, length)[:count] for batch, length in ((2, 5), (4, 12), (3, 30))]
    agreed, report = at_each(fn, calls, every(count, 0, 1))
    assert all(agreed)
    if not report.matches:
        assert codes(report) & {"dynamic", "proof", "operator"}
    with torch.no_grad(), collecting() as static:
        compiled(fn)(*calls[0])
    assert static.matches  # at sizes fixed for good it is linear attention


def test_a_reason_names_the_dimension_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "FIXED_GRAPHS", 0)
    _, report = at_each(window_of_20, [delta_arguments(length=12)[:3]], every(3, 1))
    (told,) = report.rejections
    assert told.code == "dynamic"
    assert re.search(r"with (.*, )?dimension 1 of [qkv] = \d+", told.reason), told.reason
    assert "dynamic=False" in told.reason


def test_a_loop_that_counts_one_argument_counts_them_all() -> None:
    """Dynamo fixes the length that it unrolls, that of q, and leaves those of k, v and gates open: they were other
    lengths to the match, four graphs were for their own sizes alone, batch included, and the fifth had no match.
    """
    run = compiled(gated_delta_loop, dynamic=None)
    sizes = [(2, 5), (2, 7), (3, 8), (2, 4), (4, 6), (3, 9), (5, 9)]
    with collecting() as report:
        for batch, length in sizes:
            arguments = delta_arguments(batch, length)
            assert close(run(*arguments), gated_delta_loop(*arguments)), (batch, length)
    assert patterns(report) == ["gated_delta_rule"] * 6, str(report)
    assert report.graph_count == 6  # the last batch is served by the graph before
    assert not any("alone" in match.checked for match in report.matches)


def gates_made_in_the_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * torch.exp(-torch.nn.functional.softplus(g[:, t]))[..., None, None]
        told = (k[:, t, :, :, None] * state).sum(-2)
        new = torch.sigmoid(beta[:, t])[..., None] * (v[:, t] - told)
        state = state + k[:, t, :, :, None] * new[:, :, None]
        rows.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(rows, 1)


def test_what_a_loop_makes_of_every_token_is_made_of_a_counted_length_too() -> None:
    """Activations are taken in front of a loop that reads all tokens of a length that is open, and then guarded. From
    the second length on such a loop had no match. Where some tokens are left over, the function is another.
    """
    run = compiled(gates_made_in_the_loop, dynamic=None)
    with collecting() as report:
        for batch, length in [(2, 5), (2, 7), (3, 6)]:
            arguments = delta_arguments(batch, length)
            assert close(run(*arguments), gates_made_in_the_loop(*arguments)), (batch, length)
    assert patterns(report) == ["gated_delta_rule"] * 3, str(report)
    q, *others = delta_arguments(3, 6)
    for more in (9, 6, 7):
        arguments = (q, *delta_arguments(3, more)[1:])
        assert close(run(*arguments), gates_made_in_the_loop(*arguments)), more
    q, *others = (x.requires_grad_() for x in delta_arguments(2, 6))
    found = torch.autograd.grad(run(q, *others).sum(), [q, *others])
    wanted = torch.autograd.grad(gates_made_in_the_loop(q, *others).sum(), [q, *others])
    assert all(close(x, y) for x, y in zip(found, wanted, strict=True))


def test_the_reason_is_what_stands_in_the_way_at_fixed_sizes() -> None:
    """One over the root of a width is known at that width alone. What was told was that, not the view of a buffer."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        made = q.new_zeros(v.shape)
        out = made.view(v.shape)
        for t in range(q.shape[1]):
            state = state + k[:, t, :, :, None] * v[:, t, :, None]
            out[:, t] = (q[:, t, :, :, None] * state).sum(-2) * (1 / q.shape[3] ** 0.5)
        return out + made.sin()

    q, k, v, _, _ = delta_arguments()
    ours, expected, report = run_both(fn, (q, k, v), dynamic=True)
    assert torch.equal(ours, expected)
    assert [told.code for told in report.rejections] == ["alias"], str(report)


def test_a_window_as_long_as_the_sequence_is_no_window() -> None:
    calls = [delta_arguments(length=length)[:3] for length in (5, 12, 30)]
    agreed, report = at_each(window_of_the_length, calls, every(3, 1))
    assert all(agreed)
    assert set(patterns(report)) == {"linear_attention"}


def test_two_sizes_are_tied_by_a_guard() -> None:
    """Keys and values of half the length of a packed tensor: the other instances must respect it."""

    def fn(q: Tensor, packed: Tensor) -> Tensor:
        k, v = packed.chunk(2, dim=1)
        torch._check(packed.shape[1] == 2 * q.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return ((q @ k.transpose(-1, -2)).tril() @ v).transpose(1, 2)

    calls = [(torch.randn(2, length, 3, 4), torch.randn(2, 2 * length, 3, 4)) for length in (5, 6, 11)]
    agreed, _ = at_each(fn, calls, {0: (1,), 1: (1,)})
    assert all(agreed)


def test_a_size_known_only_at_run_time() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        rows = keep.nonzero().squeeze(-1)
        q, k, v = (x[:, rows].transpose(1, 2) for x in (q, k, v))
        return ((q @ k.transpose(-1, -2)).tril() @ v).transpose(1, 2)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        arguments = (*delta_arguments()[:3], torch.tensor([True, False, True, True, False]))
        agreed, report = at_each(fn, [arguments])
    assert all(agreed)
    assert not report.matches


def test_chunk_loops_with_symbolic_length_within_one_count() -> None:
    spelling = REGISTRY["gdn_solve_triangular"]
    calls = [spelling.make_inputs(T=length) for length in (20, 22, 29)]
    names = {index: (1,) for index, name in enumerate(spelling.takes) if name != "state"}
    agreed, report = at_each(spelling.fn, calls, names)
    assert all(agreed)
    assert set(patterns(report)) == {"gated_delta_rule"}
