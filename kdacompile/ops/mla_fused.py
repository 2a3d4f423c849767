"""Serving the MLA op on a device that has kernels of its own, with the torch executor for the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kdacompile.lowering.attention_calls import AttentionImplementation
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops import definitions, mla_definitions
from kdacompile.ops.mla_checks import check_mla
from kdacompile.ops.mla_kernels import execute

ChooseAttention = Callable[[Attention], AttentionImplementation | None]


class FusedAttention:
    """The kernel of ``kdacompile::mla`` over whatever ``choose`` finds for a call; its gradients are the executor's."""

    def __init__(self, choose: ChooseAttention) -> None:
        self._choose = choose

    def serve(self, device: str) -> None:
        """Register on a device's dispatch key ("CUDA", "PrivateUse1")."""
        definitions.add_kernel(mla_definitions.mla._opname, device, self.attention)

    def attention(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        latent: Tensor,
        *others: Tensor | None,
        scale: float,
        causal: bool,
        form: str,
        out_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        """``kdacompile::mla``."""
        check_mla(q, q_rope, latent, *others, form=form)
        dtype = q.dtype if out_dtype is None else out_dtype
        call = Attention(q, q_rope, latent, *others, scale=scale, causal=causal, form=form, out_dtype=dtype)
        nothing = 0 in (q.numel(), latent.numel(), call.width)
        chosen = None if nothing else self._choose(call)
        return execute(call) if chosen is None else chosen.run(call)
