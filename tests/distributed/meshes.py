"""Meshes of two dimensions, and groups whose ranks do not follow each other: checks of ``test_context_parallel.py``."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from kdacompile.distributed import ContextParallel, causal_conv1d
from kdacompile.ops import linear_attention
from kdacompile.ops.errors import ContextParallelError, DistributedTensorError
from tests.distributed.checks import (
    TOKENS,
    attend,
    check_same,
    compare,
    convolve,
    latent,
    latents,
    operands,
    random,
    with_tokens,
)
from tests.distributed.processes import Ranks


def groups_of_a_mesh(ranks: Ranks) -> None:
    """Context parallelism over either dimension of a mesh; one has ranks 0 and 2, 1 and 3."""
    mesh = init_device_mesh("cpu", (2, ranks.world // 2), mesh_dim_names=("outer", "inner"))
    for name in ("outer", "inner"):
        for order, steps in (("contiguous", True), ("zigzag", True), ("zigzag", False)):
            context = ContextParallel(mesh[name].get_group(), order=order, steps=steps)
            compare(
                lambda x, c: attend(x, c, None),
                operands("channel", None, TOKENS), with_tokens("channel"), context, shared=1,
            )  # fmt: skip
        convolved = {"x": random(2, TOKENS, 6), "weight": random(6, 4), "bias": random(6)}
        compare(lambda x, c: (convolve(x, c, None),), convolved, ("x",), context)
        compare(lambda x, c: latent(x, c, True), latents(), ("q", "q_rope", "latent", "k_rope"), context)


def tokens_and_more(ranks: Ranks) -> None:
    """DTensors on two dimensions of a mesh: tokens on one, batch or heads on the other; gradients as well."""
    mesh = init_device_mesh("cpu", (2, ranks.world // 2), mesh_dim_names=("other", "tokens"))
    for cut in ("B", "H"):
        tensors = operands("channel", None, TOKENS)
        whole = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        placed = {name: _placed(name, x, mesh, cut).requires_grad_() for name, x in tensors.items()}
        check_same(placed, whole)


def _placed(name: str, x: Tensor, mesh: Any, cut: str) -> Any:
    heads = {"initial_state": 1}.get(name, 2)
    other = Shard(0) if cut == "B" else Shard(heads)
    return distribute_tensor(x, mesh, [other, Shard(1) if name in with_tokens("channel") else Replicate()])


def heads_that_do_not_divide(ranks: Ranks) -> None:
    """Three heads on two ranks: the op says which, and so does the exchange of heads; so do sizes that differ."""
    mesh = init_device_mesh("cpu", (2, ranks.world // 2))
    x = random(2, 4, 3, 4)
    placed: Any = distribute_tensor(x, mesh, [Shard(2), Replicate()])
    with pytest.raises(DistributedTensorError, match="H = 3 of q cannot be cut evenly"):
        linear_attention(placed, placed, placed)
    with pytest.raises(ContextParallelError, match="cannot divide the 3 heads of q by 4 ranks"):
        linear_attention(x, x, x, context_parallel=ContextParallel(method="heads"))
    mine = random(1, 4, 5 if ranks.rank == 2 else 6)
    with pytest.raises(ContextParallelError, match="C is 6 on rank 0, but 5 on rank 2"):
        causal_conv1d(mine, random(mine.shape[2], 4), context_parallel=ContextParallel())
    order = "zigzag" if ranks.rank == 3 else "contiguous"
    with pytest.raises(ContextParallelError, match="the number of fragments is 1 on rank 0, but 2 on rank 3"):
        linear_attention(x, x, x, context_parallel=ContextParallel(order=order))


def steps_of_many(ranks: Ranks) -> None:
    """Maps in steps, in turn and not, and over more ranks than a group of tests has elsewhere."""
    tokens = 4 * ranks.world
    for order, overlap, bounds in (("contiguous", False, [0, 3, 3, 11, tokens]), ("zigzag", True, None)):
        compare(
            lambda x, c, b=bounds: attend(x, c, b),
            operands("channel", bounds, tokens), with_tokens("channel"),
            ContextParallel(order=order, steps=True, overlap=overlap), shared=1,
        )  # fmt: skip
