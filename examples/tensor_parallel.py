"""Latent attention in the style of torchtitan on several GPUs: FSDP2 x tensor parallel, compiled block by block.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tp 2 [--quick] [--device cuda]

Heads lie on different ranks, and everything is a DTensor but what attention itself reads. Every block must be matched,
and the loss must fall. Without torchrun it is one process.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)

from kdacompile.report.collect import collecting

NOPE, ROPE, VALUE, RANK = 8, 4, 8, 16
REWRITE = {"kda.cost_model": False}  # so few tokens would be left to Inductor, which is faster on a CPU


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


def tensor_parallel(block: nn.Module, mesh: DeviceMesh, *, tokens: bool = False) -> None:
    """Heads over the ranks of ``mesh``; with ``tokens``, tokens outside of the block (sequence parallel)."""
    heads, whole, outside = (Shard(1),) * 3, (Replicate(), Replicate()), Shard(1) if tokens else Replicate()
    parallelize_module(
        block,
        mesh,
        {
            "": PrepareModuleInput(input_layouts=(outside, Replicate()), desired_input_layouts=whole),
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
            "wo": RowwiseParallel(output_layouts=outside),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the heads of a layer")
    parser.add_argument("--quick", action="store_true", help="three steps")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    backend, world = "nccl" if args.device == "cuda" else "gloo", int(os.environ.get("WORLD_SIZE", "1"))
    started = not dist.is_initialized()
    if started:
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
        dist.init_process_group(backend, **alone)
    try:
        return 0 if train(args.device, args.tp, world, 3 if args.quick else 50) else 1
    finally:
        if started:
            dist.destroy_process_group()


def train(device: str, tp: int, world: int, steps: int) -> bool:
    """Whether every block was matched and the loss fell."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = init_device_mesh(device, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block() for _ in range(2)]).to(device)
    for block in blocks.children():
        tensor_parallel(block, mesh["tp"])
        block.compile(backend="kda", options=REWRITE)
        fully_shard(block, mesh=mesh["dp"])
    torch.manual_seed(mesh.get_local_rank("dp"))  # ranks that share heads get the same tokens
    x, cos, goal = (torch.randn(*shape, device=device) for shape in ((4, 16, 32), (16, 1, ROPE), (4, 16, 32)))
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
    losses: list[float] = []
    with collecting() as report:
        for _ in range(steps):
            y = x
            for block in blocks.children():
                y = y + block(y, cos)
            loss = F.mse_loss(y, goal)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {report.counts} in {report.graph_count} graphs")
    return report.counts["mla"] > 0 and losses[-1] < losses[0]


if __name__ == "__main__":
    raise SystemExit(main())
