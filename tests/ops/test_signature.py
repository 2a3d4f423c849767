"""What comes of an operand table: schemas, what is checked of a call, what has gradients."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.operands import Kind, Operand, given, operands, tensors
from kdacompile.ops import errors, signature
from kdacompile.ops.checks import Size, check_operands
from kdacompile.ops.signature import Signature

OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias"
)
OPTIONS = "float scale, bool delta, str gate, str gate_fn, float gate_scale, bool sigmoid_beta, float qk_l2norm_eps"


def test_schemas() -> None:
    assert signature.LINEAR_ATTENTION.schema == (
        f"({OPERANDS}, Tensor? cu_seqlens, *, {OPTIONS}, int chunk_size, ScalarType? out_dtype, "
        'str o_layout="BTHV") -> (Tensor o, Tensor final_state)'
    )
    in_place = OPERANDS.replace("Tensor? initial_state", "Tensor(a!) state")
    assert signature.LINEAR_ATTENTION_STEP_.schema == (
        f"({in_place}, Tensor? state_indices, *, {OPTIONS}, ScalarType? out_dtype) -> Tensor"
    )
    assert signature.LINEAR_ATTENTION_STEP.backward_schema == (
        f"(Tensor? grad_o, Tensor? grad_final_state, {OPERANDS}, *, {OPTIONS}, bool[] wanted) -> Tensor[]"
    )
    assert signature.MLA.backward_schema.startswith(
        "(Tensor? grad_o, Tensor? grad_lse, Tensor o, Tensor lse, Tensor q, Tensor? q_rope, Tensor latent, "
    )


@dataclass(frozen=True)
class Sum:
    """An op of its own: rows of x, some of them masked, summed into bins."""

    x: Annotated[Tensor, Operand("[B, D]")]
    weight: Annotated[Tensor | None, Operand(lambda call: "[D]" if call.shared else "[B, D]")]
    mask: Annotated[Tensor | None, Operand("[B, D]", Kind.MASK, broadcast=True)]
    bins: Annotated[Tensor | None, Operand("[B]", Kind.INDEX, host=True)] = None
    _: KW_ONLY
    shared: bool = False
    most: int = 0
    memo: int | None = None


def check_sum(call: Sum, *, symbolic: bool = False) -> None:
    sizes: dict[str, Size] = {}
    check_operands(call, sizes, symbolic)


SUM = Signature("sum", Sum, check_sum, None, ("total",), ("[B]",), {"B": "batch"})
X, BINS = torch.ones(3, 4), torch.zeros(3, dtype=torch.int32)


def test_an_op_from_a_dataclass_alone() -> None:
    assert SUM.schema == "(Tensor x, Tensor? weight, Tensor? mask, Tensor? bins, *, bool shared, int most) -> Tensor"
    assert SUM.differentiable == 3 and [operand.optional for operand in operands(Sum)] == [False, True, True, True]
    call = SUM.checked((X, None, X[:1] > 0, BINS), {"most": 2})
    assert tensors(call)[1] is None and list(given(call)) == ["x", "mask", "bins"]


@pytest.mark.parametrize(
    ("arguments", "options", "expected", "message"),
    [
        ((X[0], None, None), {}, errors.RankError, r"x must have 2 dimensions \[B, D\], got shape \(4,\)"),
        ((X, X[0], None), {}, errors.RankError, r"weight must have 2 dimensions \[B, D\]"),
        ((X, X, None), {"shared": True}, errors.RankError, r"weight must have 1 dimensions \[D\]"),
        ((X, X[:, :2], None), {}, errors.SizeError, r"weight must have shape \(3, 4\) \(\[B, D\]\), got \(3, 2\)"),
        ((X, None, X[:, :1]), {}, errors.SizeError, r"mask must have shape \(3, 4\)"),
        ((X, None, X[:2]), {}, errors.SizeError, r"mask must have shape \(3, 4\)"),
        ((X, None, BINS), {}, errors.DtypeError, "mask must have dtype bool, bfloat16"),
        ((X, None, None, X[:, 0]), {}, errors.DtypeError, "bins must have dtype int32 or int64"),
        ((X, X.to("meta"), None), {}, errors.DeviceError, "weight is on meta, but q is on cpu"),
        ((X, None, None, BINS.to("meta")), {}, errors.DeviceError, r"q is on cpu \(or the CPU\)"),
    ],
)
def test_its_checks(arguments: Any, options: dict[str, Any], expected: type[errors.OpError], message: str) -> None:
    with pytest.raises(expected, match=message):
        SUM.checked(arguments, options)


def test_an_operand_that_may_lie_on_the_cpu() -> None:
    SUM.checked((X.to("meta"), None, None, BINS), {})


def test_what_was_right_before_is_not_what_is_wrong_now() -> None:
    """Kinds of calls that passed are remembered by everything that the checks look at."""
    SUM.checked((X, X[0], None), {"shared": True})
    with pytest.raises(errors.RankError):
        SUM.checked((X, X[0], None), {"shared": False})
    with pytest.raises(errors.DtypeError):
        SUM.checked((X, X[0].long(), None), {"shared": True})
    with pytest.raises(errors.DeviceError):
        SUM.checked((X, X[0].to("meta"), None), {"shared": True})
