"""Serving the MLA ops on a device that has kernels of its own, with the torch executor for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kdacompile.containment import contain
from kdacompile.lowering.attention_calls import AttentionGradients, AttentionImplementation
from kdacompile.lowering.recorded import Memory
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops import definitions, mla_definitions
from kdacompile.ops.mla_checks import check_mla
from kdacompile.ops.mla_kernels import execute, gradients_of, mla_backward_kernel

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
        definitions.add_kernel(mla_definitions.mla._opname, device, self.attention)
        definitions.add_kernel(mla_definitions.mla_backward._opname, device, self.backward)

    def attention(self, *operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``kdacompile::mla``."""
        if self._memory is None:
            return self._attention(Scratch(), *operands, **options)
        # fp32 products round as the user asked torch for.
        precision = torch.get_float32_matmul_precision() if operands[0].dtype is torch.float32 else None
        decides = (precision, *options.items())
        o, lse = self._memory.run(decides, operands, lambda scratch: self._attention(scratch, *operands, **options))
        return o, lse

    def _attention(
        self,
        scratch: Scratch,
        q: Tensor,
        q_rope: Tensor | None,
        latent: Tensor,
        *others: Tensor | None,
        scale: float,
        causal: bool,
        form: str,
        out_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        check_mla(q, q_rope, latent, *others, form=form)
        dtype = q.dtype if out_dtype is None else out_dtype
        call = Attention(q, q_rope, latent, *others, scale=scale, causal=causal, form=form, out_dtype=dtype)
        if 0 in (q.numel(), latent.numel(), call.width):
            return execute(call)
        return self._attempt(lambda: self._choose(call), lambda it: it.run(call, scratch), scratch) or execute(call)

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

    def backward(
        self,
        grad_o: Tensor | None,
        grad_lse: Tensor | None,
        o: Tensor,
        lse: Tensor,
        q: Tensor,
        q_rope: Tensor | None,
        latent: Tensor,
        *others: Tensor | None,
        scale: float,
        causal: bool,
        form: str,
        wanted: list[bool],
    ) -> list[Tensor]:
        """``kdacompile::mla_backward``."""
        choose = self._gradients
        if grad_o is not None and grad_lse is None and grad_o.numel() and choose is not None:
            operands = (q, q_rope, latent, *others)
            call = Attention(*operands, scale=scale, causal=causal, form=form, out_dtype=o.dtype)

            def gradients(chosen: AttentionGradients) -> list[Tensor]:
                return gradients_of(operands, wanted, lambda names: chosen.gradients(call, o, lse, grad_o, names))

            found = self._attempt(lambda: choose(call), gradients)
            if found is not None:
                return found
        options: dict[str, Any] = {"scale": scale, "causal": causal, "form": form, "wanted": wanted}
        return mla_backward_kernel(grad_o, grad_lse, o, lse, q, q_rope, latent, *others, **options)
