"""Library functions that torch.compile may not enter: with stand-ins that have their names, signatures and meaning."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from kdacompile.capture import hook, lifting
from kdacompile.report.collect import collecting
from tests.compare import relative_error

HEADS, KEY, VALUE = 2, 16, 8
slack = 1.0


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    return_intermediate_states: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """What flash-linear-attention documents for the name, in plain steps."""
    dtype, q, k, v = v.dtype, q.float(), k.float(), v.float()
    k = k / (k * k).sum(-1, keepdim=True).add(1e-6).sqrt() if use_qk_l2norm_in_kernel else k
    q = q / (q * q).sum(-1, keepdim=True).add(1e-6).sqrt() if use_qk_l2norm_in_kernel else q
    if use_gate_in_kernel:
        bias = kwargs["dt_bias"].view(v.shape[2], -1)
        g = -kwargs["A_log"].exp()[:, None] * torch.nn.functional.softplus(g + bias)
    beta = beta.sigmoid() if use_beta_sigmoid_in_kernel else beta
    state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    state = state.mT if state_v_first and initial_state is not None else state
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        delta = (v[:, t] - (state * k[:, t].unsqueeze(-1)).sum(-2)) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2) * (q.shape[-1] ** -0.5 if scale is None else scale) * slack)
    return torch.stack(out, 1).to(dtype), (state.mT if state_v_first else state) if output_final_state else None


fused_recurrent_kda = types.FunctionType(
    chunk_kda.__code__, globals(), "fused_recurrent_kda", chunk_kda.__defaults__, chunk_kda.__closure__
)


@pytest.fixture(autouse=True)
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("fla")
    module.__dict__["__version__"] = "0.0.test"
    monkeypatch.setitem(sys.modules, "fla", module)
    for fn in (chunk_kda, fused_recurrent_kda):
        monkeypatch.setattr(fn, "__module__", "fla.ops.kda")
        setattr(module, fn.__name__, torch.compiler.disable(fn))
    yield module


def operands(length: int, batch: int = 1) -> list[Tensor]:
    rng = torch.Generator().manual_seed(length)
    q, k, x = (torch.randn(batch, length, HEADS, KEY, generator=rng) for _ in range(3))
    v, beta = torch.randn(batch, length, HEADS, VALUE, generator=rng), torch.randn(batch, length, HEADS, generator=rng)
    return [q, k / KEY**0.5, v, -x.abs(), beta.sigmoid()]


def compiled(fn: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    return torch.compile(fn, backend="kda", fullgraph=fullgraph, options={"kda.inner": "eager"})


def lifted() -> list[str]:
    return [item.verdict.function for item in hook.lifts.known.values() if isinstance(item, lifting.Lifted)]


def test_one_full_graph_for_every_length(fla: Any) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out, state = fla.chunk_kda(
            q * 2, k, v, g=g, beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=None
        )
        return out + state.sum()

    run = compiled(model)
    with collecting() as report:
        for length in (20, 70, 9, 130):
            args = operands(length)
            assert relative_error(run(*args), model(*args)) < 1e-5
    assert counters["stats"]["unique_graphs"] == 2
    assert [(match.pattern, match.mode, match.lifted) for match in report.matches] == [
        ("kda", "sequence", "chunk_kda")
    ] * 2


def test_options_and_states(fla: Any) -> None:
    options = {
        "scale": 0.3,
        "output_final_state": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
    }
    A_log, dt_bias = torch.randn(HEADS), torch.randn(HEADS * KEY)

    def model(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        return fla.chunk_kda(q, k, v, g, beta, initial_state=state, A_log=A_log, dt_bias=dt_bias, **options)

    args = [*operands(12, batch=3), torch.randn(3, HEADS, VALUE, KEY)]
    for have, want in zip(compiled(model)(*args), model(*args), strict=True):
        assert relative_error(have, want) < 1e-5
    assert lifted() == ["chunk_kda"]


def test_one_token(fla: Any) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        return fla.fused_recurrent_kda(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    args = [*operands(1, batch=2), torch.randn(2, HEADS, KEY, VALUE)]
    for have, want in zip(compiled(model)(*args), model(*args), strict=True):
        assert relative_error(have, want) < 1e-5
    assert lifted() == ["fused_recurrent_kda"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_under_autocast(fla: Any, narrow: bool, grad: bool) -> None:
    """q, k and v may come in 16 bits, from projections, or in 32; the verdict is one of its own."""

    def model(*args: Tensor) -> Tensor:
        main = [x.bfloat16() if narrow else x for x in args[:3]]
        return fla.chunk_kda(*main, *args[3:])[0]

    run = compiled(model)
    with torch.set_grad_enabled(grad):
        for enabled in (True, False, True):
            for length in (20, 70):
                args = [x.requires_grad_(grad) for x in operands(length)]
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    have, want = run(*args), model(*args)
                assert have.dtype == want.dtype
                assert relative_error(have, want) < (2e-2 if narrow else 1e-5)
                if grad:
                    pairs = zip(*(torch.autograd.grad(out.square().sum(), args) for out in (have, want)), strict=True)
                    assert max(relative_error(one, other) for one, other in pairs) < (2e-2 if narrow else 1e-4)
    assert lifted() == ["chunk_kda"] * 2


def test_a_library_that_computes_in_16_bits_under_autocast(fla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it returns then is of another dtype: nothing that the op gives."""

    def model(*args: Tensor) -> Tensor:
        return fla.chunk_kda(*args)[0]

    def of_its_own(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        out, state = chunk_kda(q, k, v, g, beta)
        return out @ torch.eye(out.shape[-1]), state

    monkeypatch.setattr(of_its_own, "__module__", "fla.ops.kda")
    monkeypatch.setattr(of_its_own, "__name__", "chunk_kda")
    monkeypatch.setattr(fla, "chunk_kda", torch.compiler.disable(of_its_own))
    args = operands(20)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert relative_error(compiled(model, fullgraph=False)(*args), model(*args)) < 1e-5
    assert not lifted()


def test_another_option_is_left_to_the_library(fla: Any) -> None:
    def model(*args: Tensor) -> Tensor:
        return fla.chunk_kda(*args, return_intermediate_states=True)[0]

    args = operands(20)
    assert relative_error(compiled(model, fullgraph=False)(*args), model(*args)) < 1e-5
    assert not lifted()


def test_a_library_that_computes_something_else(fla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "slack", 1.1)

    def model(*args: Tensor) -> Tensor:
        return fla.chunk_kda(*args)[0]

    args = operands(20)
    assert relative_error(compiled(model, fullgraph=False)(*args), model(*args)) < 1e-5
    assert not lifted()


def test_other_backends_see_the_library(fla: Any) -> None:
    def model(*args: Tensor) -> Tensor:
        return fla.chunk_kda(*args)[0]

    compiled(model)(*operands(20))
    with pytest.raises(Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(*operands(20))
