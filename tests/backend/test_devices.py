"""Tensors that go from one device to another inside a graph, and casts that change nothing: what shares memory there.

The other device is "meta", which every machine has; the op has results there, without numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdacompile.report.collect import collecting
from tests.backend.layers import compiled, delta_arguments, gated_delta_loop, patterns, run_both, train_both
from tests.compare import copies, worst_error

Edit = Callable[[Tensor, Tensor], Tensor]


def moved(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    out = gated_delta_loop(*inputs)
    return out + 1, out.to("meta")


def test_a_result_that_goes_to_another_device_goes_there() -> None:
    """On stand-ins both were one tensor, and the move was taken out with the region."""
    with torch.no_grad(), collecting() as report:
        home, away = compiled(moved)(*delta_arguments())
    assert patterns(report) == ["gated_delta_rule"], str(report)
    assert (home.device.type, away.device.type) == ("cpu", "meta")


def brought(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The state comes from where it is kept, and is overwritten where the tokens are."""
    there = state.to(q.device)
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        there.mul_(g[:, t, :, None, None].exp())
        new = (v[:, t] - (k[:, t, :, :, None] * there).sum(-2)) * beta[:, t, :, None]
        there.add_(k[:, t, :, :, None] * new[:, :, None])
        out.append((q[:, t, :, :, None] * there).sum(-2))
    return torch.stack(out, dim=1), state + 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_that_is_kept_elsewhere(device: str) -> None:
    """At home nothing is written; the op was given the state from there, which was an internal error."""
    inputs = delta_arguments()
    batch, _, heads, width = inputs[0].shape
    kept = torch.randn(batch, heads, width, inputs[2].shape[-1])
    own, theirs = copies((kept, *(x.to(device) for x in inputs))), copies((kept, *(x.to(device) for x in inputs)))
    with torch.no_grad(), collecting() as report:
        ours, expected = compiled(brought)(*own), brought(*theirs)
    assert patterns(report) == ["gated_delta_rule"], str(report)
    assert [x.device for x in ours] == [x.device for x in expected]
    assert torch.equal(own[0], kept) == (device != "cpu")
    assert worst_error((ours[-1], own[0]), (expected[-1], theirs[0])) <= 1e-5


def into(buffer: Edit) -> Callable[..., Tensor]:
    """Outputs go into a buffer, token by token."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        batch, length, heads, width = q.shape
        state = torch.zeros(batch, heads, width, v.shape[-1]).to(q.device)
        out = buffer(torch.zeros(batch, length, heads, v.shape[-1]), v)
        for t in range(length):
            state = state * g[:, t, :, None, None].exp()
            new = (v[:, t] - (k[:, t, :, :, None] * state).sum(-2)) * beta[:, t, :, None]
            state = state + k[:, t, :, :, None] * new[:, :, None]
            out[:, t] = (q[:, t, :, :, None] * state).sum(-2)
        return out

    return run


BUFFERS: dict[str, Edit] = {
    "as another": lambda made, like: made.to(like),
    "to a device": lambda made, like: made.to(like.device),
    "to a dtype": lambda made, like: made.to(like.dtype),
    "type_as": lambda made, like: made.type_as(like),
    "float": lambda made, like: made.float(),
    "contiguous": lambda made, like: made.contiguous(),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_under_two_names(name: str) -> None:
    """A cast that changes nothing yields the buffer itself. Returned, it was a view that is read outside the region."""
    result, gradient, report = train_both(into(BUFFERS[name]), delta_arguments())
    assert max(result, gradient) <= 1e-5
    assert patterns(report) == ["gated_delta_rule"], str(report)


def test_a_buffer_that_is_made_elsewhere() -> None:
    with torch.no_grad():
        ours, expected, report = run_both(into(BUFFERS["to a device"]), [x.to("meta") for x in delta_arguments()])
    assert patterns(report) == ["gated_delta_rule"], str(report)
    assert (ours.device, ours.shape) == (expected.device, expected.shape)


def test_both_names_of_a_buffer_are_returned() -> None:
    """They are one tensor in eager mode."""

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        made: list[Tensor] = []

        def buffer(empty: Tensor, like: Tensor) -> Tensor:
            made.append(empty)
            return empty.to(like)

        out = into(buffer)(*inputs)
        return out, made[0]

    with torch.no_grad():
        ours, expected, _ = run_both(run, delta_arguments())
    assert worst_error(ours, expected) <= 1e-5
    assert ours[0].data_ptr() == ours[1].data_ptr()
