"""What is small is as visible as what is large: terms of 1e-10 matter where values are small, or grow along T."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.patterns.engine import field
from tests.fuzz.yardstick import difference
from tests.soundness.programs import explained, matched, refused, tokens

Args = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    start: float = 0.0,
    step: Callable[..., Tensor],
    read: Callable[..., Tensor],
) -> Tensor:
    """The gated delta rule token by token, with ``step`` for its write and ``read`` for its output."""
    state = torch.full((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), start)
    outputs: list[Tensor] = []
    for t in range(q.shape[1]):
        key, value = k[:, t, :, :, None], v[:, t, :, None]
        state = state * g[:, t, :, None, None].exp()
        error = (value - key.mT @ state) * beta[:, t, :, None, None]
        state = step(state, key, error, value)
        outputs.append(read(state, q[:, t, :, None], value)[:, :, 0])
    return torch.stack(outputs, 1)


def write(state: Tensor, key: Tensor, error: Tensor, value: Tensor) -> Tensor:
    return state + key @ error


def read(state: Tensor, query: Tensor, value: Tensor) -> Tensor:
    return query @ state


P = next(prime for prime in iter(field.draw, 0) if prime != field.P)
"""A prime that another process draws: nothing in this one knows it."""

HALVES = P >> 16, P & 0xFFFF

STEPS: dict[str, Callable[..., Tensor]] = {
    "add alpha": lambda s, k, e, v: (s + k @ e).add(s * s, alpha=1e-10),
    "addcmul value": lambda s, k, e, v: torch.addcmul(s + k @ e, s, s, value=1e-12),
    "lerp to its square": lambda s, k, e, v: torch.lerp(s + k @ e, s * s, 1e-11),
    "a key of its own": lambda s, k, e, v: s + (k + 1e-10 * k * k) @ e,
    "an error cubed": lambda s, k, e, v: s + k @ (e + 1e-18 * e * e * e),
    "a state that leaks": lambda s, k, e, v: s * (1 - 1e-11) + k @ e,
    "nothing modulo the field's prime": lambda s, k, e, v: s + k @ e + s * s * (P * 2.0**-71),
    "the prime as a tensor": lambda s, k, e, v: s + k @ e + s * s * torch.tensor(P) * 2.0**-71,
    "the prime put together": lambda s, k, e, v: s + k @ e + s * s * (HALVES[0] * 65536.0 + HALVES[1]) * 2.0**-71,
    "the prime from two terms": lambda s, k, e, v: s + k @ e + (s * HALVES[0] * 65536 + s * HALVES[1]) * s * 2.0**-71,
    "what is one modulo the prime": lambda s, k, e, v: (s + k @ e) * (1 + P * 2.0**-52),
    "addcdiv value": lambda s, k, e, v: torch.addcdiv(s + k @ e, s, 2 + k * k, value=1e-12),
}

READS: dict[str, Callable[..., Tensor]] = {
    "value cubed": lambda s, q, v: q @ s + 1e-18 * v * v * v,
    "the state's square": lambda s, q, v: q @ (s + 1e-14 * s * s),
    "a query squared": lambda s, q, v: (q + 1e-12 * q * q) @ s,
    "baddbmm beta": lambda s, q, v: torch.baddbmm(
        v.flatten(0, 1) * v.flatten(0, 1), q.flatten(0, 1), s.flatten(0, 1), beta=1e-10
    ).view(v.shape),
    "what was read, squared": lambda s, q, v: (q @ s).add((q @ s) ** 2, alpha=1e-13),
}


def given(T: int = 12) -> Args:
    found = tokens(T)
    return found["q"], found["k"], found["v"], found["g"], found["beta"]


HIDDEN: dict[str, Callable[[Tensor, float], Tensor]] = {
    "2 ** -110": lambda gap, deep: torch.exp2(gap.masked_fill(LATER, -110.0 * deep)),
    "2 ** -125 by where": lambda gap, deep: torch.exp2(torch.where(LATER, -125.0 * deep, gap)),
    "1.5 ** -110": lambda gap, deep: torch.pow(1.5, gap.masked_fill(LATER, -110.0 * deep)),
}
LATER = torch.ones(12, 12, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_hides_under_e_alone(name: str, dtype: torch.dtype) -> None:
    """exp(-110) is zero in float32, exp(-770) in float64; these are not, and later values of 1e34, 1e220 showed."""
    deep = 1.0 if dtype == torch.float32 else 7.0

    def program(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        total = g.transpose(1, 2).cumsum(-1)
        weights = HIDDEN[name](total[..., :, None] - total[..., None, :], deep)
        return ((q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * weights) @ v.transpose(1, 2)).transpose(1, 2)

    q, k, v, g, _ = (x.to(dtype) for x in given())
    refused(program, (q, k, v, g))


@pytest.mark.parametrize("name", STEPS)
def test_a_small_term_in_the_state(name: str) -> None:
    refused(lambda *x: loop(*x, step=STEPS[name], read=read), given())


@pytest.mark.parametrize("name", READS)
def test_a_small_term_in_the_output(name: str) -> None:
    inputs = tuple(x * 1e-3 for x in given())
    refused(lambda *x: loop(*x, step=write, read=READS[name]), inputs, whole=False)
    report = explained(lambda *x: loop(*x, step=write, read=READS[name]), inputs)
    for match in report.matches:  # then what is added stands outside of the match
        assert match.checked == "exactly", str(report)


@pytest.mark.parametrize("start", [1e-9, 1e-12, -1e-10, 1e-30])
def test_a_state_that_does_not_start_at_zero(start: float) -> None:
    refused(lambda *x: loop(*x, start=start, step=write, read=read), given())


def test_the_same_without_small_terms() -> None:
    matched(lambda *x: loop(*x, step=write, read=read), given(), "gated_delta_rule")


def parallel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, mask: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Gated attention in closed form; ``mask`` makes weights of log decays and of what comes later."""
    q, k, v, total = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return ((q @ k.mT * mask(total[..., :, None] - total[..., None, :], later)) @ v).transpose(1, 2)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled with -25": lambda x, later: x.masked_fill(later, -25.0).exp(),
    "filled with -80": lambda x, later: x.masked_fill(later, -80.0).exp(),
    "later tokens at 1e-10": lambda x, later: torch.where(later, 1e-10, x.exp()),
    "later tokens at 1e-30": lambda x, later: torch.where(later, 1e-30, x.exp()),
    "a little everywhere": lambda x, later: x.masked_fill(later, -torch.inf).exp() + 1e-12,
    "pairs on the diagonal": lambda x, later: x.masked_fill(later, -torch.inf).exp() + 1e-11 * torch.eye(x.shape[-1]),
    "a mask that is no mask": lambda x, later: x.exp() * (1 - later.float() * (1 - 1e-6)),
    "added and not filled": lambda x, later: (x + later.float() * -30.0).exp(),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_let_something_through(name: str) -> None:
    refused(lambda q, k, v, g: parallel(q, k, v, g, MASKS[name]), given()[:4])


