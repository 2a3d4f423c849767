"""A program for every code of a rejection: what a stranger might write, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor  # torch-private: a tensor subclass to try things with

from kdacompile.bench.latent_prompts import SMALL, Layer
from kdacompile.explainer import explain
from kdacompile.lowering.cpu.attention_cost import Prompt
from kdacompile.report.report import Report
from tests.mla.spellings import NEAR_MISSES, RANK, ROPE, WIDTH

BATCH, LENGTH, HEADS, SIZE = 2, 6, 2, 4


class Program(NamedTuple):
    """``fn`` of ``inputs``; ``says``: a part of the reason."""

    fn: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]
    says: str
    options: dict[str, Any] | None = None
    grad: bool = False


PROGRAMS: dict[str, Program] = {}


def told(program: Program) -> Report:
    """What the report says of a program."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options: dict[str, Any] = {"kda.inner": "eager", **(program.options or {})}
    with torch.set_grad_enabled(program.grad):
        return explain(program.fn, options=options)(*program.inputs())


def provokes(code: str, says: str, inputs: Callable[[], tuple[Any, ...]], **how: Any) -> Callable[[Any], Any]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[code] = Program(fn, inputs, says, **how)
        return fn

    return register


# -- linear attention --------------------------------------------------------------------------------------------------


def tokens() -> tuple[Tensor, ...]:
    """q, k, v ``[B, T, H, K]``, a decay ``[B, T, H]`` in (0, 1)."""
    q, k, v = (torch.randn(BATCH, LENGTH, HEADS, SIZE) for _ in range(3))
    return q, k, v, torch.rand(BATCH, LENGTH, HEADS)


def heads_first() -> tuple[Tensor, ...]:
    """q, k, v ``[B, H, T, K]``."""
    q, k, v, _ = tokens()
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def training() -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in tokens())


Between = Callable[[Tensor], Tensor]


def decayed_loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, between: Between, after: Between | None = None) -> Any:
    """The state decays, takes a token in, passes ``between``, and is read; ``after`` it does what goes to the next."""
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None] + k[:, t, :, :, None] * v[:, t, :, None, :]
        state = between(state)
        outs.append((state * q[:, t, :, :, None]).sum(2))
        state = state if after is None else after(state)
    return torch.stack(outs, 1), state


@provokes("operator", "tanh", tokens)
def saturating(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return decayed_loop(q, k, v, decay, torch.tanh)[0]


@provokes("rounding", "bfloat16", tokens)
def rounding(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return decayed_loop(q, k, v, decay, lambda state: state.bfloat16().float())[0]


@provokes("constant", "too small for probes", tokens)
def small_number(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return decayed_loop(q, k, v, decay, lambda state: state + 1e-12)[0]


@provokes("grad", "gradients are cut", training, grad=True)
def truncated(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return decayed_loop(q, k, v, decay, lambda state: state, Tensor.detach)[0]


@provokes("proof", "does not compute", heads_first)
def squared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).tril() ** 2) @ v


@provokes("escape", "outside it", tokens)
def states_returned(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    states: list[Tensor] = []

    def keep(state: Tensor) -> Tensor:
        states.append(state)
        return state

    return decayed_loop(q, k, v, decay, keep)[0], torch.stack(states, 1)


def far() -> tuple[Tensor, ...]:
    """q, k, v ``[B, H, T, K]`` of 200 tokens, a log gate ``[B, H, T]``."""
    return *(torch.randn(1, HEADS, 200, SIZE) for _ in range(3)), torch.full((1, HEADS, 200), -0.05)


@provokes("field", "different functions", far)
def one_distance_left_out(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    at, total = torch.arange(q.shape[2]), gate.cumsum(-1)
    gap = at[:, None] - at
    decays = (total[..., :, None] - total[..., None, :]).masked_fill((gap < 0) | (gap == 150), -torch.inf).exp()
    return (q @ k.mT * decays) @ v


@provokes("deadline", "kda.deadline", heads_first, options={"kda.deadline": 1e-9})
def parallel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v


@provokes("disabled", "kda.disable", tokens, options={"kda.disable": ["simple_gla"]})
def switched_off(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    return decayed_loop(q, k, v, decay, lambda state: state)[0]


@provokes("transform", "torch.func", heads_first)
def differentiated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.func.grad(lambda v: ((q @ k.mT).tril() @ v).sum())(v)


def marked() -> tuple[Tensor, ...]:
    given = heads_first()
    for x in given:
        torch._dynamo.mark_dynamic(x, 2)
    return given


@provokes("dynamic", "dynamic=False", marked)
def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    gap = at[:, None] - at
    return (q @ k.mT * ((gap >= 0) & (gap < 64))) @ v


@provokes("subclass", "subclasses", lambda: tuple(TwoTensor(x, x.clone()) for x in heads_first()))
def of_subclasses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return parallel(q, k, v)


def in_one_buffer() -> tuple[Tensor, ...]:
    buffer = torch.randn(BATCH, HEADS, SIZE, SIZE)
    return *(x[:, 0] for x in tokens()), buffer, buffer[:, :, 1]


@provokes("alias", "shares its memory", in_one_buffer)
def step_in_place(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, beside: Tensor) -> Tensor:
    state.mul_(decay[..., None, None]).add_(k[..., :, None] * v[..., None, :])
    return (state * q[..., :, None]).sum(2) + beside


@provokes("mutation", "k is overwritten", tokens)
def keys_overwritten(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    out = decayed_loop(q, k, v, decay, lambda state: state)[0]
    k.mul_(2.0)
    return out


@provokes("order", "before all inputs", lambda: (*(x[:, 0] for x in tokens()), torch.randn(BATCH, HEADS, SIZE, SIZE)))
def cache_read_again(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, cache: Tensor) -> Tensor:
    state = cache * decay[..., None, None] + k[..., :, None] * v[..., None, :]
    cache.copy_(state)
    return (state * (q * (1 + cache.mean()))[..., :, None]).sum(2)


@provokes("roles", "does not fit the roles", tokens)
def read_twice(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append(torch.einsum("bhkv,bhk,bhv->bh", state, q[:, t], q[:, t]))
    return torch.stack(outs, 1)


# -- latent attention --------------------------------------------------------------------------------------------------


def cached() -> tuple[Tensor, ...]:
    return torch.randn(2, 9, WIDTH), torch.randn(2, 9, RANK), torch.randn(2, 9, ROPE)


for _code, _name, _says in (
    ("bias", "bias", "bias"),
    ("dropout", "dropout", "dropout is active"),
    ("expanded_cache", "expanded_cache", "cached expanded"),
    ("per_head_rope", "per_head_rope", "rotated key of its own"),
    ("scores", "softcap", "tanh"),
    ("weights", "weights_returned", "attention weights"),
    ("mask", "weak_mask", "other scores may reach"),
):
    provokes(_code, _says, cached)(lambda *given, name=_name: NEAR_MISSES[name][0]()(*given))


def prompt_of_64() -> tuple[Any, ...]:
    case = Prompt(1, 64, 64, *SMALL)
    given = (1, case.heads, 64, case.nope + case.rope), (1, 64, case.rank), (1, 64, case.rope)
    return *(torch.randn(size, requires_grad=True) for size in given), None


provokes("cost", "training on 64 tokens", prompt_of_64, grad=True)(Layer(Prompt(1, 64, 64, *SMALL)))
