"""FlashAttention on the CPU as torch has it: the operators behind ``scaled_dot_product_attention``, with lse.

They are private, and the same from torch 2.11 to 2.14. Causal: query t sees the keys up to t. lse is the natural
logarithm. Keys and values have one width there: narrower values are padded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q ``[B, H, T, K]``, k ``[B, H, S, K]``, v ``[B, H, S, V]``, V at most K; returns o ``[B, H, T, V]`` and lse
    ``[B, H, T]``.
    """
    wide = _as_wide(v, k)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, wide, 0.0, causal, scale=scale)
    return o[..., : v.shape[-1]], lse


def attention_gradients(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of o, given both results of ``attention``."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_o, wide, o = (_as_wide(x, k) for x in (grad_o, v, o))
    grad_q, grad_k, grad_v = backward(grad_o, q, k, wide, o, lse, 0.0, causal, scale=scale)
    return grad_q, grad_k, grad_v[..., : v.shape[-1]]


def _as_wide(x: Tensor, k: Tensor) -> Tensor:
    return F.pad(x, (0, k.shape[-1] - x.shape[-1])) if x.shape[-1] < k.shape[-1] else x