EXACT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "filled with -inf": lambda x, later: x.masked_fill(later, -torch.inf).exp(),
    "filled with -1e9": lambda x, later: x.masked_fill(later, -1e9).exp(),
    "filled with -200, which float32 takes for it": lambda x, later: x.masked_fill(later, -200.0).exp(),
    "zero": lambda x, later: torch.where(later, 0.0, x.exp()),
    "tril twice": lambda x, later: x.tril().exp().tril(),
}


@pytest.mark.parametrize("name", EXACT)
def test_masks_that_let_nothing_through(name: str) -> None:
    matched(lambda q, k, v, g: parallel(q, k, v, g, EXACT[name]), given()[:4], "simple_gla")


ROUGH: dict[str, Callable[..., Tensor]] = {
    "a leak": lambda s, k, e, v: (s + k @ e) * (1 - 1e-10),
    "a larger leak": lambda s, k, e, v: (s + k @ e) * (1 - 1e-9),
    "a key of its own": lambda s, k, e, v: s + (k + 1e-10 * k * k) @ e,
    "a write of its own": lambda s, k, e, v: s + (1 + 1e-10) * k @ e,
    "a square": lambda s, k, e, v: s + k @ e + 1e-14 * s * s,
    "a head of another": lambda s, k, e, v: s + k @ (e + 1e-10 * e.roll(1, 1)),
}


