"""What a stranger may write in the place of the recurrence: matched or not, results are eager's, in float64.

Each program runs where it could be told from what it looks like: on values, keys, gates and sizes out of the ordinary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compare import copies, worst_error
from tests.soundness.programs import explained, tokens

BOUND = 1e-9
Inputs = tuple[Tensor, ...]
Bend = Callable[[Tensor], Tensor]


def given(T: int = 6, B: int = 1, H: int = 2, K: int = 4, V: int = 6) -> Inputs:
    found = tokens(T, B, H, K, V)
    return tuple(found[name].double() for name in ("q", "k", "v", "g", "beta"))


def with_numbers(role: int, *numbers: float) -> Inputs:
    """Ordinary inputs, with these numbers at the tokens from the second on."""
    found = given()
    for token, number in enumerate(numbers, 1):
        found[role][:, token] = number
    return found


def same(x: Tensor) -> Tensor:
    return x


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    key: Bend = same,
    value: Bend = same,
    state: Callable[[Tensor, int], Tensor] = lambda s, t: s,
    gate: Bend = torch.exp,
    read: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """The gated delta rule token by token, with something else for one of its parts."""
    s, outputs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), list[Tensor]()
    for t in range(q.shape[1]):
        column, s = key(k[:, t])[..., None], s * gate(g[:, t])[..., None, None]
        error = (value(v[:, t])[:, :, None] - column.mT @ s) * beta[:, t, :, None, None]
        s = state(s + column @ error, t)
        outputs.append(read(q[:, t, :, None], s)[:, :, 0])
    return torch.stack(outputs, 1)


def closed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, weigh: Callable[..., Tensor] = lambda w, i, j: w) -> Tensor:
    """Gated linear attention in closed form, ``weigh`` on its weights and the positions of queries and keys."""
    q, k, v, total = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), g.transpose(1, 2).cumsum(-1)
    i = torch.arange(q.shape[2])
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(i[:, None] < i, -math.inf)
    return (weigh(q @ k.mT * gap.exp(), i[:, None], i) @ v).transpose(1, 2)


def check(program: Callable[..., Any], inputs: Inputs) -> None:
    own, theirs = copies(inputs), copies(inputs)
    with torch.no_grad():
        report = explained(program, own, **{"kda.inner": "eager"})
        assert worst_error((report.result, own), (program(*theirs), theirs)) <= BOUND, str(report)


VALUES: dict[str, dict[str, Any]] = {
    "hardshrink": {"value": lambda v: F.hardshrink(v, 1e-10)},
    "erf of a little": {"value": lambda v: torch.erf(v * 1e-6) * (1e6 * math.sqrt(math.pi) / 2)},
    "expm1 of a little": {"value": lambda v: torch.expm1(v * 1e-9) * 1e9},
    "a logarithm of a power": {"value": lambda v: v.exp().log()},
    "two halves": {"value": lambda v: v.relu() - (-v).relu()},
    "in whole parts": {"value": lambda v: (v * 2.0**45).trunc() / 2.0**45},
    "without its last bit": {"value": lambda v: (v.view(torch.int64) & -2).view(torch.float64)},
    "remainder of much": {"value": lambda v: torch.fmod(v, 1e3)},
    "sinc of a little": {"key": lambda k: k * torch.sinc(k * 1e-4)},
    "a power of nearly one": {"key": lambda k: k.abs() ** 1.0000001 * k.sign()},
    "the root of a square": {"key": lambda k: (k * k).sqrt()},
    "the largest three": {"key": lambda k: k * (k >= k.topk(3, -1).values[..., -1:])},
    "a median off": {"key": lambda k: k - k.median(-1, keepdim=True).values * 1e-6},
    "tanh of a little": {"state": lambda s, t: torch.tanh(s * 1e-6) * 1e6},
    "divided by its norm": {"state": lambda s, t: s / (1 + 1e-8 * s.norm())},
    "rounded once": {"state": lambda s, t: s.float().double() if t == 3 else s},
    "sorted once": {"state": lambda s, t: s.sort(-1).values if t == 4 else s},
    "small ones dropped": {"state": lambda s, t: torch.where(s.abs() < 1e-2, 0.0, s)},
    "large ones dropped": {"state": lambda s, t: torch.where(s.abs() > 1e3, 0.0, s)},
    "a mean off": {"state": lambda s, t: s - s.mean(-1, keepdim=True) * 1e-6},
    "its third power": {"state": lambda s, t: s + 1e-9 * s @ s.mT @ s if t == 3 else s},
    "three quarters read": {"read": lambda q, s: q[..., :2] @ s[..., :2, :] + q[..., 3:] @ s[..., 3:, :]},
    "read in bfloat16": {"read": lambda q, s: (q @ s).bfloat16().double()},
    "the larger of two": {"read": lambda q, s: torch.maximum(q @ s, (q @ s) * 0.999999)},
}


@pytest.mark.parametrize("name", VALUES)
def test_values_keys_and_states(name: str) -> None:
    found = given()
    check(
        lambda *x: loop(*x, **VALUES[name]),
        (*found[:2], found[2] * 1e4 ** torch.linspace(-1, 1, 6)[:, None, None], *found[3:]),
    )


GATES: dict[str, tuple[Bend, tuple[float, ...]]] = {
    "a floor": (lambda g: g.clamp(min=-50.0).exp(), (-60.0,)),
    "a floor of the factor": (lambda g: g.exp().clamp(min=1e-30), (-100.0,)),
    "open where far closed": (lambda g: torch.where(g < -700, 1.0, g.exp()), (-710.0,)),
    "one number is open": (lambda g: torch.where(g == -0.5, 1.0, g.exp()), (-0.5,)),
    "zero is closed": (lambda g: torch.where(g == 0, 0.5, g.exp()), (0.0,)),
    "none above one": (lambda g: g.clamp(max=0.0).exp(), (0.5, 1.0)),
    "no sign": (lambda g: (-g.abs()).exp(), (0.5, 1.0)),
    "-inf is open": (lambda g: torch.where(g.isinf(), 1.0, g.exp()), (-math.inf,)),
    "a square": (lambda g: 1 + g + g * g / 2, (-1.0,)),
    "a power of nearly one": (lambda g: g.exp() ** 1.000001, (-30.0,)),
    "hyperbolic": (lambda g: torch.sinh(g) + torch.cosh(g), (-3.0,)),
    "a fraction": (lambda g: torch.frac(g.exp()), (0.5,)),
    "in steps": (lambda g: torch.round(g.exp() * 2**20) / 2**20, (-10.0,)),
    "powers of ten": (lambda g: torch.pow(10.0, g * 0.4342944819032518), (-3.0,)),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    gate, numbers = GATES[name]
    check(lambda *x: loop(*x, gate=gate), with_numbers(3, *numbers))


LOGITS: dict[str, Bend] = {
    "one number": lambda x: F.softplus(x) * (x != 3.25),
    "a number or near it": lambda x: torch.where(torch.isclose(x, torch.full_like(x, 3.25)), 0.0, F.softplus(x)),
    "rounded": lambda x: F.softplus(x).round(decimals=6),
    "remainder of much": lambda x: F.softplus(torch.remainder(x, 1e5)),
    "whole numbers": lambda x: F.softplus(x.to(torch.int32).double()),
    "a step far down": lambda x: F.softplus(x) * torch.heaviside(x + 1e4, x * 0 + 1),
    "no sign": lambda x: F.softplus(x.abs()),
    "closed by its tanh": lambda x: F.softplus(x) * torch.tanh(F.softplus(x) * 1e9),
}


@pytest.mark.parametrize("name", LOGITS)
def test_functions_of_a_logit(name: str) -> None:
    """One that is taken for softplus would have its gates, of large and of special numbers."""
    inputs = list(with_numbers(3, 3.25, 88.5, -1e5, 1e6, -25.0))
    check(lambda q, k, v, x, b: loop(q, k, v, -LOGITS[name](x), b), tuple(inputs))
    inputs[4], inputs[3] = inputs[3], inputs[3] * 0
    check(lambda q, k, v, g, x: loop(q, k, v, g, LOGITS[name](x).neg().exp()), tuple(inputs))


NORMS: dict[str, Bend] = {
    "eps 0.5": lambda k: F.normalize(k, dim=-1, eps=0.5),
    "at most one": lambda k: k / k.norm(dim=-1, keepdim=True).clamp(min=1.0),
    "of the first kind": lambda k: F.normalize(k, p=1, dim=-1),
    "of all heads": lambda k: k / k.flatten(2).norm(dim=-1)[..., None, None],
    "eps outside": lambda k: k / (k.norm(dim=-1, keepdim=True) + 1e-3),
    "renorm": lambda k: torch.renorm(k.flatten(0, 2), 2, 0, 1.0).view(k.shape),
    "none where far": lambda k: torch.where(k.norm(dim=-1, keepdim=True) > 100, 0.0, k),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    norm, (q, k, v, g, beta) = NORMS[name], given()
    sizes = torch.tensor([1.0, 1e-2, 10.0, 500.0, 1.0, 1e-4])[:, None, None]
    check(lambda q, k, v, g, b: loop(norm(q), norm(k), v, g, b), (q * sizes, k * sizes, v, g, beta))


# -- one compiled function, called with what it was not captured with --------------------------------------------------

SIZES = (given(5, 2, 3, 4, 6), given(5, 3, 5, 8, 7), given(5, 9, 9, 16, 5))


def double(q: Tensor) -> float:
    return 2.0 if q.dtype == torch.float32 else 1.0


def by_series(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule of four tokens: of more, the inverse has terms that this series leaves out."""
    q, k, v, total, beta = (x.transpose(1, 2) for x in (q, k, v, g.cumsum(1), beta))
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    erased = (k * beta[..., None] @ k.mT * decay).tril(-1)
    new = v * beta[..., None]
    new = new - erased @ (new - erased @ (new - erased @ new))
    return ((q @ k.mT * decay) @ new).transpose(1, 2)


