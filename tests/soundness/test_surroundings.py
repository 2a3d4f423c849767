"""What a program does around or within the recurrence: feedback, writes between uses, operators of higher order,
straight-through gradients. Results and gradients are eager's; what is no recurrence is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from kdacompile.report.collect import collecting
from tests.compare import copies, worst_error
from tests.soundness.programs import BOUND, tokens

Program = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        s = s * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None] * beta[:, t, :, None, None]
        outs.append((q[:, t, :, :, None] * s).sum(-2))
    return torch.stack(outs, 1)


def fed_back(to: str) -> Program:
    """What a token reads changes the next token's gate, write gate or key."""

    def program(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
        o, outs = torch.zeros_like(v[:, 0]), list[Tensor]()
        for t in range(q.shape[1]):
            decay, write, key = g[:, t].exp(), beta[:, t], k[:, t]
            if to == "gate":
                decay = (o.mean(-1) + g[:, t]).sigmoid()
            elif to == "beta":
                write = (o.mean(-1) + beta[:, t]).sigmoid()
            else:
                key = key + 0.1 * o[..., : key.shape[-1]]
            s = s * decay[..., None, None] + (write[..., None] * key)[..., None] * v[:, t, :, None]
            o = (q[:, t, :, :, None] * s).sum(-2)
            outs.append(o)
        return torch.stack(outs, 1)

    return program


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] * 0.5


def written_between(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
    """Of gates eager keeps the exponentials for its backward, so that it may write to them; the op keeps the gates."""
    g = g.clone()
    first = gla(q, k, v, g, beta, s)
    g.mul_(2.0)
    return first + gla(q, k, v, g, beta, s)


def differentiated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
    with torch.enable_grad():
        x = v.detach().requires_grad_()
        (slope,) = torch.autograd.grad(gla(q, k, x, g, beta, s).sum(), x)
    return slope + gla(q, k, v, g, beta, s)


def in_branches(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
    def swapped(q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
        return gla(k, q, *others)

    return torch.cond(q.sum() > 0, gla, swapped, (q, k, v, g, beta, s))


def by_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
    def step(s: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        q, k, v, g = x
        s = s * g[..., None, None].exp() + k[..., None] * v[..., None, :]
        return s, (q[..., None] * s).sum(-2)

    return scan(step, s, tuple(x.transpose(0, 1) for x in (q, k, v, g)))[1]


def bounded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        s = (s * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]).clamp(-3, 3)
        outs.append((q[:, t, :, :, None] * s).sum(-2))
    return torch.stack(outs, 1)


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-0.1, 0.1)


class Own(torch.autograd.Function):
    """The recurrence, and for its gradients something else, of which one asks for the result's."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        return gla(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, s = ctx.saved_tensors
        return q * 2, k * 3, v * 4, g * grads[0].square().sum(), beta, s


def stepwise(step: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Program:
    """``step`` on the decayed state, the key ``[B, H, K, 1]`` and the value ``[B, H, 1, V]`` of each token."""

    def program(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> Tensor:
        outs: list[Tensor] = []
        for t in range(q.shape[1]):
            s = step(s * g[:, t, :, None, None].exp(), k[:, t, :, :, None], v[:, t, :, None])
            outs.append((q[:, t, :, :, None] * s).sum(-2))
        return torch.stack(outs, 1)

    return program


def negated(x: Tensor) -> Tensor:
    """-x, as a view that has its sign apart."""
    return torch.complex(x, x).conj().imag


LEFT: dict[str, Program] = {
    "what is no number is dropped": stepwise(lambda s, k, v: (s + k * (v / (v > 0))).nan_to_num(0.0, 0.0, 0.0)),
    "erased with another's state": stepwise(lambda s, k, v: s + k * (v - (k * s.roll(1, -1)).sum(-2, keepdim=True))),
    "the gate reads the state": fed_back("gate"),
    "beta reads the state": fed_back("beta"),
    "the key reads the state": fed_back("key"),
    "the state is bounded": bounded,
}
OTHERS: dict[str, Program] = {
    "gradients of the state bounded": stepwise(lambda s, k, v: Bounded.apply(s) + k * v),
    "a key cut where it erases": stepwise(lambda s, k, v: s + k * (v - (k.detach() * s).sum(-2, keepdim=True))),
    "what is erased is cut": stepwise(lambda s, k, v: s + k * (v - (k * s).sum(-2, keepdim=True).detach())),
    "a sign apart": lambda q, k, v, g, beta, s: gla(negated(q), k, negated(v), g, beta, s),
    "gradients of its own": lambda *x: Own.apply(*x),
    "straight through": lambda q, k, v, g, beta, s: gla(q, k, Straight.apply(3 * v), g, beta, s),
    "gates written between": written_between,
    "a gradient within": differentiated,
    "branches": in_branches,
    "a scan": by_scan,
    "one after the other": lambda q, k, v, g, beta, s: gla(q, k, gla(q, k, v, g, beta, s), g, beta, s),
    "every second channel cut off": lambda *x: gla(*x)[..., ::2].detach() + gla(*x)[..., 1::2],
}


@pytest.mark.parametrize("name", [*LEFT, *OTHERS])
def test_results_and_gradients_are_eagers(name: str) -> None:
    program, given = {**LEFT, **OTHERS}[name], tuple(tokens(4, H=1).values())
    torch._dynamo.reset()
    run = torch.compile(program, backend="kda", options={"kda.inner": "aot_eager"})
    with collecting() as report:
        for training in (False, True) if name not in ("branches", "a scan") else (False,):
            results = [trained(fn, copies(given)) if training else plain(fn, copies(given)) for fn in (run, program)]
            assert worst_error(*results) <= BOUND, str(report)
    assert bool(report.matches) == (name not in LEFT), str(report)


def plain(program: Program, given: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [program(*given), *given]


def trained(program: Program, given: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in given]
    out = program(*leaves)
    seed = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed, allow_unused=True, materialize_grads=True)]
