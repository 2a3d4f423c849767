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

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Coded:
        return Coded(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Coded(args[0].codes, args[0].scales)
        plain = tree_map_only(Coded, lambda x: x.codes * x.scales, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_a_quantised_weight_is_told() -> None:
    """Nobody looks into a tensor subclass; the report names the product with it."""
    torch.manual_seed(0)
    model, args = Naive(), [torch.randn(2, 6, size) for size in (WIDTH, RANK, ROPE)]
    scales = model.kv_b_proj.weight.detach().abs().amax(1, keepdim=True) / 127
    codes = (model.kv_b_proj.weight.detach() / scales).round().to(torch.int8)
    model.kv_b_proj.weight = nn.Parameter(Coded(codes, scales), requires_grad=False)
    with torch.no_grad():
        report = explain(model, options={"kda.inner": "eager"})(*args)
        torch.testing.assert_close(report.result, model(*args), rtol=1e-5, atol=1e-6)
    assert [rejection.code for rejection in report.rejections] == ["subclass"]
