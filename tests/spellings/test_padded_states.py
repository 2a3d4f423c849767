"""Loops that keep their state where a token is padding are one recurrence; what only looks so is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdacompile.explainer import explain
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.compare import relative_error, worst_error

B, T, H, K, V = 2, 9, 3, 4, 5
BOUND = 1e-5

Program = Callable[..., tuple[Tensor, Tensor]]
Keep = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""The state of a token, given the next one, the one before, something a token and which token it is."""
Step = Callable[..., Tensor]
"""The next state of a state, k, v, the gate and the write gate of a token."""


def row(x: Tensor, t: int) -> Tensor:
    return x[:, t, None, None, None]


def summed(state: Tensor, k: Tensor, v: Tensor, decay: Tensor | float, beta: Tensor, delta: bool) -> Tensor:
    state = state * decay
    write = v - (k[..., None] * state).sum(-2) if delta else v
    return state + k[..., None] * (beta[..., None] * write)[..., None, :]


def by_einsum(state: Tensor, k: Tensor, v: Tensor, decay: Tensor | float, beta: Tensor, delta: bool) -> Tensor:
    state = decay * state
    write = (v - torch.einsum("bhk,bhkv->bhv", k, state) if delta else v) * beta[..., None]
    return state + torch.einsum("bhk,bhv->bhkv", k, write)


def by_products(state: Tensor, k: Tensor, v: Tensor, decay: Tensor | float, beta: Tensor, delta: bool) -> Tensor:
    key, value = k.unsqueeze(-1), v.unsqueeze(-2)
    state = state * decay
    if delta:
        value = value - key.transpose(-1, -2) @ state
    return state + (key * beta[..., None, None]) @ value


def subtracted(state: Tensor, k: Tensor, v: Tensor, decay: Tensor | float, beta: Tensor, delta: bool) -> Tensor:
    state = state * decay
    kb = k * beta[..., None]
    state = state - kb[..., None] * (k[..., None] * state).sum(-2, keepdim=True) if delta else state
    return state + kb[..., None] * v[..., None, :]


STEPS: dict[str, Step] = {
    "summed": summed,
    "einsum": by_einsum,
    "products": by_products,
    "subtracted": subtracted,
}

LOOPS = [
    ("kda", "channel", True),
    ("gated_delta_rule", "head", True),
    ("delta_rule", "", True),
    ("gla", "channel", False),
    ("simple_gla", "head", False),
    ("linear_attention", "", False),
]
EACH = [(gate, delta) for _, gate, delta in LOOPS]