def half_reversed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One head from the first token on, the other from the last."""
    one, other = ([x[:, :, head : head + 1] for x in (q, k, v, g)] for head in (0, 1))
    q, k, v, g = (x.flip(1) for x in other)
    return torch.cat([closed(one[0], one[1], one[2], one[3]), closed(q, k, v, g).flip(1)], 2)


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[Any, ...], ...]]] = {
    "scale of few channels": (lambda q, k, v, g, b: closed(q * (1 if q.shape[-1] < 10 else 2), k, v, g), SIZES),
    "heads past 7": (lambda q, k, v, g, b: closed(q, k, v, g * torch.where(torch.arange(q.shape[2]) > 7, 2, 1)), SIZES),
    "rows past 4": (
        lambda q, k, v, g, b: closed(q * (1.0 + (torch.arange(q.shape[0]) > 4))[:, None, None, None], k, v, g),
        SIZES,
    ),
    "heads by eights": (lambda q, k, v, g, b: closed(q, k[:, :, torch.arange(q.shape[2]) % 8], v, g), SIZES),
    "changed round at 16": (lambda q, k, v, g, b: closed(*((q, k) if q.shape[-1] != 16 else (k, q)), v, g), SIZES),
    "a row's mean": (
        lambda q, k, v, g, b: closed(q, k, v.mean(0, keepdim=True).expand_as(v), g),
        (given(5, 1), given(5, 3), given(5, 2)),
    ),
    "softmax of heads": (lambda q, k, v, g, b: closed(q.softmax(2), k, v, g), (given(5, H=1), given(5, H=3))),
    "a triangle that grows": (
        lambda q, k, v, g, b: torch.tril(q.transpose(1, 2) @ k.transpose(1, 2).mT, q.shape[1] - 8) @ v.transpose(1, 2),
        (given(8), given(20), given(6)),
    ),
    "a window of what is more than 8": (
        lambda q, k, v, g, b: closed(q, k, v, g, lambda w, i, j: w * (i - j <= max(q.shape[1] - 8, 8))),
        (given(8), given(24), given(9)),
    ),
    "the last token": (
        lambda q, k, v, g, b: closed(q, k, v * (1.0 + (torch.arange(q.shape[1]) > q.shape[1] - 2))[:, None, None], g),
        (given(20), given(9), given(30)),
    ),
    "captured long": (
        lambda q, k, v, g, b: closed(q, k, v, g, lambda w, i, j: w * (i - j < 40)),
        (given(60), given(30), given(8), given(50)),
    ),
    "a dtype's own factor": (
        lambda q, k, v, g, b: closed(q, k, v * double(q), g),
        (given(), tuple(x.float() for x in given()), given(7)),
    ),
    "a window's length": (
        lambda q, k, v, g, n: closed(q, k, v, g, lambda w, i, j: w * (i - j < n)),
        tuple((*given(8)[:4], n) for n in (100, 3, 8, 1)),
    ),
    "a window's length, negative": (
        lambda q, k, v, g, n: closed(q, k, v, g, lambda w, i, j: w * (i - j > -n - 3)),
        tuple((*given(8)[:4], n) for n in (100, -8, 5)),
    ),
    "a triangle beside the mask": (
        lambda q, k, v, g, n: closed(q, k, v, g, lambda w, i, j: w.tril(n)),
        tuple((*given(8)[:4], n) for n in (5, -2, 2)),
    ),
    "places from a number on": (
        lambda q, k, v, g, n: closed(q, k, v * (torch.arange(n, n + q.shape[1]) >= 0)[:, None, None], g),
        tuple((*given(8)[:4], n) for n in (5, -3, 2, -7)),
    ),
    "another tensor's length": (
        lambda q, k, v, g, x: closed(q, k, v, g, lambda w, i, j: w * (i - j < x.shape[0])),
        tuple((*given(8)[:4], torch.ones(n)) for n in (100, 3, 8)),
    ),
    "a window of heads": (
        lambda q, k, v, g, b: closed(q, k, v, g, lambda w, i, j: w * (i - j < q.shape[2] * 8)),
        (given(7, 2, 3), given(30, 2, 3), given(12, 2, 2)),
    ),
    "a small term": (
        lambda q, k, v, g, b, r: loop(q, k, v, g, b, state=lambda s, t: s + r * s * s),
        tuple((*given(3), r) for r in (0.0, 1e-3, 1e-9)),
    ),
    "a token that forgets": (
        lambda q, k, v, g, b, n: loop(q, k, v, g, b, state=lambda s, t: s * 0 if t == n else s),
        tuple((*given(4), n) for n in (-1, 2, 50)),
    ),
    "a triangle's place": (
        lambda q, k, v, n: torch.tril(q.transpose(1, 2) @ k.transpose(1, 2).mT, n) @ v.transpose(1, 2),
        tuple((*given(8)[:3], n) for n in (0, 1, -1, -8)),
    ),
    "a series of four": (by_series, (given(4), given(5), given(4))),
    "half of the heads reversed": (half_reversed, (given(4), given(6))),
    "gates of the token before": (
        lambda q, k, v, g, b: closed(q, k, v, F.pad(g, (0, 0, 1, 0))[:, :-1]),
        (given(6), given(9), given(1)),
    ),
    "keys by tiles, values one by one": (
        lambda q, k, v, g, b: closed(q.repeat(1, 1, 2, 1), k.repeat(1, 1, 2, 1), v.repeat_interleave(2, 2), g.tile(2)),
        (given(6), given(9), given(6, 1, 3)),
    ),
    "a rate": (
        lambda q, k, v, g, r: closed(q, k, v, g * 0, lambda w, i, j: w * (r ** (i - j)).tril()),
        tuple((*given(8)[:4], r) for r in (0.9, 0.5, 1.0, 0.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_unlike_the_first(name: str) -> None:
    program, calls = CALLS[name]
    torch._dynamo.reset()
    run = torch.compile(program, backend="kda", dynamic=True, options={"kda.inner": "eager", "kda.lift": False})
    with torch.no_grad():
        for call in calls:
            bound = BOUND if call[0].dtype == torch.float64 else 1e-5
            assert worst_error(run(*call), program(*call)) <= bound, [x.shape for x in call[:3]]


class Decayed(nn.Module):
    """Retention by a table of its own."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        i = torch.arange(8)
        self.register_buffer("table", (0.75 ** (i[:, None] - i).double()).tril())
        self.gain = 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return closed(
            q, k, v * (self.gain if self.training else 3.0), q.new_zeros(q.shape[:3]), lambda w, i, j: w * self.table
        )


CHANGES: dict[str, Callable[[Decayed], Any]] = {
    "an entry": lambda m: m.table[5, 3].mul_(1.5),
    "an entry above": lambda m: m.table[2, 6].fill_(1.0),
    "an entry, a little": lambda m: m.table[7, 0].mul_(1 + 1e-6),
    "by numpy": lambda m: m.table.numpy().__setitem__((4, 1), 9.0),
    "its data": lambda m: m.table.data.__setitem__((7, 2), 0.0),
    "its storage": lambda m: m.table.untyped_storage().copy_((m.table * 0.3).untyped_storage()),
    "by its state": lambda m: m.load_state_dict({"table": m.table * 0.5}),
    "an attribute": lambda m: setattr(m, "gain", 2.0),
    "the mode": lambda m: m.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_modules_that_change_between_calls(name: str) -> None:
    torch._dynamo.reset()
    module, inputs = Decayed(), given(8)[:3]
    run = torch.compile(module, backend="kda", options={"kda.inner": "eager"})
    with torch.no_grad():
        for change in (lambda m: None, CHANGES[name], lambda m: None, CHANGES[name]):
            change(module)
            assert worst_error(run(*inputs), module(*inputs)) <= BOUND
