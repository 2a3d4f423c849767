"""The semantic ops on CUDA: fused kernels for what they take, the device-independent kernels for the rest.

With 16-bit inputs the operands of matrix products are 16-bit and everything is accumulated in fp32, the state included;
fp32 inputs are computed to fp32 accuracy, or with TF32 where ``torch.set_float32_matmul_precision`` allows it. The
backward ops are the device-independent ones: they differentiate the torch executor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.cuda import choose
from kdacompile.ops import definitions, kernels
from kdacompile.ops.checks import check_sequence, check_step, check_writable


def sequence_kernel(
    q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention``."""
    check_sequence(
        q, k, v, *others, gate=options["gate"], gate_fn=options["gate_fn"], gate_scale=options["gate_scale"],
        qk_l2norm_eps=options["qk_l2norm_eps"], chunk_size=options["chunk_size"],
    )  # fmt: skip
    g, beta, initial_state, A_log, dt_bias, cu_seqlens = others
    if cu_seqlens is not None and cu_seqlens.device != q.device:
        cu_seqlens = cu_seqlens.to(q.device)
    dtype = v.dtype if out_dtype is None else out_dtype
    call = Call(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, out_dtype=dtype, **options)
    chosen = choose(call) if q.shape[1] else None
    if chosen is None:
        return kernels.sequence_kernel(q, k, v, *others, out_dtype=out_dtype, **options)
    return chosen.run(call)


def step_kernel(
    q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention_step``."""
    check_step(
        q, k, v, *others, gate=options["gate"], gate_fn=options["gate_fn"], gate_scale=options["gate_scale"],
        qk_l2norm_eps=options["qk_l2norm_eps"],
    )  # fmt: skip
    call = _step_call(q, k, v, others, out_dtype, options)
    chosen = choose(call)
    if chosen is None:
        return kernels.step_kernel(q, k, v, *others, out_dtype=out_dtype, **options)
    return chosen.step(call, None)


def inplace_step_kernel(
    q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
) -> Tensor:
    """``kdacompile::linear_attention_step_``: the state is read and written once, where it lies."""
    g, beta, state, A_log, dt_bias = others
    assert state is not None
    check_step(
        q, k, v, *others, state_name="state", gate=options["gate"], gate_fn=options["gate_fn"],
        gate_scale=options["gate_scale"], qk_l2norm_eps=options["qk_l2norm_eps"],
    )  # fmt: skip
    check_writable(state)
    call = _step_call(q, k, v, others, out_dtype, options)
    chosen = None if _share_memory(state, (q, k, v, g, beta, A_log, dt_bias)) else choose(call)
    if chosen is None:
        return kernels.inplace_step_kernel(q, k, v, g, beta, state, A_log, dt_bias, out_dtype=out_dtype, **options)
    return chosen.step(call, state)[0]


def _step_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: tuple[Tensor | None, ...],
    out_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> Call:
    g, beta, state, A_log, dt_bias = others
    dtype = v.dtype if out_dtype is None else out_dtype
    return Call(q, k, v, g, beta, state, A_log, dt_bias, None, out_dtype=dtype, chunk_size=0, **options)


def _share_memory(state: Tensor, inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether an input may lie in the state's memory; a kernel's blocks overwrite the state while others still read."""
    storage = state.untyped_storage().data_ptr()
    return any(x is not None and x.untyped_storage().data_ptr() == storage for x in inputs)


definitions.add_kernel("linear_attention", "CUDA", sequence_kernel)
definitions.add_kernel("linear_attention_step", "CUDA", step_kernel)
definitions.add_kernel("linear_attention_step_", "CUDA", inplace_step_kernel)
