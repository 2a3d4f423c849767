"""What stands in the place of FLA's functions in its own tests; those need a GPU, this needs neither FLA nor one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.ops import linear_attention
from tests.compare import worst_error
from tests.ops.in_flas_tests import in_place_of


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, lower_bound: float | None = None, use_graph: bool = False,
    max_num_seqs: int | None = None, return_intermediate_states: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    raise AssertionError("FLA's function is called")


def fused_recurrent_gla(q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, reverse: bool = False) -> Any:
    raise AssertionError("FLA's function is called")


def given(length: int = 9, heads: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(0)
    names = {"q": 4, "k": 4, "v": 3, "g": 4}
    return {n: torch.randn(1, length, heads, width) for n, width in names.items()}


def test_arguments_are_those_of_our_op() -> None:
    x, beta, rates, bias = given(), torch.rand(1, 9, 2), torch.randn(2), torch.randn(8)
    ours = in_place_of(chunk_kda)(
        **x, beta=beta, scale=0.3, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        lower_bound=-5.0, A_log=rates, dt_bias=bias, safe_gate=True, use_graph=True,
    )  # fmt: skip
    gate = -5.0 * torch.sigmoid(rates.exp()[:, None] * (x["g"] + bias.view(2, 4)))
    q, k = (F.normalize(x[n], dim=-1) for n in "qk")
    expected = linear_attention(q, k, x["v"], gate, beta, delta=True, scale=0.3, output_final_state=True)
    assert worst_error(ours, expected) < 1e-5


def test_any_of_the_gates_is_the_gate() -> None:
    q, k, v, g = given().values()
    [ours, _] = in_place_of(fused_recurrent_gla)(q, k, v, gk=F.logsigmoid(g))
    assert worst_error(ours, linear_attention(q, k, v, F.logsigmoid(g), delta=False)[0]) < 1e-6


@pytest.mark.parametrize("asked", [{"return_intermediate_states": True}, {"gate_of_tomorrow": True}])
def test_what_has_no_counterpart_fails(asked: dict[str, bool]) -> None:
    with pytest.raises(AssertionError, match=next(iter(asked))):
        in_place_of(chunk_kda)(**given(), beta=torch.rand(1, 9, 2), **asked)
