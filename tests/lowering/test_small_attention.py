"""Small calls of MLA in C: both results against fp64, whatever the layout; and the op that remembers them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kdacompile.errors import KdaError
from kdacompile.lowering.cpu import compiler, small_attention
from kdacompile.lowering.cpu.attention import BLOCKED, choose_attention
from kdacompile.lowering.cpu.small_attention import SMALL
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops.dispatch import Kind
from kdacompile.ops.kernels import run_mla
from tests.compare import relative_error
from tests.ops.mla_cases import MlaCase, make_mla

CASES: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1, "cached": 1},
    "two tokens": {"tokens": 2, "cached": 2, "causal": True},
    "three tokens": {"tokens": 3, "cached": 3, "causal": True},
    "one token, whole vectors": {"tokens": 1, "cached": 1, "nope": 32, "rope": 16, "rank": 64, "value": 32},
    "step": {"tokens": 1},
    "steps of four": {"tokens": 4, "causal": True},
    "prompt": {"tokens": 40, "cached": 40, "causal": True},
    "prompt of seventeen": {"tokens": 17, "cached": 17, "causal": True, "batch": 1},
    "chunk over a longer cache": {"tokens": 24, "cached": 100, "causal": True},
    "more queries than tokens": {"tokens": 20, "cached": 9, "causal": True},
    "no rotated part": {"rope": 0},
    "wide": {"nope": 32, "rope": 16, "rank": 48, "value": 64},
    "one head": {"heads": 1, "tokens": 9},
    "latent alone": {"weights": False},
    "latent alone, no rotated part": {"weights": False, "rope": 0, "tokens": 1},
    "padding": {"mask": "bool"},
    "numbers added": {"mask": "float"},
    "padding of a prompt": {"mask": "bool", "tokens": 30, "cached": 30, "causal": True},
    "sinks": {"sinks": True},
    "sinks and padding": {"sinks": True, "mask": "bool", "tokens": 12},
}
pytestmark = pytest.mark.skipif(small_attention._kernel() is None, reason="no C compiler")  # pyright: ignore[reportPrivateUsage]


def call_of(case: MlaCase, dtype: torch.dtype = torch.float32) -> Attention:
    operands: tuple[Any, ...] = case.positional
    tensors: list[Any] = [x.to(dtype) if x is not None and x.is_floating_point() else x for x in operands]
    return Attention(*tensors, scale=case.scale, causal=case.causal, form=case.form)


def double(call: Attention) -> MlaCase:
    """The same numbers in fp64."""
    tensors = {name: getattr(call, name) for name in make_mla().tensors}
    wide = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in tensors.items()}
    return MlaCase(wide, scale=call.scale, causal=call.causal)


def check(call: Attention, tolerance: float = 2e-6) -> None:
    assert choose_attention(call) is SMALL
    found, expected = SMALL.run(call), double(call).oracle()
    for have, want, result in zip(found, expected, call.results, strict=True):
        assert (tuple(have.shape), have.dtype) == result and have.is_contiguous()
        finite = want.isfinite()
        assert torch.equal(have.isfinite(), finite) and torch.equal(have[~finite].double(), want[~finite].double())
        assert relative_error(have[finite], want[finite]) < (tolerance if have.dtype is call.out_dtype else 2e-6)


@contextmanager
def filled_memory() -> Generator[None]:
    """New memory holds NaN, the kernel's own too."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("label", CASES)
def test_results(label: str, form: str) -> None:
    case = CASES[label]
    if form == "expanded" and case.get("weights") is False:
        form = "auto"
    with filled_memory():
        check(call_of(make_mla(**case, form=form)))


