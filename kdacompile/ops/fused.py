"""Serving the semantic ops on a device that has fused kernels, with the device-independent ones for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdacompile.lowering.calls import Call, Implementation
from kdacompile.ops import definitions, kernels
from kdacompile.ops.checks import check_sequence, check_step, check_writable

Choose = Callable[[Call], Implementation | None]
Prepare = Callable[[Call], Call]


class FusedKernels:
    """The kernels of the forward ops over whatever ``choose`` finds for a call.

    ``prepare`` is what is done to a call before its kernels see it. The backward ops are the device-independent ones:
    they differentiate the torch executor.
    """

    def __init__(self, choose: Choose, prepare: Prepare | None = None) -> None:
        self._choose, self._prepare = choose, prepare

    def serve(self, device: str) -> None:
        """Register on a device's dispatch key ("CUDA", "PrivateUse1")."""
        definitions.add_kernel("linear_attention", device, self.sequence)
        definitions.add_kernel("linear_attention_step", device, self.step)
        definitions.add_kernel("linear_attention_step_", device, self.inplace_step)

    def sequence(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
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
        chosen = self._choose(call) if q.shape[1] else None
        if chosen is None:
            return kernels.sequence_kernel(q, k, v, *others, out_dtype=out_dtype, **options)
        return chosen.run(self._prepared(call))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """``kdacompile::linear_attention_step``."""
        check_step(
            q, k, v, *others, gate=options["gate"], gate_fn=options["gate_fn"], gate_scale=options["gate_scale"],
            qk_l2norm_eps=options["qk_l2norm_eps"],
        )  # fmt: skip
        call = _step_call(q, k, v, others, out_dtype, options)
        chosen = self._choose(call)
        if chosen is None:
            return kernels.step_kernel(q, k, v, *others, out_dtype=out_dtype, **options)
        return chosen.step(self._prepared(call), None)

    def inplace_step(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
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
        chosen = None if _share_memory(state, (q, k, v, g, beta, A_log, dt_bias)) else self._choose(call)
        if chosen is None:
            return kernels.inplace_step_kernel(q, k, v, g, beta, state, A_log, dt_bias, out_dtype=out_dtype, **options)
        return chosen.step(self._prepared(call), state)[0]

    def _prepared(self, call: Call) -> Call:
        return call if self._prepare is None else self._prepare(call)


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
