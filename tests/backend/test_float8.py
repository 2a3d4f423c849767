"""8-bit floating point beside and inside regions: torch knows no dtype that it and another promote to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only  # torch-private: what the class's own dispatch needs

from kdacompile.explainer import explain
from tests.backend.layers import delta_arguments, gated_linear_parallel
from tests.mla.spellings import HEADS, NOPE, RANK, ROPE, VALUE, WIDTH, Naive

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def from_float8(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return gated_linear_parallel(q.float(), k, v, g)


def through_float8(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return gated_linear_parallel(q, k.to(torch.float8_e5m2).float(), v, g)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_query_in_float8(dtype: torch.dtype) -> None:
    q, k, v, g, _ = delta_arguments()
    args = q.to(dtype), k, v, g
    report = explain(from_float8, options={"kda.expect": {"simple_gla": 1}})(*args)
    torch.testing.assert_close(report.result, from_float8(*args), rtol=1e-4, atol=1e-5)


def test_rounding_to_float8_stays() -> None:
    args = delta_arguments()[:4]
    report = explain(through_float8, options={"kda.expect": {"simple_gla": 1}})(*args)
    torch.testing.assert_close(report.result, through_float8(*args), rtol=1e-4, atol=1e-5)


class Quantised(Naive):
    """kv_b_proj in float8, with a scale for each block of 4 x 4 or none."""

    def __init__(self, *, blocks: bool) -> None:
        super().__init__()
        weight = self.kv_b_proj.weight.data
        self.weight8 = nn.Buffer(weight.to(torch.float8_e4m3fn))
        self.scales = nn.Buffer(torch.rand(weight.shape[0] // 4, weight.shape[1] // 4) + 0.5) if blocks else None

    def expand(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight8.float()
        if self.scales is not None:
            blocks = weight.unflatten(0, (-1, 4)).unflatten(-1, (-1, 4)) * self.scales[:, None, :, None]
            weight = blocks.flatten(2).flatten(0, 1)
        nope, v = F.linear(latent, weight).unflatten(-1, (HEADS, -1)).transpose(1, 2).split([NOPE, VALUE], dim=-1)
        return torch.cat([nope, rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), v


@pytest.mark.parametrize("blocks", [False, True])
def test_a_weight_in_float8(blocks: bool) -> None:
    torch.manual_seed(0)
    model, args = Quantised(blocks=blocks), [torch.randn(2, 6, size) for size in (WIDTH, RANK, ROPE)]
    with torch.no_grad():
        report = explain(model)(*args)
        torch.testing.assert_close(report.result, model(*args), rtol=1e-4, atol=1e-5)
    assert report.counts == {"mla": 1}


class Coded(torch.Tensor):
    """A weight of 8-bit integers with a scale for each row, as torchao keeps it: what reads it is given numbers."""

    @staticmethod
    def __new__(cls: type[Coded], codes: Tensor, scales: Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __repr__(
        self, *, tensor_contents: Any = None
    ) -> str:  # a tensor's own looks at numbers, which torch's trace asks stand-ins for
        return f"Coded({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Coded:
        return cls(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scales)
        plain = tree_map_only(Coded, lambda x: x.codes * x.scales, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class ScaledAfter(Coded):
    """Products with the codes, scaled afterwards, as torchao has int8."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return cls.product(args[0], args[1]) if func is F.linear else func(*args, **(kwargs or {}))

    @staticmethod
    def product(x: Tensor, weight: Coded) -> Tensor:
        made = torch.mm(x.reshape(-1, x.shape[-1]), weight.codes.t().to(x.dtype)) * weight.scales.view(-1)
        return made.reshape(*x.shape[:-1], -1)


class RoundedActivations(ScaledAfter):
    @staticmethod
    def product(x: Tensor, weight: Coded) -> Tensor:
        return F.linear((8 * x).round() / 8, weight.codes * weight.scales)


class Shifted(ScaledAfter):
    @staticmethod
    def product(x: Tensor, weight: Coded) -> Tensor:
        return F.linear(x, weight.codes * weight.scales) + weight.scales.view(-1)


class Counting(ScaledAfter):
    """Writes down in a tensor of its own what it has seen."""

    @staticmethod
    def product(x: Tensor, weight: Coded) -> Tensor:
        weight.scales.mul_(1.0)
        return F.linear(x, weight.codes * weight.scales)


def quantised(kind: type[Coded]) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model, args = Naive(), [torch.randn(2, 6, size) for size in (WIDTH, RANK, ROPE)]
    scales = model.kv_b_proj.weight.detach().abs().amax(1, keepdim=True) / 127
    codes = (model.kv_b_proj.weight.detach() / scales).round().to(torch.int8)
    model.kv_b_proj.weight = nn.Parameter(kind(codes, scales), requires_grad=False)
    return model, args


@pytest.mark.parametrize("kind", [Coded, ScaledAfter])
@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_a_quantised_weight_is_dequantised(kind: type[Coded], inner: str) -> None:
    """A tensor subclass around codes and scales, as torchao has them: what it stands for is the op's operand."""
    model, args = quantised(kind)
    with torch.no_grad():
        report = explain(model, options={"kda.inner": inner, "kda.cost_model": False})(*args)
        torch.testing.assert_close(report.result, model(*args), rtol=1e-5, atol=1e-6)
    assert report.counts == {"mla": 1} and not report.rejections, str(report)


@pytest.mark.parametrize("kind", [RoundedActivations, Shifted, Counting])
def test_a_product_that_is_more_than_one_with_a_weight_is_told(kind: type[Coded]) -> None:
    model, args = quantised(kind)
    with torch.no_grad():
        report = explain(model, options={"kda.inner": "eager"})(*args)
        torch.testing.assert_close(report.result, model(*args), rtol=1e-5, atol=1e-6)
    assert not report.matches and [rejection.code for rejection in report.rejections] == ["subclass"], str(report)


def test_a_quantised_weight_is_left_where_gradients_are_asked_for() -> None:
    model, args = quantised(Coded)
    report = explain(model, options={"kda.inner": "eager"})(*args)
    assert not report.matches and [rejection.code for rejection in report.rejections] == ["subclass"], str(report)
