"""Prefill of MLA on the CPU through torch's FlashAttention, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.compat import flash
from kdacompile.lowering.expanded import ExpandedAttention
from kdacompile.lowering.run_attention import Attention


class FlashAttention(ExpandedAttention):
    """In fp32, values no wider than keys: half precision is rounded less by the executor, fp64 is its own oracle."""

    name = "flash"
    device = "cpu"
    dtypes = (torch.float32,)
    kernels = flash

    def takes(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> bool:
        return v.shape[-1] <= k.shape[-1]


FLASH = FlashAttention()


def choose_attention(call: Attention) -> FlashAttention | None:
    """What takes a call of MLA, and its gradients; the torch executor does the rest."""
    return FLASH if FLASH.declines(call) is None else None