def loop(kind: str, delta: bool, keep: Keep, step: Step = summed, read: str = "kept") -> Program:
    """``read``: which state a token reads, the one "kept", "stepped" or the one "before" it."""

    def run(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            before = state
            decay = g[:, t].exp()[(..., *[None] * (4 - g[:, t].dim()))] if kind else 1.0
            stepped = step(state, k[:, t], v[:, t], decay, beta[:, t], delta)
            state = keep(stepped, state, x, t)
            taken = {"kept": state, "stepped": stepped, "before": before}[read]
            out.append((q[:, t, :, :, None] * taken).sum(-2))
        return torch.stack(out, 1), state

    return run


def padding() -> Tensor:
    """Where a token is none: in front, behind, and one in between."""
    found = torch.ones(B, T, dtype=torch.bool)
    found[0, :3] = found[1, -2:] = found[1, 4] = False
    return found


def arguments(kind: str, x: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rows = (*x.shape, H)
    q, k, v = torch.randn(*rows, K), torch.randn(*rows, K), torch.randn(*rows, V)
    g = -torch.rand(*rows, K) if kind == "channel" else -torch.rand(rows)
    state = torch.randn(len(x), H, K, V)
    drawn = [q, torch.nn.functional.normalize(k, dim=-1), v, g, torch.rand(rows), state]
    return [*(each.to(dtype) for each in drawn), x]


def explained(fn: Program, args: list[Tensor]) -> Report:
    torch._dynamo.reset()
    return explain(fn, options={"kda.lift": False})(*args)


def patterns(report: Report) -> list[str]:
    return [match.pattern for match in report.matches if match.mode == "sequence"]


KEPT: dict[str, Keep] = {
    "where": lambda new, old, x, t: torch.where(row(x, t), new, old),
    "viewed": lambda new, old, x, t: torch.where(x[:, t].view(-1, 1, 1, 1), new, old),
    "the other way round": lambda new, old, x, t: torch.where(~row(x, t), old, new),
    "inverted": lambda new, old, x, t: torch.where(row(~x, t).logical_not(), new, old),
    "a mask of numbers": lambda new, old, x, t: torch.where(row(x.long(), t) > 0, new, old),
    "weighed": lambda new, old, x, t: row(x.to(new.dtype), t) * new + (1 - row(x.to(new.dtype), t)) * old,
    "weighed by both": lambda new, old, x, t: old * (~row(x, t)).to(new.dtype) + new * row(x, t).to(new.dtype),
    "of some heads": lambda new, old, x, t: torch.where(row(x, t) | (torch.arange(H) == 1)[:, None, None], new, old),
    "as padding says": lambda new, old, x, t: torch.where(row(x == 0, t), old, new),
    "moved": lambda new, old, x, t: old + row(x, t).to(new.dtype) * (new - old),
    "moved by a boolean": lambda new, old, x, t: (new - old) * row(x, t) + old,
    "moved back": lambda new, old, x, t: new - (~row(x, t)).type_as(new) * (new - old),
    "lerp": lambda new, old, x, t: torch.lerp(old, new, row(x, t).to(new.dtype)),
    "lerp back": lambda new, old, x, t: new.lerp(old, 1 - row(x, t).to(new)),
    "lerp by one or zero": lambda new, old, x, t: torch.lerp(old, new, torch.where(row(x, t), 1.0, 0.0).to(new.dtype)),
    "addcmul": lambda new, old, x, t: torch.addcmul(old, row(x, t).to(new.dtype), new - old),
    "booleans": lambda new, old, x, t: row(x, t) * new + ~row(x, t) * old,
    "filled": lambda new, old, x, t: new * row(x, t) + old.masked_fill(row(x, t), 0.0),
}


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("name", KEPT)
def test_kept(pattern: str, kind: str, delta: bool, name: str) -> None:
    fn, args = loop(kind, delta, KEPT[name]), arguments(kind, padding())
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("step", STEPS)
def test_steps(pattern: str, kind: str, delta: bool, step: str) -> None:
    fn, args = loop(kind, delta, KEPT["where"], STEPS[step]), arguments(kind, padding())
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


def of_one_projection(fn: Program, mixed: bool = False) -> Program:
    """Queries, keys, values and gates are columns of one tensor; ``mixed``: keys are of the token before."""

    def run(projected: Tensor, beta: Tensor, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g = (each.view(*x.shape, H, K) for each in projected.chunk(4, dim=-1))
        k = torch.nn.functional.normalize(k.roll(1, 1) if mixed else k, dim=-1)
        return fn(q, k, v, -torch.nn.functional.softplus(g), beta.sigmoid(), state, x)

    return run


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("pattern", "kind", "delta"), [LOOPS[0], LOOPS[3]])
def test_columns_of_one_projection(pattern: str, kind: str, delta: bool, mixed: bool) -> None:
    """Columns are no turns of a loop; with gradients."""
    fn = of_one_projection(loop(kind, delta, KEPT["where"]), mixed)
    args = [torch.randn(B, T, 4 * H * K), torch.randn(B, T, H), torch.randn(B, H, K, K)]
    own, theirs = ([each.clone().requires_grad_() for each in args] for _ in range(2))
    report = explained(fn, [*own, padding()])
    want = fn(*theirs, padding())
    assert patterns(report) == [pattern], str(report)
    assert worst_error(report.result, want) <= BOUND
    totals = (torch.stack([each.square().sum() for each in found]).sum() for found in (report.result, want))
    gradients = (torch.autograd.grad(total, leaves) for total, leaves in zip(totals, (own, theirs), strict=True))
    assert all(relative_error(have, wanted) <= 1e-4 for have, wanted in zip(*gradients, strict=True))


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("drawn", [torch.zeros(B, T, dtype=torch.bool), torch.ones(B, T, dtype=torch.bool)])
def test_all_is_padding_or_nothing_is(pattern: str, kind: str, delta: bool, drawn: Tensor) -> None:
    fn, args = loop(kind, delta, KEPT["where"]), arguments(kind, drawn)
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("step", ["einsum", "subtracted"])
def test_padding_may_hold_anything(pattern: str, kind: str, delta: bool, step: str) -> None:
    """No number of a padded token enters the state; what its own query is shows in its own output."""
    for places in ([0], [1, 2, 3, 4]):
        fn, args = loop(kind, delta, KEPT["where"], STEPS[step]), arguments(kind, padding())
        for place in places:
            args[place][~args[6]] = torch.nan
        report = explained(fn, args)
        assert patterns(report) == [pattern], str(report)
        want, have = fn(*args), report.result
        assert want[1].isfinite().all()
        for one, other in zip(have, want, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            assert worst_error(one.nan_to_num(), other.nan_to_num()) <= BOUND


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
@pytest.mark.parametrize("name", ["where", "weighed", "moved", "lerp", "filled"])
def test_gradients(pattern: str, kind: str, delta: bool, name: str) -> None:
    fn = loop(kind, delta, KEPT[name])
    args = [each.requires_grad_(each.is_floating_point()) for each in arguments(kind, padding())]
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    found: list[tuple[Tensor, ...]] = []
    for o, state in (report.result, fn(*args)):
        total = (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() + state.square().sum()
        leaves = [each for each in args if each.requires_grad]
        found.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    for have, want in zip(*found, strict=True):
        assert relative_error(have, want) <= 1e-4


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS)
def test_in_bfloat16(pattern: str, kind: str, delta: bool) -> None:
    fn, args = loop(kind, delta, KEPT["where"]), arguments(kind, padding(), dtype=torch.bfloat16)
    report = explained(fn, args)
    assert patterns(report) == [pattern], str(report)
    want = fn(*[each.double() if each.is_floating_point() else each for each in args])
    assert worst_error(report.result, want) <= worst_error(fn(*args), want) + 1e-3


def test_more_than_a_chunk() -> None:
    fn, args = loop("channel", True, KEPT["where"]), arguments("channel", torch.rand(B, 70) < 0.7)
    report = explained(fn, args)
    assert patterns(report) == ["kda"], str(report)
    assert worst_error(report.result, fn(*args)) <= BOUND


@pytest.mark.parametrize(("pattern", "kind", "delta"), LOOPS[:4])
@pytest.mark.parametrize("step", ["summed", "products"])
def test_open_sizes(pattern: str, kind: str, delta: bool, step: str) -> None:
    """One graph for batches of any size."""
    fn = loop(kind, delta, KEPT["where"], STEPS[step])
    torch._dynamo.reset()
    run = torch.compile(fn, backend="kda", options={"kda.lift": False, "kda.cost_model": False})
    with collecting() as report:
        for batch in (2, 3, 5):
            args = arguments(kind, torch.rand(batch, T) < 0.7)
            assert worst_error(run(*args), fn(*args)) <= BOUND
    assert patterns(report) == [pattern] * 2, str(report)


# -- what only looks so ------------------------------------------------------------------------------------------------

LEFT: dict[str, Keep] = {
    "nearly": lambda new, old, x, t: torch.where(row(x, t), new, old * 0.999),
    "half of the keys": lambda new, old, x, t: torch.where(row(x, t) & (torch.arange(K) < 2)[:, None], new, old),
    "half of the values": lambda new, old, x, t: torch.where(row(x, t) & (torch.arange(V) < 2), new, old),
    "as the state says": lambda new, old, x, t: torch.where(new.mean((1, 2, 3), keepdim=True) > 0, new, old),
    "every number by itself": lambda new, old, x, t: torch.where(row(x, t) & (new > 0), new, old),
    "weighed twice": lambda new, old, x, t: row(x.float(), t) * new + row(x.float(), t) * old,
    "weighed by another": lambda new, old, x, t: row(x.float(), t) * new + (1 - row(x.float(), t - 1)) * old,
    "moved by a number": lambda new, old, x, t: old + row(x.float() / 2, t) * (new - old),
    "moved by one or two": lambda new, old, x, t: old + torch.where(row(x, t), 1.0, 2.0) * (new - old),
    "moved by one or itself": lambda new, old, x, t: torch.lerp(
        old, new, torch.where(row(x, t), 1.0, row(x.float(), t) / 2)
    ),
    "moved twice as far": lambda new, old, x, t: old + row(x.long() * 2, t) * (new - old),
    "moved from elsewhere": lambda new, old, x, t: old + row(x.float(), t) * (new - 2 * old),
    "moved the other way": lambda new, old, x, t: old - row(x.float(), t) * (new - old),
    "scaled": lambda new, old, x, t: torch.add(old, row(x.float(), t) * (new - old), alpha=2),
    "scaled within": lambda new, old, x, t: torch.addcmul(old, row(x.float(), t), new - old, value=0.5),
    "taken from one twice": lambda new, old, x, t: torch.lerp(old, new, torch.rsub(row(x.float(), t), 1, alpha=2)),
    "weighed by no bit": lambda new, old, x, t: row(x.float() / 2, t) * new + (1 - row(x.float() / 2, t)) * old,
}


@pytest.mark.parametrize(("kind", "delta"), EACH)
@pytest.mark.parametrize("name", LEFT)
def test_left_or_the_same(kind: str, delta: bool, name: str) -> None:
    fn, args = loop(kind, delta, LEFT[name]), arguments(kind, padding())
    report = explained(fn, args)
    assert worst_error(report.result, fn(*args)) <= 1e-5


SAME: dict[str, Keep] = {
    "arms swapped": lambda new, old, x, t: torch.where(row(x, t), old, new),
    "the next token's": lambda new, old, x, t: torch.where(row(x, (t + 1) % T), new, old),
}


@pytest.mark.parametrize(("kind", "delta"), EACH)
@pytest.mark.parametrize("name", SAME)
def test_other_masks(kind: str, delta: bool, name: str) -> None:
    """Whichever tokens are chosen, they are those of the model."""
    fn, args = loop(kind, delta, SAME[name]), arguments(kind, padding())
    report = explained(fn, args)
    assert worst_error(report.result, fn(*args)) <= BOUND


@pytest.mark.parametrize(("kind", "delta"), EACH)
@pytest.mark.parametrize("read", ["stepped", "before"])
def test_another_state_is_read(kind: str, delta: bool, read: str) -> None:
    fn, args = loop(kind, delta, KEPT["where"], read=read), arguments(kind, padding())
    report = explained(fn, args)
    assert worst_error(report.result, fn(*args)) <= BOUND
    if read == "stepped":
        assert not patterns(report), str(report)
