"""The MLA op: numbers against the fp64 oracle, gradients, what the dispatcher sees, and its typed errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile import ops
from kdacompile.lowering import run_attention
from kdacompile.lowering.attention_calls import absorb, heads_through
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops import errors
from kdacompile.ops.fused import FusedAttention
from kdacompile.patterns.mla.oracle import latent_attention
from tests.ops.mla_cases import OPERANDS, MlaCase, make_mla

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "prefill": {"causal": True, "tokens": 300, "cached": 300},
    "longer_queries_than_cache": {"causal": True, "tokens": 9, "cached": 4},
    "no_positions": {"rope": 0},
    "bool_mask": {"mask": "bool"},
    "float_mask": {"mask": "float", "causal": True},
    "sinks": {"sinks": True},
    "lengths": {"lengths": (0, 33), "sinks": True},
    "lengths_causal": {"lengths": (3, 70), "causal": True},
    "pages": {"page": 16, "lengths": (0, 65), "causal": True},
    "odd_pages": {"page": 7, "lengths": (70, 21)},
    "whole_pages": {"page": 64, "cached": 128},
    "one_huge_page": {"page": 9000, "cached": 9000, "lengths": (8000, 5), "tokens": 1},
    "absorbed_by_the_caller": {"weights": False, "lengths": (9, 70), "causal": True},
}


def finite(lse: Tensor) -> Tensor:
    return torch.where(lse.isinf(), 0.0, lse)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("label", VARIANTS)
def test_oracle(label: str, form: str) -> None:
    variant = VARIANTS[label]
    case = make_mla(**variant, form=form if variant.get("weights", True) else "auto")
    o, lse = case.run()
    want_o, want_lse = case.oracle()
    torch.testing.assert_close(o, want_o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("mask", ["", "bool", "float"])
@pytest.mark.parametrize("label", [label for label, variant in VARIANTS.items() if "lengths" in variant])
def test_requests_alone_and_together(label: str, mask: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU requests of very different lengths are walked one by one, others together: one result."""
    monkeypatch.setattr(run_attention, "REQUEST", -(1 << 20) if alone else 1 << 20)
    variant: dict[str, Any] = {**VARIANTS[label], "mask": mask}
    if label == "pages":
        variant["cached"] = 80  # a mask covers whole pages
    case = make_mla(**variant)
    for x, want in zip(case.run(), case.oracle(), strict=True):
        torch.testing.assert_close(x, want, rtol=1e-10, atol=1e-12)


