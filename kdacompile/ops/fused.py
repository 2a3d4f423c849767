"""Serving the semantic ops on a device that has fused kernels, with the device-independent ones for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdacompile.containment import contain
from kdacompile.lowering.calls import Call, Implementation
from kdacompile.lowering.recorded import Memory, Operands, Results, shares_memory
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops import definitions, kernels
from kdacompile.ops.checks import check_sequence, check_step, check_writable

Choose = Callable[[Call], Implementation | None]
Prepare = Callable[[Call], Call]


class FusedKernels:
    """The kernels of the forward ops over whatever ``choose`` finds for a call.

    ``prepare`` is what is done to a call before its kernels see it; ``remember``: whether its kernels do everything
    through their scratch memory, so that calls like earlier ones only launch. The backward ops are the
    device-independent ones: they differentiate the torch executor.
    """

    def __init__(self, choose: Choose, prepare: Prepare | None = None, *, remember: bool = False) -> None:
        self._choose, self._prepare = choose, prepare
        self._memory = Memory() if remember else None

        self._failed: set[str] = set()
        """Kernels that met an error of ours: not asked again."""

    def serve(self, device: str) -> None:
        """Register on a device's dispatch key ("CUDA", "PrivateUse1")."""
        definitions.add_kernel("linear_attention", device, self.sequence)
        definitions.add_kernel("linear_attention_step", device, self.step)
        definitions.add_kernel("linear_attention_step_", device, self.inplace_step)

    def sequence(self, *operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``kdacompile::linear_attention``."""
        # fp32 products round as the user asked torch for.
        precision = torch.get_float32_matmul_precision() if torch.float32 in {x.dtype for x in operands[:3]} else None
        return self._run(self._sequence, operands, options, precision)

    def step(self, *operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``kdacompile::linear_attention_step``."""
        return self._run(self._step, operands, options)

    def inplace_step(self, *operands: Any, **options: Any) -> Tensor:
        """``kdacompile::linear_attention_step_``: the state is read and written once, where it lies."""
        return self._run(self._inplace_step, operands, options, written=5)[0]

    def _run(
        self,
        call: Callable[..., Results],
        operands: Operands,
        options: dict[str, Any],
        precision: str | None = None,
        written: int | None = None,
    ) -> Any:
        if self._memory is None:
            return call(Scratch(), *operands, **options)
        decides = (call.__name__, precision, *options.items())
        return self._memory.run(decides, operands, lambda scratch: call(scratch, *operands, **options), written)

    def _sequence(
        self,
        scratch: Scratch,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Tensor | None,
        out_dtype: torch.dtype | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        check_sequence(
            q, k, v, *others, gate=options["gate"], gate_fn=options["gate_fn"], gate_scale=options["gate_scale"],
            qk_l2norm_eps=options["qk_l2norm_eps"], chunk_size=options["chunk_size"],
        )  # fmt: skip
        g, beta, initial_state, A_log, dt_bias, cu_seqlens = others
        if cu_seqlens is not None and cu_seqlens.device != q.device:
            cu_seqlens = cu_seqlens.to(q.device)
        dtype = v.dtype if out_dtype is None else out_dtype
        call = Call(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, out_dtype=dtype, **options)
        chosen = self._chosen(call) if q.shape[1] else None
        found = self._attempt(chosen, lambda it: it.run(self._prepared(call), scratch), scratch)
        return found or kernels.sequence_kernel(q, k, v, *others, out_dtype=out_dtype, **options)

    def _step(
        self,
        scratch: Scratch,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Tensor | None,
        out_dtype: torch.dtype | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        check_step(
            q, k, v, *others, gate=options["gate"], gate_fn=options["gate_fn"], gate_scale=options["gate_scale"],
            qk_l2norm_eps=options["qk_l2norm_eps"],
        )  # fmt: skip
        call = _step_call(q, k, v, others, out_dtype, options)
        chosen = self._chosen(call)
        found = self._attempt(chosen, lambda it: it.step(self._prepared(call), None, scratch), scratch)
        return found or kernels.step_kernel(q, k, v, *others, out_dtype=out_dtype, **options)

    def _inplace_step(
        self,
        scratch: Scratch,
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
        **options: Any,
    ) -> Results:
        others = (g, beta, state, A_log, dt_bias)
        check_step(
            q, k, v, *others, state_name="state", gate=options["gate"], gate_fn=options["gate_fn"],
            gate_scale=options["gate_scale"], qk_l2norm_eps=options["qk_l2norm_eps"],
        )  # fmt: skip
        check_writable(state)
        call = _step_call(q, k, v, others, out_dtype, options)
        # A kernel's blocks overwrite the state while others still read.
        addresses = (x.data_ptr() for x in (q, k, v, *others) if x is not None)
        chosen = None if shares_memory(state, addresses) else self._chosen(call)
        if chosen is None:
            return (kernels.inplace_step_kernel(q, k, v, *others, out_dtype=out_dtype, **options),)
        return chosen.step(self._prepared(call), state, scratch)  # from here on the state may have been written

    def _chosen(self, call: Call) -> Implementation | None:
        """What takes the call; None after an error of ours, too."""
        chosen = contain("choosing a kernel", lambda: self._choose(call), lambda _: None)
        return None if chosen is None or chosen.name in self._failed else chosen

    def _attempt(self, chosen: Implementation | None, run: Callable[[Implementation], Any], scratch: Scratch) -> Any:
        """What the kernels give; None without any and after an error of ours: only fresh tensors are written then."""
        if chosen is None:
            return None

        def fail(_: str) -> None:
            self._failed.add(chosen.name)
            scratch.once()

        return contain(f"running the {chosen.name} kernels", lambda: run(chosen), fail)

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
