"""Serving the MLA ops on a device that has kernels of its own, with the torch executor for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kdacompile.lowering.attention_calls import AttentionGradients, AttentionImplementation
from kdacompile.lowering.recorded import Operands, Results
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops import definitions
from kdacompile.ops.mla_kernels import gradients_of, mla_backward_kernel, run_mla
from kdacompile.ops.serving import Serving
from kdacompile.ops.signature import MLA

ChooseAttention = Callable[[Attention], AttentionImplementation | None]
ChooseGradients = Callable[[Attention], AttentionGradients | None]


class FusedAttention(Serving):
    """The kernels of ``kdacompile::mla`` and its gradients, over what ``choose`` and ``gradients`` find for a call."""

    def __init__(
        self, choose: ChooseAttention, gradients: ChooseGradients | None = None, *, remember: bool = False
    ) -> None:
        super().__init__(remember=remember)
        self._choose, self._gradients = choose, gradients

    def serve(self, device: str) -> None:
        """Register on a device's dispatch key ("CUDA", "PrivateUse1")."""
        definitions.add_kernel(MLA.name, device, self.attention)
        definitions.add_kernel(MLA.backward_name, device, self.backward)

    def attention(self, *operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``kdacompile::mla``."""
        o, lse = self.launched(self._attention, operands, options, multiplied=operands[:1])
        return o, lse

    def _attention(self, scratch: Scratch, operands: Operands, options: dict[str, Any]) -> Results:
        call: Attention = MLA.checked(operands, options)
        if 0 in (call.q.numel(), call.latent.numel(), call.width):
            return run_mla(call)
        chosen = self.chosen(lambda: self._choose(call))
        return self.attempted(chosen, lambda it: it.run(call, scratch), scratch) or run_mla(call)

    def backward(self, *arguments: Any, wanted: list[bool], **options: Any) -> list[Tensor]:
        """``kdacompile::mla_backward``."""
        choose, ((grad_o, grad_lse, o, lse), operands) = self._gradients, MLA.of_backward(arguments)
        if grad_o is not None and grad_lse is None and grad_o.numel() and choose is not None:
            call = Attention(*operands, **options, out_dtype=o.dtype)

            def gradients(chosen: AttentionGradients) -> list[Tensor]:
                return gradients_of(call, wanted, lambda names: chosen.gradients(call, o, lse, grad_o, names))

            found = self.attempted(self.chosen(lambda: choose(call)), gradients)
            if found is not None:
                return found
        return mla_backward_kernel(*arguments, wanted=wanted, **options)
