"""cuDNN's fused attention as torch has it: the operators behind ``scaled_dot_product_attention``, with lse.

They are private, and the same from torch 2.11 to 2.14. Causal: query t sees the keys up to t. lse is the natural
logarithm, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention


def takes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> bool:
    """Whether cuDNN takes tensors of these sizes, dtypes and strides, on their device."""
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, causal, False))


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q ``[B, H, T, K]``, k ``[B, H, S, K]``, v ``[B, H, S, V]``; returns o ``[B, H, T, V]`` and lse ``[B, H, T]``."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return o, lse.reshape(q.shape[:3])


def attention_gradients(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of o, given both results of ``attention``."""
    no_seed = torch.empty((), dtype=torch.int64, device=q.device)  # nothing is dropped
    lengths = (None, None, q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_o, q, k, v, o, lse.unsqueeze(-1), no_seed, no_seed, None, *lengths, 0.0, causal, scale=scale
    )
