"""Prefill of MLA through torch's FlashAttention on the CPU: both results and all gradients against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdacompile.compat import flash
from kdacompile.lowering.cpu.attention import FLASH, choose_attention
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops.kernels import mla_backward_kernel
from tests.compare import relative_error
from tests.lowering.test_cudnn import NAMES, call_of, reference

CASES: dict[str, dict[str, Any]] = {
    "prompt": {},
    "all seen": {"causal": False, "cached": 56},
    "chunk over a longer cache": {"tokens": 24, "cached": 100},
    "values as wide as keys": {"value": 32},
    "no rotated part": {"rope": 0},
}


def _double(call: Attention) -> Attention:
    given = {name: getattr(call, name) for name in NAMES}
    parts = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return Attention(*parts.values(), *(None,) * 4, scale=call.scale, causal=call.causal, form=call.form)


@pytest.mark.parametrize("label", CASES)
def test_results_and_gradients(label: str) -> None:
    call = call_of(torch.float32, **CASES[label])
    exact = _double(call)
    assert choose_attention(call) is FLASH
    o, lse = FLASH.run(call)
    want, want_lse = reference(exact)
    assert relative_error(o, want) < 1e-6 and relative_error(lse, want_lse) < 1e-6

    grad_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    wanted = [name for name in NAMES if getattr(call, name) is not None]
    have = FLASH.gradients(call, o, lse, grad_o, wanted)
    operands = [getattr(exact, name) for name in NAMES]
    asked = [x is not None for x in operands]
    gradients = mla_backward_kernel(
        grad_o.double(), None, want, want_lse, *operands, *(None,) * 5,
        scale=exact.scale, causal=exact.causal, form=exact.form, wanted=[*asked, False, False],
    )  # fmt: skip
    for name, gradient in zip(wanted, gradients, strict=True):
        assert relative_error(have[name], gradient) < 5e-6, name


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"dtype": torch.float64}, "one dtype"),
        ({"dtype": torch.bfloat16}, "one dtype"),
        ({"form": "absorbed"}, "the latent itself"),
        ({"value": 64}, "these sizes"),
        ({"tokens": 50, "cached": 40}, "more queries"),
    ],
)
def test_declines(case: dict[str, Any], reason: str) -> None:
    have = FLASH.declines(
        call_of(case.get("dtype", torch.float32), **{key: item for key, item in case.items() if key != "dtype"})
    )
    assert have is not None and reason in have


def test_op_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op itself asks it, forward and backward."""
    calls: list[str] = []
    for name in ("attention", "attention_gradients"):
        own = getattr(flash, name)

        def counted(*given: Any, own: Any = own, name: str = name, **options: Any) -> Any:
            calls.append(name)
            return own(*given, **options)

        monkeypatch.setattr(flash, name, counted)
    call = call_of(torch.float32)
    q = call.q.clone().requires_grad_()
    operands = (q, *(getattr(call, name) for name in NAMES[1:]), *(None,) * 5)
    options = {"scale": call.scale, "causal": call.causal, "form": call.form}
    o, _ = torch.ops.kdacompile.mla(*operands, **options, out_dtype=None)
    o.sum().backward()
    assert calls == ["attention", "attention_gradients"]
