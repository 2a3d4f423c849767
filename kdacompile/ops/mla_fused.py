"""Serving the MLA ops on a device that has kernels of its own, with the torch executor for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kdacompile.containment import contain
from kdacompile.lowering.attention_calls import AttentionGradients, AttentionImplementation
from kdacompile.lowering.recorded import Memory, Operands
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops import definitions
from kdacompile.ops.mla_kernels import gradients_of, mla_backward_kernel, run_mla
from kdacompile.ops.signature import MLA

ChooseAttention = Callable[[Attention], AttentionImplementation | None]
Kernels = TypeVar("Kernels", AttentionImplementation, AttentionGradients)
T = TypeVar("T")
ChooseGradients = Callable[[Attention], AttentionGradients | None]


class FusedAttention:
    """The kernels of ``kdacompile::mla`` and its gradients, over what ``choose`` and ``gradients`` find for a call.

    ``remember``: as for :class:`~kdacompile.ops.fused.FusedKernels`.
    """

    def __init__(
        self, choose: ChooseAttention, gradients: ChooseGradients | None = None, *, remember: bool = False
    ) -> None:
        self._choose, self._gradients = choose, gradients
        self._memory = Memory() if remember else None
        self._failed: set[str] = set()
        """Kernels that met an error of ours: not asked again."""

    def serve(self, device: str) -> None:
        """Register on a device's dispatch key ("CUDA", "PrivateUse1")."""
        definitions.add_kernel(MLA.name, device, self.attention)
        definitions.add_kernel(MLA.backward_name, device, self.backward)

    def attention(self, *operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``kdacompile::mla``."""
        if self._memory is None:
            return self._attention(Scratch(), operands, options)
        # fp32 products round as the user asked torch for.
        precision = torch.get_float32_matmul_precision() if operands[0].dtype is torch.float32 else None
        decides = (precision, *options.items())
        o, lse = self._memory.run(decides, operands, lambda scratch: self._attention(scratch, operands, options))
        return o, lse

    def _attention(self, scratch: Scratch, operands: Operands, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        call: Attention = MLA.checked(operands, options)
        if 0 in (call.q.numel(), call.latent.numel(), call.width):
            return run_mla(call)
        return self._attempt(lambda: self._choose(call), lambda it: it.run(call, scratch), scratch) or run_mla(call)

    def _attempt(
        self, choose: Callable[[], Kernels | None], run: Callable[[Kernels], T], scratch: Scratch | None = None
    ) -> T | None:
        """What the chosen kernels give; None if there are none, and after an error of ours: nothing but fresh tensors
        has been written then.
        """
        chosen = contain("choosing a kernel", choose, lambda _: None)
        if chosen is None or chosen.name in self._failed:
            return None

        def fail(_: str) -> None:
            self._failed.add(chosen.name)
            if scratch is not None:
                scratch.once()

        return contain(f"running the {chosen.name} kernels", lambda: run(chosen), fail)

    def backward(self, *arguments: Any, wanted: list[bool], **options: Any) -> list[Tensor]:
        """``kdacompile::mla_backward``."""
        choose, ((grad_o, grad_lse, o, lse), operands) = self._gradients, MLA.of_backward(arguments)
        if grad_o is not None and grad_lse is None and grad_o.numel() and choose is not None:
            call = Attention(*operands, **options, out_dtype=o.dtype)

            def gradients(chosen: AttentionGradients) -> list[Tensor]:
                return gradients_of(call, wanted, lambda names: chosen.gradients(call, o, lse, grad_o, names))

            found = self._attempt(lambda: choose(call), gradients)
            if found is not None:
                return found
        return mla_backward_kernel(*arguments, wanted=wanted, **options)
