"""Prefill of MLA on CUDA through cuDNN's fused attention, and its gradients.

FlashAttention refuses heads whose keys (N + D) are wider than their values (V); cuDNN takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.compat import cudnn

from .expanded import ExpandedAttention


class CudnnAttention(ExpandedAttention):
    """In half precision."""

    name = "cudnn"
    device = "cuda"
    dtypes = (torch.bfloat16, torch.float16)

    def takes(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> bool:
        return cudnn.takes(q, k, v, causal=causal)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return cudnn.attention(q, k, v, causal=causal, scale=scale)

    def attend_gradients(
        self, grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cudnn.attention_gradients(grad_o, q, k, v, o, lse, causal=causal, scale=scale)