def test_long_requests_among_short_ones_are_walked_alone() -> None:
    def walked(*lengths: int) -> list[int] | None:
        case = make_mla(batch=len(lengths), cached=4096, lengths=lengths, tokens=1)
        call = run_attention.Attention(*case.positional, scale=1.0, causal=False, form="auto", out_dtype=torch.float64)
        alone = run_attention.requests(call)
        return None if alone is None else [one.width for one in alone]

    assert walked(0, 1000, 4096, 777) == [0, 1000, 4096, 777]
    assert walked(300) == [300]
    assert walked(64, 64, 63, 60) is None


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_rounding(dtype: torch.dtype, bound: float, form: str) -> None:
    """Operands are read in their own precision; everything in between is float32."""
    case = make_mla(dtype=dtype, form=form, rank=64, nope=32, value=32, causal=True)
    o, lse = case.run()
    assert o.dtype is dtype and lse.dtype is torch.float32
    want, want_lse = case.oracle()
    assert float((o.double() - want).norm() / want.norm()) < bound
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_a_query_that_sees_nothing() -> None:
    case = make_mla(lengths=(0, 2), causal=True, tokens=4)
    o, lse = case.run()
    assert torch.equal(o[0], torch.zeros_like(o[0])) and bool(lse[0].isposinf().all())
    assert bool(lse[1, :, :2].isposinf().all()) and bool(lse[1, :, 2:].isfinite().all())


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("label", ["plain", "prefill", "no_positions", "float_mask", "sinks", "lengths"])
def test_gradients(label: str, form: str) -> None:
    case = make_mla(**VARIANTS[label], form=form)
    names = [n for n, x in case.tensors.items() if x is not None and x.is_floating_point()]
    leaves = {n: case.tensors[n].clone().requires_grad_() for n in names}
    stale = {n: x.clone().requires_grad_() for n, x in case.stale.items()}
    own = {**leaves, **stale}
    o, lse = case.with_(tensors={**case.tensors, **leaves}, stale=stale).run()
    generator = torch.Generator().manual_seed(1)
    cotangent = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (o, lse)]

    def loss(o: Tensor, lse: Tensor) -> Tensor:
        return (o * cotangent[0]).sum() + (finite(lse) * cotangent[1]).sum()

    have = torch.autograd.grad(loss(o, lse), [own[n] for n in names])
    want = torch.autograd.grad(
        loss(*case.with_(tensors={**case.tensors, **leaves}).oracle()), [leaves[n] for n in names]
    )
    for name, x, y in zip(names, have, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_rows_hidden_by_the_lowest_number(form: str) -> None:
    """Models hide padded rows with finfo.min rather than -inf: softmax then averages, and so do its gradients."""
    case = make_mla(tokens=3, cached=9, form=form)
    mask = torch.zeros(2, 1, 3, 9, dtype=torch.float64)
    mask[0, :, 1] = torch.finfo(torch.float64).min
    weights = case.tensors["w_uv"].clone().requires_grad_()
    o, _ = case.with_tensors(mask=mask, w_uv=weights).run()
    average = torch.einsum("hvr,bsr->bhsv", weights, case.tensors["latent"])[0].mean(1)
    torch.testing.assert_close(o[0, 1], average)
    have, want = (torch.autograd.grad(x.square().sum(), weights, retain_graph=True)[0] for x in (o[0, 1], average))
    torch.testing.assert_close(have, want)


OPCHECKED = {
    "plain": make_mla(),
    "sixteen_bit": make_mla(dtype=torch.bfloat16, mask="float", sinks=True),
    "pages": make_mla(page=16, lengths=(3, 65), rope=0),
    "bare": make_mla(weights=False, mask="bool"),
    "empty": make_mla(tokens=0),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("label", OPCHECKED)
def test_opcheck(label: str, grad: bool) -> None:
    case = OPCHECKED[label]
    if grad and case.tensors["block_table"] is not None:
        pytest.skip("a paged cache has no gradients")
    tensors = [
        x.detach().clone().requires_grad_(grad) if x is not None and x.is_floating_point() else x
        for x in case.positional
    ]
    torch.library.opcheck(torch.ops.kdacompile.mla.default, (*tensors, None), case.options)


def test_opcheck_backward() -> None:
    case = make_mla(sinks=True)
    o, lse = case.run()
    wanted = [x is not None for x in case.positional[:8]]
    options = {"scale": 0.3, "causal": True, "form": "auto", "wanted": wanted}
    arguments = (torch.ones_like(o), None, o, lse, *case.positional, None)
    torch.library.opcheck(torch.ops.kdacompile.mla_backward.default, arguments, options)


def test_compiles_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda case: case.run()[0], backend="aot_eager", fullgraph=True, dynamic=True)
    for cached in (40, 41, 57):
        case = make_mla(cached=cached, causal=True)
        torch.testing.assert_close(compiled(case), case.oracle()[0])


def test_functional() -> None:
    case = make_mla(causal=True)
    t = case.tensors
    o, lse = ops.mla(*(t[n] for n in ("q", "q_rope", "latent", "k_rope", "w_uk", "w_uv")), causal=True, return_lse=True)
    want, want_lse = case.with_(scale=10**-0.5).oracle()
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("dims", [3, 4])
def test_decode_in_flash_mla_s_terms(dims: int) -> None:
    case = make_mla(weights=False, page=16, lengths=(0, 65), causal=True, tokens=2)
    q, q_rope, latent, k_rope, *_, lengths, table = case.positional
    cache = torch.cat([latent, k_rope], -1)
    cache = cache.unsqueeze(2) if dims == 4 else cache
    joined = torch.cat([q, q_rope], -1)
    o = ops.mla_decode(joined, cache, rank=10, scale=0.3, lengths=lengths, block_table=table)
    torch.testing.assert_close(o, case.oracle()[0])


BAD: dict[str, tuple[MlaCase, type[errors.OpError]]] = {
    "rank": (make_mla().with_tensors(q=torch.zeros(2, 3, 4)), errors.RankError),
    "rope_alone": (make_mla().with_tensors(q_rope=None), errors.LatentWeightsError),
    "one_weight": (make_mla().with_tensors(w_uv=None), errors.LatentWeightsError),
    "no_weights": (make_mla().with_tensors(w_uv=None, w_uk=None), errors.LatentWeightsError),
    "latent_batch": (make_mla().with_tensors(latent=torch.zeros(3, 70, 10)), errors.SizeError),
    "mask_size": (make_mla().with_tensors(mask=torch.zeros(2, 1, 5, 69)), errors.SizeError),
    "mask_dtype": (make_mla().with_tensors(mask=torch.zeros(2, 1, 5, 70, dtype=torch.int32)), errors.DtypeError),
    "lengths": (make_mla().with_tensors(lengths=torch.tensor([3, 71])), errors.PagedCacheError),
    "table_dtype": (make_mla(page=16).with_tensors(block_table=torch.zeros(2, 5)), errors.DtypeError),
    "form": (make_mla(form="naive"), errors.OptionError),
    "nothing_to_expand": (make_mla(weights=False, form="expanded"), errors.OptionError),
}


@pytest.mark.parametrize("label", BAD)
def test_errors(label: str) -> None:
    case, expected = BAD[label]
    with pytest.raises(expected) as caught:
        case.run()
    assert isinstance(caught.value, (ValueError, TypeError))


def test_no_gradients_from_pages() -> None:
    case = make_mla(page=16)
    latent = case.tensors["latent"].nan_to_num().requires_grad_()
    o, _ = case.with_tensors(latent=latent).run()
    with pytest.raises(errors.PagedCacheError):
        o.sum().backward()


class Recorder:
    """An implementation that takes calls on a latent without a mask, by the oracle, in the absorbed form."""

    name = "recorder"

    def declines(self, call: Attention) -> str | None:
        return None if call.absorbed and call.mask is None else "not its business"

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        return absorb(call, self.attend, scratch or Scratch())

    def attend(self, call: Attention, scratch: Scratch) -> tuple[Tensor, Tensor]:
        assert call.w_uk is None and call.w_uv is None
        tensors = [getattr(call, name) for name in OPERANDS]
        o, lse = latent_attention(*tensors, scale=call.scale, causal=call.causal)
        return o.to(call.out_dtype), lse


@pytest.mark.parametrize(
    "change", [{}, {"weights": False}, {"mask": "bool"}, {"form": "expanded"}, {"tokens": 0}], ids=str
)
def test_a_device_s_kernels_and_the_rest(change: dict[str, Any]) -> None:
    case = make_mla(**change, causal=True)
    asked: list[str | None] = []

    def choose(call: Attention) -> Recorder | None:
        asked.append(Recorder().declines(call))
        return Recorder() if asked[-1] is None else None

    have = FusedAttention(choose).attention(*case.positional, **case.options)
    for x, y in zip(have, case.oracle(), strict=True):
        torch.testing.assert_close(x, y)
    assert asked == ([] if "tokens" in change else [None if change in ({}, {"weights": False}) else "not its business"])


def test_the_weights_around_a_kernel() -> None:
    """Views of any strides, each head through its own weights, the result contiguous."""
    x = torch.randn(2, 3, 8, 4, dtype=torch.float64)[:, :, ::2]
    weight = torch.randn(4, 9, 5, dtype=torch.float64)[:, 2:6]
    have = heads_through(x, weight, torch.float32, Scratch())
    assert have.is_contiguous() and have.dtype is torch.float32
    torch.testing.assert_close(have.double(), torch.einsum("bthi,hio->btho", x, weight), rtol=1e-5, atol=1e-5)
