"""Fakes: what the ops return, as empty tensors, for tracing. Sizes may be symbolic; none of them is compared.

Outputs are contiguous (o in the order of ``o_layout``) whatever the inputs' strides are, so the fakes are exact without
looking at strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops.checks import check_layout
from kdacompile.ops.dispatch import Kernel
from kdacompile.ops.signature import O_DIMENSIONS, Signature


def fake_of(signature: Signature) -> Kernel:
    """The fake of an op."""

    def fake(*tensors: Tensor | None, o_layout: str = O_DIMENSIONS, **options: Any) -> Any:
        call: Call | Attention = signature.checked(tensors, options, symbolic=True)
        check_layout(o_layout)
        (shape, dtype), *others = call.results
        o = _empty_o(call.q, shape, dtype, o_layout)
        return (
            (o, *(call.q.new_empty(shape, dtype=dtype) for shape, dtype in others)) if len(signature.results) > 1 else o
        )

    return fake


def backward_fake_of(signature: Signature) -> Kernel:
    """The fake of its backward op: one contiguous gradient for each wanted operand."""

    def fake(*tensors: Tensor | None, wanted: list[bool], **options: Any) -> list[Tensor]:
        inputs = signature.of_backward(tensors)[1]
        return [x.new_empty(x.shape) for x, want in zip(inputs, wanted, strict=False) if want and x is not None]

    return fake


def _empty_o(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, o_layout: str) -> Tensor:
    if o_layout == O_DIMENSIONS:
        return like.new_empty(shape, dtype=dtype)
    order = [O_DIMENSIONS.index(letter) for letter in o_layout]
    o = like.new_empty([shape[i] for i in order], dtype=dtype)
    return o.permute([o_layout.index(letter) for letter in O_DIMENSIONS])