@pytest.mark.parametrize("name", ROUGH)
def test_a_small_term_beside_numbers_that_are_rounded(name: str) -> None:
    """Literals without a meaning may be to blame for a difference, but for none that is larger than rounding."""
    refused(lambda *x: loop(x[0] * 0.3183098861837907, *x[1:], step=ROUGH[name], read=read), given())


def test_numbers_that_are_rounded() -> None:
    inputs = given()

    def program(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return loop(q, k * (1 / math.pi), v * math.pi, g, beta * math.pi**2, step=write, read=read)

    report = explained(program, inputs)
    assert [match.pattern for match in report.matches] == ["gated_delta_rule"], str(report)


def normed(x: Tensor, times: float = 1.0) -> Tensor:
    return x * times * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def retained(q: Tensor, k: Tensor, v: Tensor, times: float) -> Tensor:
    """Retention by heads, its table of powers times a number."""
    place = torch.arange(q.shape[1], dtype=q.dtype)
    decay = (0.9 ** (place[:, None] - place)).tril() * times
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT * decay) @ v).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor, times: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT * (q.shape[-1] ** -0.5 * times)).softmax(-1) @ v).transpose(1, 2)


plain = lambda *x: loop(*x, step=write, read=read)  # noqa: E731
NEARLY_ONE: dict[str, Callable[..., Tensor]] = {
    "normed queries": lambda q, k, v, g, b, c: plain(normed(q, c), normed(k), v, g, b),
    "normed keys": lambda q, k, v, g, b, c: plain(normed(q), normed(k, c), v, g, b),
    "queries": lambda q, k, v, g, b, c: plain(q * (8**-0.5 * c), k, v, g, b),
    "the output": lambda q, k, v, g, b, c: plain(q, k, v, g, b) * c,
    "values": lambda q, k, v, g, b, c: plain(q, k, v + (c - 1) * v.sum(0, keepdim=True), g, b),
    "a write gate": lambda q, k, v, g, b, c: plain(q, k, v, g, b.logit().sigmoid() * c),
    "a write gate's logit": lambda q, k, v, g, b, c: plain(q, k, v, g, (b.logit() * c).sigmoid()),
    "a gate": lambda q, k, v, g, b, c: plain(q, k, v, -F.softplus(g) * c, b),
    "a gate spelled out": lambda q, k, v, g, b, c: plain(q, k, v, -torch.log1p(g.exp()) * c, b),
    "a table": lambda q, k, v, g, b, c: retained(q, k, v, c),
    "scores": lambda q, k, v, g, b, c: attended(q, k, v, c),
}


@pytest.mark.parametrize("name", NEARLY_ONE)
def test_a_factor_that_is_nearly_one(name: str) -> None:
    """It was rounded to one: scales are measured, and what is absorbed was compared to 1e-8."""
    inputs = tuple(x.double() for x in given())
    torch.set_default_dtype(torch.float64)
    try:
        report = explained(lambda *x: NEARLY_ONE[name](*x, 1 + 1e-9), inputs, **{"kda.inner": "eager"})
        assert difference(report.result, NEARLY_ONE[name](*inputs, 1 + 1e-9)) < 1e-12, str(report)
    finally:
        torch.set_default_dtype(torch.float32)
