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
    kernels = cudnn

    def takes(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> bool:
        return cudnn.takes(q, k, v, causal=causal)
