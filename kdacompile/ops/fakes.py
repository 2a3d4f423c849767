"""Fakes: what the ops return, as empty tensors, for tracing. Sizes may be symbolic; none of them is compared.

Outputs are contiguous (o in the order of ``o_layout``) whatever the inputs' strides are, so the fakes are exact without
looking at strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdacompile.ops.checks import check_layout, check_sequence, check_step
from kdacompile.ops.semantics import compute_dtype


def sequence_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    out_dtype: torch.dtype | None,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    qk_l2norm_eps: float,
    chunk_size: int,
    o_layout: str = "BTHV",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    check_sequence(
        q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, gate=gate, gate_fn=gate_fn, gate_scale=gate_scale,
        qk_l2norm_eps=qk_l2norm_eps, chunk_size=chunk_size, symbolic=True,
    )  # fmt: skip
    check_layout(o_layout)
    return _empty_o(v, out_dtype, o_layout), _empty_state(q, k, v, cu_seqlens)


def step_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor | None,
    out_dtype: torch.dtype | None,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    qk_l2norm_eps: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    check_step(
        q, k, v, *others, gate=gate, gate_fn=gate_fn, gate_scale=gate_scale, qk_l2norm_eps=qk_l2norm_eps, symbolic=True
    )
    return _empty_o(v, out_dtype), _empty_state(q, k, v, None)


def inplace_step_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    out_dtype: torch.dtype | None,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    qk_l2norm_eps: float,
    **_: Any,
) -> Tensor:
    check_step(
        q, k, v, g, beta, state, A_log, dt_bias, state_name="state", gate=gate, gate_fn=gate_fn, gate_scale=gate_scale,
        qk_l2norm_eps=qk_l2norm_eps, symbolic=True,
    )  # fmt: skip
    return _empty_o(v, out_dtype)


def backward_fake(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Tensor | None, wanted: list[bool], **_: Any
) -> list[Tensor]:
    """Both backward ops: one contiguous gradient for each wanted tensor."""
    return [x.new_empty(x.shape) for x, want in zip(tensors, wanted, strict=False) if want and x is not None]


def _empty_o(v: Tensor, out_dtype: torch.dtype | None, o_layout: str = "BTHV") -> Tensor:
    dtype = v.dtype if out_dtype is None else out_dtype
    if o_layout == "BTHV":
        return v.new_empty(v.shape, dtype=dtype)
    order = ["BTHV".index(letter) for letter in o_layout]
    return v.new_empty([v.shape[i] for i in order], dtype=dtype).permute([o_layout.index(letter) for letter in "BTHV"])


def _empty_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty((sequences, v.shape[2], k.shape[3], v.shape[3]), dtype=compute_dtype(q, k, v))
