"""Latent attention as torchtitan writes it, and its plan of tensor parallelism: everything stays a DTensor but what
attention itself reads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

NOPE, ROPE, VALUE, RANK = 8, 4, 8, 16


class Attend(nn.Module):
    """``[B, H, T, D]`` each."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """``[B, T, dim]`` and ``[T, 1, ROPE]`` to ``[B, T, dim]``."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(dim, heads * (NOPE + ROPE), bias=False)
        self.wkv_a = nn.Linear(dim, RANK + ROPE, bias=False)
        self.kv_norm = nn.RMSNorm(RANK)
        self.wkv_b = nn.Linear(RANK, heads * (NOPE + VALUE), bias=False)
        self.inner_attention = Attend()
        self.wo = nn.Linear(heads * VALUE, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, NOPE + ROPE)
        q_nope, q_rope = torch.split(q, [NOPE, ROPE], -1)
        q = torch.cat([q_nope, q_rope * cos], -1)
        latent, k_rope = torch.split(self.wkv_a(x), [RANK, ROPE], -1)
        k_rope = k_rope.unsqueeze(2) * cos
        kv = self.wkv_b(self.kv_norm(latent)).view(batch, length, -1, NOPE + VALUE)
        k_nope, v = torch.split(kv, [NOPE, VALUE], -1)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, self.heads, -1)], -1)
        o = self.inner_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(o.transpose(1, 2).contiguous().view(batch, length, -1))


class Replicated(ParallelStyle):
    """A module every rank computes as a whole, on DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def given(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            x = inputs[0]
            return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)

        return distribute_module(module, device_mesh, None, given)


def tensor_parallel(block: nn.Module, mesh: DeviceMesh) -> None:
    """Heads over the ranks of ``mesh``."""
    heads, whole = (Shard(1),) * 3, (Replicate(), Replicate())
    parallelize_module(
        block,
        mesh,
        {
            "": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
            "wq": ColwiseParallel(use_local_output=False),
            "wkv_a": Replicated(),
            "kv_norm": Replicated(),
            "wkv_b": ColwiseParallel(use_local_output=False),
            "inner_attention": PrepareModuleInputOutput(
                input_layouts=heads,
                desired_input_layouts=heads,
                use_local_input=True,
                output_layouts=(Shard(1),),
                desired_output_layouts=(Shard(1),),
                use_local_output=False,
            ),
            "wo": RowwiseParallel(output_layouts=Replicate()),
        },
    )