@pytest.mark.parametrize("causal", [True, False])
def test_a_long_prompt(causal: bool) -> None:
    sizes: dict[str, Any] = {"nope": 32, "rope": 16, "rank": 64, "value": 40}
    with filled_memory():
        check(call_of(make_mla(tokens=300, cached=300, causal=causal, form="expanded", **sizes)))


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_half_precision_computes_in_fp32(label: str, dtype: torch.dtype, rounding: float) -> None:
    check(call_of(make_mla(**CASES[label]), dtype), rounding)
    check(replace(call_of(make_mla(**CASES[label]), dtype), out_dtype=torch.float32))


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_any_strides(form: str) -> None:
    """Turned, every second element, shared along a dimension, and not at a multiple of any register."""
    call = call_of(make_mla(tokens=7, cached=19, mask="float", causal=True, form=form))
    names = ("q", "q_rope", "latent", "k_rope", "w_uk", "w_uv", "mask")
    for turned in (
        {name: _turned(getattr(call, name)) for name in names},
        {n: _spread(getattr(call, n)) for n in names},
    ):
        check(replace(call, **turned))
    assert call.mask is not None
    for shape in ((1, 1, 1, 19), (2, 1, 1, 19), (1, 3, 1, 19), (1, 1, 7, 19)):
        part = call.mask[: shape[0], : shape[1], : shape[2]]
        check(replace(call, mask=part))
        check(replace(call, mask=part > 0))
    check(replace(call, mask=call.mask[:1, :1, :1].expand(2, 3, 7, 19)))


