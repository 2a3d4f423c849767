"""One long sequence on several ranks: a Kimi Delta Attention layer under context parallelism, forward and backward.

    torchrun --nproc-per-node 2 examples/context_parallel.py [--quick]

On GPUs (NCCL) or on the CPU (gloo); without torchrun it is one rank. Each rank holds the tokens
that ``ContextParallel.shard`` gives it. The short convolution fetches the tokens before them, linear attention the
states; everything else in the layer is per token. Gradients are compared with those of the whole sequence on one rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kdacompile.distributed import ContextParallel, causal_conv1d
from kdacompile.ops import linear_attention


class ShortConvolution(nn.Module):
    """A depthwise causal convolution and SiLU over ``[B, T, C]``."""

    def __init__(self, channels: int, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, width) / width)

    def forward(self, x: Tensor, context: ContextParallel) -> Tensor:
        return causal_conv1d(x, self.weight, activation="silu", context_parallel=context)


class KimiDeltaAttention(nn.Module):
    """Projections, short convolution, and KDA with its gate and norms inside the op."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * heads * width, bias=False)
        self.gate = nn.Linear(hidden, heads * width, bias=False)
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.out = nn.Linear(heads * width, hidden, bias=False)
        self.convolution = ShortConvolution(3 * heads * width)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, x: Tensor, context: ContextParallel) -> Tensor:
        qkv = self.convolution(self.qkv(x), context)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in qkv.chunk(3, -1))
        g = self.gate(x).unflatten(-1, (self.heads, -1))
        o, _ = linear_attention(
            q, k, v, g, self.beta(x), gate_fn="softplus", A_log=self.A_log, dt_bias=self.dt_bias,
            sigmoid_beta=True, qk_l2norm=True, context_parallel=context,
        )  # fmt: skip
        return self.out(o.flatten(2))


def gradients(layer: nn.Module, x: Tensor, target: Tensor, context: ContextParallel) -> list[Tensor]:
    """The gradients of a rank's share of the loss."""
    layer.zero_grad()
    (layer(x, context) - target).square().sum().backward()
    return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]


def compare(device: torch.device, *, quick: bool) -> None:
    """Gradients in both orders beside those of one rank; an assertion where they differ."""
    rank, world, tokens = dist.get_rank(), dist.get_world_size(), 64 if quick else 1024
    torch.manual_seed(0)
    layer = KimiDeltaAttention(64, 4, 16).to(device)
    x, target = (torch.randn(1, tokens, 64).to(device) for _ in range(2))
    alone = ContextParallel(cast("dist.ProcessGroup", dist.new_group([rank], use_local_synchronization=True)))
    expected = gradients(layer, x, target, alone)
    for order in ("contiguous", "zigzag"):
        context = ContextParallel(order=order)
        found = gradients(layer, context.shard(x), context.shard(target), context)
        for have, want in zip(found, expected, strict=True):
            dist.all_reduce(have)  # each rank's share, as DDP and FSDP2 sum them
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
        if rank == 0:
            print(f"{order}: {tokens} tokens on {world} ranks, gradients equal those of one rank")


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
    dist.init_process_group("nccl" if cuda else "gloo", **alone)
    try:
        compare(device, quick="--quick" in given)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
