"""Casts, scale, l2norm and repeated heads above q and k: absorbed where they are the function, left alone elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile import backend, compat
from kdacompile.graph.build import functional_graph
from kdacompile.patterns.recurrence.absorb.scale import factor
from kdacompile.report.findings import Match
from tests.absorb.mixers import BATCH, HEADS, LENGTH, SIZE, draw, heads, mix, only, plain
from tests.backend.layers import run_both
from tests.compare import worst_error

Map = Callable[[Tensor], Tensor]


def with_keys(
    on_q: Map, on_k: Map, *, q: Tensor | None = None, k: Tensor | None = None, tolerance: float = 1e-5
) -> Match:
    """The match where q and k pass through ``on_q`` and ``on_k``."""
    given = plain()
    given |= {"q": given["q"] if q is None else q, "k": given["k"] if k is None else k}
    return only(lambda q, k, v, g, beta: mix(on_q(q), on_k(k), v, g, beta), list(given.values()), tolerance=tolerance)


# -- l2norm -------------------------------------------------------------------------------------------------------

NORMS: dict[str, Map] = {
    "rsqrt": lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6),
    "sqrt": lambda x: x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    "square_reciprocal": lambda x: x * (1e-6 + x.square().sum(-1, keepdim=True)).sqrt().reciprocal(),
    "power": lambda x: (x * x).sum(-1, keepdim=True).add(1e-6).pow(-0.5) * x,
    "heads_first": lambda x: NORMS["rsqrt"](x.transpose(1, 2).contiguous()).transpose(1, 2),
    "norm_squared": lambda x: x / (x.norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt(),
    "mean": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * x.shape[-1] ** -0.5,
}


@pytest.mark.parametrize("name", NORMS)
def test_l2norm(name: str) -> None:
    match = with_keys(NORMS[name], NORMS[name])
    assert "l2norm" in match.absorbed
    assert match.roles["q"].startswith("q ")  # the function's own argument


OTHER_NORMS: dict[str, Map] = {
    "clamped": lambda x: F.normalize(x, dim=-1),
    "eps_outside": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6),
    "eps_outside_root": lambda x: x / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-3),
    "over_heads": lambda x: x * torch.rsqrt((x * x).sum((-1, -2), keepdim=True) + 1e-6),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "detached": lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6).detach(),
    "two_eps": lambda x: x * torch.rsqrt((x * x + 1e-6).sum(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_norms_stay_outside(name: str) -> None:
    assert "l2norm" not in with_keys(OTHER_NORMS[name], OTHER_NORMS[name]).absorbed


def test_both_must_be_normalised_with_one_eps() -> None:
    def other(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-4)

    assert "l2norm" not in with_keys(NORMS["rsqrt"], lambda k: k).absorbed
    assert "l2norm" not in with_keys(NORMS["rsqrt"], other).absorbed


# -- scale --------------------------------------------------------------------------------------------------------


def factors(fn: Map) -> list[tuple[str, float] | None]:
    """What ``factor`` says of each operator of ``fn``."""
    found: list[tuple[str, float] | None] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        for op in functional_graph(gm.graph).ops:
            split = factor(op)
            found.append(split and (str(split[0].node), split[1]))
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=look)(heads(1))
    return found


def test_constant_factors() -> None:
    assert factors(lambda q: q * 0.5) == factors(lambda q: 0.5 * q) == factors(lambda q: q / 2) == [("l_q_", 0.5)]
    assert factors(lambda q: -q) == [("l_q_", -1.0)]
    for fn in (lambda q: q * q, lambda q: q * 0.0, lambda q: torch.div(q, 2, rounding_mode="floor")):
        assert not any(factors(fn)[-1:])


def test_scale_above_a_normalised_query() -> None:
    norm = NORMS["rsqrt"]
    match = with_keys(lambda q: norm(q) / 3.0, norm)
    assert "l2norm" in match.absorbed
    assert match.roles["q"].startswith("q ")


def test_a_factor_below_the_norm_stays() -> None:
    norm = NORMS["rsqrt"]
    match = with_keys(lambda q: norm(q * 0.01), norm)
    assert "l2norm" in match.absorbed
    assert not match.roles["q"].startswith("q ")


# -- repeated heads -----------------------------------------------------------------------------------------------


def expanded(x: Tensor) -> Tensor:
    batch, length, count, size = x.shape
    return x[:, :, :, None].expand(batch, length, count, 2, size).reshape(batch, length, 2 * count, size)


REPEATS: dict[str, Map] = {
    "interleave": lambda x: x.repeat_interleave(2, dim=2),
    "expand": expanded,
    "heads_first": lambda x: x.transpose(1, 2).repeat_interleave(2, dim=1).transpose(1, 2),
}


@pytest.mark.parametrize("name", REPEATS)
def test_repeated_heads_below_a_norm(name: str) -> None:
    norm = NORMS["rsqrt"]
    match = with_keys(
        lambda q: norm(REPEATS[name](q)), lambda k: norm(REPEATS[name](k)), q=heads(1, 2), k=0.4 * heads(2, 2)
    )
    assert {"l2norm", "repeat"} <= set(match.absorbed)
    assert match.roles["k"].startswith("k ")


@pytest.mark.parametrize("copied", [True, False])
def test_one_key_head_for_all(copied: bool) -> None:
    def spread(x: Tensor) -> Tensor:
        x = x.expand(-1, -1, HEADS, -1)
        return NORMS["rsqrt"](x.contiguous().view(BATCH, LENGTH, HEADS, SIZE) if copied else x)

    match = with_keys(spread, spread, q=heads(1, 1), k=0.4 * heads(2, 1))
    assert {"l2norm", "repeat"} <= set(match.absorbed)


def test_tiled_heads_stay_outside() -> None:
    norm = NORMS["rsqrt"]
    match = with_keys(
        lambda q: norm(q.repeat(1, 1, 2, 1)), lambda k: norm(k.repeat(1, 1, 2, 1)), q=heads(1, 2), k=0.4 * heads(2, 2)
    )
    assert "repeat" not in match.absorbed


# -- casts and layouts --------------------------------------------------------------------------------------------


def half(precision: str, down: bool = False) -> Match:
    """A model in bfloat16 whose core computes in float32; the fp32 output must equal eager's."""

    def wide(x: Tensor) -> Tensor:
        return x.half().float() if down else x.transpose(1, 2).contiguous().float().transpose(1, 2)

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        norm = NORMS["rsqrt"]
        return mix(norm(wide(q)), norm(wide(k)), v.float(), wide(g), wide(beta))

    arguments = [x if down else x.bfloat16() for x in plain().values()]
    ours, eager, report = run_both(fn, arguments, options={"kda.precision": precision})
    assert worst_error(ours, eager) < 1e-5
    return report.matches[0]


