"""Prefill of MLA through cuDNN: what is handed to it and made of what it gives, here with torch in cuDNN's place; on a
GPU the whole of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.compat import cudnn
from kdacompile.lowering.cudnn import CudnnAttention
from kdacompile.lowering.run_attention import Attention, run_attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops.fused import FusedAttention
from kdacompile.ops.kernels import mla_backward_kernel
from kdacompile.patterns.mla.oracle import latent_attention
from tests.compare import relative_error
from tests.ops.mla_cases import OPERANDS, make_mla

HALF = torch.bfloat16
NAMES = OPERANDS[:6]


def call_of(dtype: torch.dtype = torch.float64, *, joined: bool = False, **case: Any) -> Attention:
    """As many queries as tokens, expanded; ``joined``: both parts of the queries, and of the weights, in one buffer."""
    sizes: dict[str, Any] = {"tokens": 40, "cached": 40, "causal": True, "form": "expanded"}
    sizes |= {"nope": 24, "rope": 8, "value": 16, **case}
    made = make_mla(**sizes, dtype=dtype)
    call = Attention(*made.positional, scale=made.scale, causal=made.causal, form=made.form, out_dtype=dtype)
    if not joined:
        return call
    assert call.q_rope is not None and call.w_uk is not None and call.w_uv is not None
    nope = call.q.shape[-1]
    queries, weight = torch.cat([call.q, call.q_rope], -1), torch.cat([call.w_uk, call.w_uv], 1)
    parts = {"q": queries[..., :nope], "q_rope": queries[..., nope:]}
    return replace(call, **parts, w_uk=weight[:, :nope], w_uv=weight[:, nope:])


def reference(call: Attention) -> tuple[Tensor, Tensor]:
    return latent_attention(*(getattr(call, name) for name in NAMES), scale=call.scale, causal=call.causal)


def _scores(q: Tensor, k: Tensor, *, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf) if causal else scores


def _attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal=causal, scale=scale)
    return scores.softmax(-1) @ v, scores.logsumexp(-1).float()


def _gradients(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """As cuDNN makes them: from the results that it is given, whatever else they were made of."""
    assert o.shape == grad_o.shape and lse.shape == o.shape[:3]
    p = (_scores(q, k, causal=causal, scale=scale) - lse.unsqueeze(-1)).exp()
    scores = p * (grad_o @ v.mT - (grad_o * o).sum(-1, keepdim=True)) * scale
    return scores @ k, scores.mT @ q, p.mT @ grad_o


@pytest.fixture
def torch_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "attention", _attention)
    monkeypatch.setattr(cudnn, "attention_gradients", _gradients)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_buffer": {"joined": True},
    "no_positions": {"rope": 0},
    "odd_sizes": {"nope": 5, "rope": 3, "value": 7, "rank": 9},
    "not_causal": {"causal": False, "tokens": 7},
    "chunk": {"tokens": 7},
    "last_chunk": {"tokens": 39, "joined": True},
}


@pytest.mark.usefixtures("torch_instead")
@pytest.mark.parametrize("label", VARIANTS)
def test_numbers(label: str) -> None:
    call = call_of(**VARIANTS[label])
    have = CudnnAttention().run(call, Scratch(poison=True))
    for x, y in zip(have, reference(call), strict=True):
        assert x.is_contiguous()
        assert relative_error(x, y) < 1e-7


@pytest.mark.usefixtures("torch_instead")
@pytest.mark.parametrize("label", VARIANTS)
def test_gradients(label: str) -> None:
    call = call_of(**VARIANTS[label])
    o, lse = run_attention(call)
    grad_o = torch.randn_like(o)
    operands = [getattr(call, name) for name in OPERANDS]
    wanted = [x is not None and name in NAMES for name, x in zip(OPERANDS, operands, strict=True)]
    options: dict[str, Any] = {"scale": call.scale, "causal": call.causal, "form": call.form, "wanted": wanted}
    served = FusedAttention(lambda _: None, lambda _: CudnnAttention())
    have = served.backward(grad_o, None, o, lse, *operands, **options)
    want = mla_backward_kernel(grad_o, None, o, lse, *operands, **options)
    for x, y in zip(have, want, strict=True):
        assert relative_error(x, y) < 1e-6  # heads' keys are summed in fp32


def test_queries_in_one_buffer_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def watch(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(q)
        return _attention(q, k, v, **options)

    monkeypatch.setattr(cudnn, "attention", watch)
    call = call_of(joined=True)
    CudnnAttention().run(call)
    assert seen[0].data_ptr() == call.q.data_ptr()


DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": torch.float32}, "one dtype"),
    "mask": ({"mask": "bool"}, "mask"),
    "sinks": ({"sinks": True}, "sinks"),
    "lengths": ({"lengths": (3, 40)}, "lengths"),
    "absorbed": ({"form": "absorbed"}, "latent itself"),
    "no_weights": ({"weights": False, "form": "auto"}, "latent itself"),
    "more_queries": ({"cached": 7}, "more queries than tokens"),
    "cpu": ({}, "not on a cuda device"),
}


@pytest.mark.parametrize("label", DECLINED)
def test_declines(label: str) -> None:
    case, reason = DECLINED[label]
    arguments: dict[str, Any] = {"dtype": HALF, **case}
    have = CudnnAttention().declines(call_of(**arguments))
    assert have is not None and reason in have


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "bound"), [(HALF, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope": 0},
        {"causal": False, "tokens": 96},
        {"joined": True},
        {"tokens": 96},
        {"tokens": 299},
        {"batch": 2, "tokens": 33},
    ],
    ids=str,
)
def test_on_a_gpu(change: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    sizes: dict[str, Any] = {"tokens": 300, "cached": 300, "heads": 4, "nope": 128, "rope": 64}
    sizes |= {"rank": 512, "value": 128, **change}
    exact = call_of(torch.float64, **sizes)
    shrunk = replace(exact, w_uk=_small(exact.w_uk), w_uv=_small(exact.w_uv), scale=192**-0.5)
    names = [name for name in NAMES if getattr(shrunk, name) is not None]
    call = replace(shrunk, out_dtype=dtype, **{name: getattr(shrunk, name).to("cuda", dtype) for name in names})
    kernels = CudnnAttention()
    if kernels.declines(call) is not None:
        pytest.skip("this GPU's cuDNN does not take such heads")
    leaves = [getattr(call, name).double().requires_grad_() for name in names]
    exact = replace(call, **dict(zip(names, leaves, strict=True)))
    want, want_lse = reference(exact)
    o, lse = kernels.run(call, Scratch(poison=True))
    assert relative_error(o, want) < bound
    assert relative_error(lse, want_lse) < bound
    grad_o = torch.randn_like(o)
    have = kernels.gradients(call, o, lse, grad_o, names)
    for name, expected in zip(names, torch.autograd.grad(want, leaves, grad_o.double()), strict=True):
        assert relative_error(have[name], expected) < 2 * bound, name


def _small(weight: Tensor | None) -> Tensor:
    assert weight is not None
    return weight * weight.shape[-1] ** -0.5