def _turned(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _spread(x: Tensor) -> Tensor:
    memory = torch.full((2 * x.numel() + 1,), torch.nan)
    return memory[1::2].view(x.shape).copy_(x)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_what_is_hidden(form: str) -> None:
    """Rows that see nothing give 0 and +inf; the lowest number hides as -inf does, and hides nothing if it is all."""
    call = call_of(make_mla(tokens=9, cached=21, mask="bool", sinks=True, form=form))
    assert call.mask is not None
    call.mask[:, :, 2] = False
    call.mask[:, :, 3, 1:] = False
    call.mask[:, :, 3, 0] = True
    check(call)
    o, lse = SMALL.run(call)
    assert o[:, 2].eq(0).all() and lse[:, :, 2].eq(torch.inf).all()
    hidden = torch.zeros(call.mask.shape).masked_fill_(~call.mask, -torch.inf)
    for mine, alike in zip(SMALL.run(replace(call, mask=hidden)), (o, lse), strict=True):
        assert torch.equal(mine, alike)
    lowest = torch.zeros(call.mask.shape).masked_fill_(~call.mask, torch.finfo(torch.float32).min)
    call = replace(call, mask=lowest, sinks=None)
    found, expected = SMALL.run(call)[0], run_mla(call)[0]
    assert relative_error(found, expected) < 2e-6  # in fp32, where the row that sees nothing is an average


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_large_and_strange_numbers(form: str) -> None:
    """Scores far apart stay right, NaN reaches every query that sees it and no other."""
    call = call_of(make_mla(tokens=12, cached=12, causal=True, form=form))
    check(replace(call, q=30 * call.q), 2e-5)
    latent = call.latent.clone()
    latent[0, 10, 3] = torch.nan
    o, lse = SMALL.run(replace(call, latent=latent))
    assert lse[0, :, 10:].isnan().all() and o[0, 10:].isnan().all() and o[1].isfinite().all()
    assert lse[0, :, :10].isfinite().all() and lse[1].isfinite().all()
    mask = torch.full((1, 1, 1, 12), -torch.inf)
    mask[..., 0] = torch.nan
    o, lse = SMALL.run(replace(call, mask=mask))
    assert o.isnan().all() and lse.isnan().all()


@pytest.mark.parametrize("sink", [-torch.inf, -200.0, 0.0, 60.0, torch.inf])
def test_sinks_far_away(sink: float) -> None:
    call = call_of(make_mla(sinks=True))
    assert call.sinks is not None
    check(replace(call, sinks=torch.full_like(call.sinks, sink)))


def test_same_bits_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(make_mla(batch=3, tokens=40, cached=40, heads=5, causal=True))
    threads, results = torch.get_num_threads(), list[tuple[Tensor, Tensor]]()
    try:
        for count, task in ((1, small_attention.TASK), (2, 1), (3, 60_000)):
            torch.set_num_threads(count)
            monkeypatch.setattr(small_attention, "TASK", task)
            results.append(SMALL.run(call))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ({}, {"dtype": torch.float64}, "dtype"),
        ({"lengths": (3, 40)}, {}, "every time"),
        ({"lengths": (3, 40), "page": 10}, {}, "every time"),
        ({"cached": 4000}, {}, "not a small call"),
        ({"tokens": 3000, "cached": 3000, "form": "expanded", "heads": 2, "rank": 512}, {}, "not a small call"),
    ],
)
def test_declines(case: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    call = call_of(make_mla(**case), **changes)
    have = SMALL.declines(call)
    assert have is not None and reason in have and choose_attention(call) is not SMALL


# -- the op -----------------------------------------------------------------------------------------------------------


def op(call: Attention) -> tuple[Tensor, Tensor]:
    tensors = [getattr(call, name) for name in make_mla().tensors]
    options = {"scale": call.scale, "causal": call.causal, "form": call.form, "out_dtype": call.out_dtype}
    return torch.ops.kdacompile.mla.default(*tensors, None, **options)


def assert_right(call: Attention) -> None:
    for have, want in zip(op(call), double(call).oracle(), strict=True):
        assert relative_error(have, want) < 2e-6


@contextmanager
def again() -> Generator[list[Any]]:
    """Calls that were like one before."""
    with patch.object(Kind, "run", autospec=True, side_effect=Kind.run) as run:
        yield run.call_args_list


def test_a_growing_cache_is_one_kind_of_call() -> None:
    whole = call_of(make_mla(tokens=1, cached=64, heads=2, rank=12))
    assert whole.k_rope is not None
    with again() as known:
        for cached in (1, 2, 3, 40, 64, 5):
            assert_right(replace(whole, latent=whole.latent[:, :cached], k_rope=whole.k_rope[:, :cached]))
    assert len(known) >= 5  # all but the first


def test_a_kind_ends_where_calls_are_large() -> None:
    whole = call_of(make_mla(tokens=1, cached=9000, heads=2, rank=14))
    assert whole.k_rope is not None
    for cached in (9, 9000, 10):
        call = replace(whole, latent=whole.latent[:, :cached], k_rope=whole.k_rope[:, :cached])
        with again() as known:
            assert_right(call)
            assert_right(call)
        assert bool(known) == (cached < 9000)


def test_operands_that_do_not_fit_are_refused() -> None:
    call = call_of(make_mla(tokens=1, cached=33, heads=2, mask="float"))
    assert_right(call)
    assert_right(call)
    assert call.k_rope is not None and call.mask is not None
    with pytest.raises(KdaError, match="k_rope"):
        op(replace(call, k_rope=call.k_rope[:, :32]))
    with pytest.raises(KdaError, match="mask"):
        op(replace(call, mask=call.mask[..., :32]))
    with pytest.raises(KdaError, match="latent"):
        op(replace(call, latent=call.latent[:1]))


def test_results_are_fresh_and_options_count() -> None:
    call = call_of(make_mla(tokens=5, cached=5, heads=2))
    kept = op(call)
    first = [x.clone() for x in kept]
    op(replace(call, q=call.q + 1))
    assert all(torch.equal(x, y) for x, y in zip(first, kept, strict=True))
    for other in (replace(call, causal=True), replace(call, scale=0.7), replace(call, form="absorbed")):
        assert_right(other)


def test_gradients_are_those_of_whole_rows() -> None:
    call = call_of(make_mla(tokens=7, cached=7, heads=2, causal=True))
    assert choose_attention(call) is SMALL
    leaf = call.q.clone().requires_grad_()
    op(replace(call, q=leaf))[0].sum().backward()
    exact = double(call)
    wide = exact.tensors["q"].requires_grad_()
    exact.oracle()[0].sum().backward()
    assert leaf.grad is not None and wide.grad is not None and relative_error(leaf.grad, wide.grad) < 5e-6
    with torch.no_grad():
        assert_right(call)  # an op that was differentiated is remembered, too


def test_a_proof_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(make_mla())
    with compiler.left_uncompiled():
        assert SMALL.declines(call) is None  # it is there
    monkeypatch.setattr(compiler, "_ready", set())
    with compiler.left_uncompiled():
        assert SMALL.declines(call) is not None


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_attention, "_kernel", lambda: None)
    call = call_of(make_mla(tokens=12, cached=12, causal=True, form="expanded"))
    assert choose_attention(call) is BLOCKED