def test_upcasts_are_absorbed_unless_the_user_keeps_them() -> None:
    match = half("match")
    assert set(match.absorbed) == {"upcast", "l2norm"}
    assert match.roles["q"].endswith("bfloat16")
    kept = half("fp32")
    assert kept.absorbed == ("l2norm",)
    assert kept.roles["q"].endswith("float32")


def test_upcasts_inside_the_region_are_kept_too() -> None:
    """Token by token: there is no upcast tensor to hand over, so the op gets one made for it."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(BATCH, HEADS, SIZE, SIZE, dtype=torch.float32)
        outs = []
        for t in range(q.shape[1]):
            state = state + k[:, t].float().unsqueeze(-1) * v[:, t].float().unsqueeze(-2)
            outs.append((q[:, t].float().unsqueeze(-1) * state).sum(-2))
        return torch.stack(outs, dim=1)

    arguments = [heads(seed, length=5).bfloat16() for seed in (1, 2, 3)]
    assert op_inputs(fn, arguments, "match") == {torch.bfloat16}
    assert op_inputs(fn, arguments, "fp32") == {torch.float32}


def op_inputs(fn: Callable[..., Tensor], arguments: list[Tensor], precision: str) -> set[torch.dtype]:
    """The dtypes the op is given for q, k and v; the results equal eager's."""
    seen: list[torch.fx.GraphModule] = []

    def look(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(gm)
        return backend.kda(gm, inputs, options={"kda.inner": "eager", "kda.precision": precision})

    torch._dynamo.reset()
    ours = torch.compile(fn, backend=look)(*arguments)
    assert worst_error(ours, fn(*arguments)) < 1e-5
    call = next(node for node in seen[0].graph.nodes if "linear_attention" in str(node.target))
    return {compat.example_value(node).dtype for node in call.args[:3]}


def test_a_downcast_in_between_stays() -> None:
    match = half("match", down=True)
    assert all(match.roles[role].endswith("float16") for role in ("q", "k"))


def test_a_copy_of_what_is_overwritten_later_stays() -> None:
    norm = NORMS["rsqrt"]

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        query, buffer = norm(q.clone()), q * 1.0
        kept = norm(buffer.clone())
        buffer.zero_()
        return mix(kept + 0 * query, norm(k), v, g, beta) + buffer.sum()

    ours, eager, report = run_both(fn, list(plain().values()))
    assert len(report.matches) == 1
    assert worst_error(ours, eager) < 1e-5


# -- one-token steps ----------------------------------------------------------------------------------------------


def step(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, bias: Tensor, cache: Tensor) -> Any:
    """One token of a gated delta rule as transformers has it, over [B, 1, H, D] and a cache that is overwritten."""
    norm = NORMS["rsqrt"]
    q, k, v = (x.transpose(1, 2).float() for x in (norm(q.float()), norm(k.float()), v))
    g = (-rate.exp() * F.softplus(a.float() + bias))[:, 0]
    state = cache.float() * g.exp()[..., None, None]
    key, query, value = k[:, :, 0], q[:, :, 0] * q.shape[-1] ** -0.5, v[:, :, 0]
    delta = (value - (state * key.unsqueeze(-1)).sum(-2)) * b.sigmoid()[:, 0, :, None]
    state = state + key.unsqueeze(-1) * delta.unsqueeze(-2)
    cache.copy_(state)
    return (state * query.unsqueeze(-1)).sum(-2)[:, None]


def step_arguments(dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (heads(seed, length=1).to(dtype) for seed in (1, 2, 3))
    a, b = (draw(BATCH, 1, HEADS, seed=seed, dtype=dtype) for seed in (4, 5))
    rate, bias = (draw(HEADS, seed=seed) for seed in (6, 7))
    return [q, k, v, a, b, rate, bias, draw(BATCH, HEADS, SIZE, SIZE, seed=8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step(dtype: torch.dtype) -> None:
    ours, eager, report = run_both(step, step_arguments(dtype))
    assert [match.mode for match in report.matches] == ["step"]
    wanted = {"l2norm", "gate_softplus", "dt_bias", "sigmoid_beta"} | ({"upcast"} if dtype == torch.bfloat16 else set())
    assert wanted <= set(report.matches[0].absorbed)
    assert worst_error(ours, eager) < (1e-5 if dtype == torch.float32 else 1e-2)  # eager rounds beta to bfloat16


def test_layers_after_one_another() -> None:
    """The first rewrite shifts all places; the others must still know what precedes the write to their cache."""

    def fn(*arguments: Tensor) -> Tensor:
        q, k, v, a, b, rate, bias, *caches = arguments
        for cache in caches:
            v = F.silu(step(q, k, v, a, b, rate, bias, cache))
        return v

    arguments = step_arguments(torch.float32)
    ours, eager, report = run_both(fn, [*arguments, *(arguments[-1] * scale for scale in (2.0, 3.0))])
    assert len(report.matches) == 3
    assert len({match.absorbed for match in report.matches}) == 1
    assert worst_error(ours, eager) < 1e-5
