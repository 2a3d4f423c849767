"""Prompts of MLA on the CPU, in blocks of queries: both results and all gradients against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering import attention_rows
from kdacompile.lowering.attention_rows import run_attention_backward
from kdacompile.lowering.cpu.attention import BLOCKED, choose_attention
from kdacompile.lowering.cpu.small_attention import SMALL
from kdacompile.lowering.operands import given
from kdacompile.lowering.run_attention import Attention, run_attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.patterns.mla.oracle import latent_attention
from tests.compare import relative_error
from tests.lowering.test_cudnn import NAMES, call_of
from tests.ops.mla_cases import OPERANDS

CASES: dict[str, dict[str, Any]] = {
    "prompt": {},
    "all seen": {"causal": False, "cached": 56},
    "chunk over a longer cache": {"tokens": 24, "cached": 100},
    "values as wide as keys": {"value": 32},
    "wide values": {"value": 64},
    "no rotated part": {"rope": 0},
    "one buffer": {"joined": True},
    "padding": {"mask": "bool"},
    "numbers added": {"mask": "float"},
    "padding alone": {"mask": "bool", "causal": False, "tokens": 24, "cached": 100},
}


def _call(case: dict[str, Any]) -> Attention:
    arguments: dict[str, Any] = {"dtype": torch.float32, **case}
    return call_of(**arguments)


def _double(call: Attention) -> Attention:
    parts = {name: x.double() if x.is_floating_point() else x for name, x in given(call).items()}
    positional: list[Any] = [parts.get(name) for name in (*NAMES, "mask", "sinks", "lengths", "block_table")]
    return Attention(*positional, scale=call.scale, causal=call.causal, form=call.form)


def expected_gradients(call: Attention, grad_o: Tensor, wanted: list[str]) -> dict[str, Tensor]:
    """By autograd of the definition."""
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in given(call).items()}
    operands: list[Any] = [leaves.get(name) for name in OPERANDS]
    o, _ = latent_attention(*operands, scale=call.scale, causal=call.causal)
    return dict(zip(wanted, torch.autograd.grad(o, [leaves[name] for name in wanted], grad_o.double()), strict=True))


@pytest.mark.parametrize("small", [False, True], ids=["whole", "blocks of five queries, two heads at a time"])
@pytest.mark.parametrize("label", CASES)
def test_results_and_gradients(label: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(torch.float32, **CASES[label])
    if small:
        monkeypatch.setattr(attention_rows, "ROWS", 5)
        monkeypatch.setattr(attention_rows, "SCORES", 2 * 5 * call.width)
    exact = _double(call)
    assert BLOCKED.declines(call) is None
    o, lse = BLOCKED.run(call)
    want, want_lse = run_attention(exact)
    assert relative_error(o, want) < 1e-6 and relative_error(lse, want_lse) < 1e-6

    grad_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    wanted = [name for name, x in given(call).items() if x.is_floating_point()]
    have = run_attention_backward(call, o, grad_o, None, wanted)
    gradients = expected_gradients(exact, grad_o, wanted)
    for name in wanted:
        assert relative_error(have[name], gradients[name]) < 5e-6, name


def test_queries_that_see_nothing() -> None:
    """They give 0 and +inf, and no gradient; a row hidden by the lowest number instead is an average."""
    call = call_of(torch.float32, mask="bool")
    assert call.mask is not None
    call.mask[..., 3, :] = False
    o, lse = BLOCKED.run(call)
    assert o[:, 3].eq(0).all() and lse[..., 3].eq(torch.inf).all()
    have = run_attention_backward(call, o, torch.ones_like(o), None, ["q", "latent"])
    assert have["q"][:, 3].eq(0).all() and have["latent"].isfinite().all()

    lowest = torch.zeros(call.mask.shape).masked_fill_(~call.mask, torch.finfo(torch.float32).min)
    call = call_of(torch.float32, causal=False)
    object.__setattr__(call, "mask", lowest)
    o, lse = BLOCKED.run(call)
    want, _ = run_attention(_double(call))
    assert relative_error(o, want) < 1e-6
    have = run_attention_backward(call, o, torch.ones_like(o), None, ["latent"])
    assert relative_error(have["latent"], _gradient_through_softmax(call)) < 5e-6


def _gradient_through_softmax(call: Attention) -> Tensor:
    """That of the latent, of the sum of o. The definition takes an lse, which forgets its sum beside such a mask."""
    parts = {name: x.detach().double() for name, x in given(call).items()}
    latent = parts["latent"].requires_grad_()
    scores = torch.einsum("bthn,hnr,bsr->bhts", parts["q"], parts["w_uk"], latent)
    scores = scores + torch.einsum("bthd,bsd->bhts", parts["q_rope"], parts["k_rope"])
    weights = (call.scale * scores + parts["mask"]).softmax(-1)
    o = torch.einsum("bhts,bsr,hvr->bthv", weights, latent, parts["w_uv"])
    (found,) = torch.autograd.grad(o.sum(), latent)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_fp32(dtype: torch.dtype) -> None:
    call = call_of(dtype)
    o, _ = BLOCKED.run(call)
    want, _ = run_attention(_double(call))
    assert o.dtype is dtype and relative_error(o, want.to(dtype)) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"dtype": torch.float64}, "fp64"),
        ({"form": "absorbed"}, "the latent itself"),
        ({"sinks": True}, "sinks"),
        ({"lengths": (3, 40)}, "lengths"),
        ({"tokens": 50, "cached": 40}, "more queries"),
    ],
)
def test_declines(case: dict[str, Any], reason: str) -> None:
    have = BLOCKED.declines(_call(case))
    assert have is not None and reason in have


def test_op_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op itself asks it."""
    calls, run = list[Attention](), BLOCKED.run

    def counted(call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        calls.append(call)
        return run(call, scratch)

    monkeypatch.setattr(BLOCKED, "run", counted)
    monkeypatch.setattr(SMALL, "declines", lambda call: "not asked here")
    call = call_of(torch.float16)
    assert choose_attention(call) is BLOCKED
    q = call.q.clone().requires_grad_()
    operands: list[Tensor | None] = [q, *(getattr(call, name) for name in NAMES[1:]), *(None,) * 5]
    options = {"scale": call.scale, "causal": call.causal, "form": call.form}
    o, _ = torch.ops.kdacompile.mla(*operands, **options, out_dtype=None)
    o.sum().backward()
    assert len(calls) == 1
