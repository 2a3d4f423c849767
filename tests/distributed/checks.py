"""What the ranks of a process group check: results and gradients of a rank's tokens against those of all tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from examples import context_parallel
from kdacompile.distributed import ContextParallel, causal_conv1d
from kdacompile.ops import linear_attention, mla
from kdacompile.ops.errors import ContextParallelError, DistributedTensorError
from tests.distributed.processes import Ranks

TOKENS = 24
BOUNDS = [0, 3, 3, 11, 24, 24]
"""Sequences that cross ranks, lie inside one, and are empty, in the middle and at the end."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def operands(gate: str, bounds: Sequence[int] | None, tokens: int) -> dict[str, Tensor]:
    """Float64 operands of linear attention; keys longer than 1, and gates of -1000 among them."""
    batch, heads, value_heads, keys, values = 1 if bounds else 2, 2, 4, 5, 3
    layout = {"head": (), "token": (batch, tokens), "channel": (batch, tokens)}
    found = {
        "q": random(batch, tokens, heads, keys),
        "k": 0.6 * random(batch, tokens, heads, keys),
        "v": random(batch, tokens, value_heads, values),
        "beta": torch.rand(batch, tokens, value_heads, dtype=torch.float64),
        "initial_state": random(len(bounds) - 1 if bounds else batch, value_heads, keys, values),
    }
    if gate != "none":
        g = -torch.rand(*layout[gate], value_heads, *((keys,) if gate == "channel" else ()), dtype=torch.float64)
        if gate != "head":
            g[:, tokens // 3] = -1000.0
        found["g"] = g
    return found


def compare(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: dict[str, Tensor],
    sharded: Sequence[str],
    context: ContextParallel,
    shared: int = 0,
) -> None:
    """``function(tensors, context)`` on a rank's tokens against ``function(tensors, None)`` on all of them.

    The last ``shared`` results are the same on every rank; the others have tokens along dimension 1.
    """
    whole = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    expected = function(whole, None)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in expected]
    torch.autograd.backward(expected, weights)
    mine = {n: (context.shard(x) if n in sharded else x).clone().requires_grad_() for n, x in tensors.items()}
    results = function(mine, context)
    cut = len(results) - shared
    total: Any = 0.0
    for i, (have, want, weight) in enumerate(zip(results, expected, weights, strict=True)):
        torch.testing.assert_close(have, context.shard(want) if i < cut else want)
        total = total + ((have * context.shard(weight)) if i < cut else have * weight / context.ranks).sum()
    total.backward()
    for name, x in mine.items():
        grad, want = x.grad, whole[name].grad
        assert grad is not None and want is not None
        if name not in sharded:
            dist.all_reduce(grad, group=context.group)  # each rank's share
        torch.testing.assert_close(grad, context.shard(want) if name in sharded else want)


def attend(tensors: dict[str, Tensor], context: Any, bounds: Sequence[int] | None, **options: Any) -> Any:
    bounds_of = None if bounds is None else torch.tensor(bounds)
    return linear_attention(
        **tensors, cu_seqlens=bounds_of, output_final_state=True, context_parallel=context, **options
    )


def with_tokens(gate: str) -> tuple[str, ...]:
    return ("q", "k", "v", "beta", *(() if gate in ("none", "head") else ("g",)))


def rows_of_the_family(ranks: Ranks) -> None:
    """Every gate, with and without the delta rule, both orders and methods, rows of a batch and packed sequences."""
    for order in ("contiguous", "zigzag"):
        for method in ("maps", "heads"):
            context = ContextParallel(order=order, method=method)
            for gate in ("none", "head", "token", "channel"):
                for bounds, delta in ((None, True), (BOUNDS, True), (BOUNDS, False), (None, False)):
                    compare(
                        lambda x, c, b=bounds, d=delta: attend(x, c, b, delta=d),
                        operands(gate, bounds, TOKENS), with_tokens(gate), context, shared=1,
                    )  # fmt: skip


def fragments_of_many_lengths(ranks: Ranks) -> None:
    """The last ranks are shorter, or empty; sequences end where ranks do; everything on one token."""
    most = 4 * ranks.world - 1
    for total, bounds in ((most, None), (most, [0, 4, most]), (2, None), (1, [0, 1])):
        context = ContextParallel(total_length=total)
        for delta in (True, False):
            compare(
                lambda x, c, b=bounds, d=delta: attend(x, c, b, delta=d),
                operands("channel", bounds, total), with_tokens("channel"), context, shared=1,
            )  # fmt: skip


def maps_in_steps(ranks: Ranks) -> None:
    """Maps composed in steps: both orders, the delta rule or a diagonal, rows and packed sequences."""
    for order in ("contiguous", "zigzag"):
        for bounds, delta in ((None, True), (BOUNDS, True), (None, False)):
            compare(
                lambda x, c, b=bounds, d=delta: attend(x, c, b, delta=d),
                operands("token", bounds, TOKENS), with_tokens("token"),
                ContextParallel(order=order, steps=True), shared=1,
            )  # fmt: skip


def gate_functions_and_layouts(ranks: Ranks) -> None:
    """Parameters of gate functions get a share of their gradient on each rank; norms and state layouts as ever."""
    for order in ("contiguous", "zigzag"):
        for bounds, delta in ((None, True), (BOUNDS, True), (BOUNDS, False)):
            tensors = operands("channel", bounds, TOKENS)
            tensors |= {"A_log": 0.3 * random(4), "dt_bias": random(4, 5), "g": random(*tensors["g"].shape)}
            tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
            compare(
                lambda x, c, b=bounds, d=delta: attend(
                    x, c, b, delta=d, gate_fn="softplus", sigmoid_beta=True, qk_l2norm=True, state_layout="VK"
                ),
                tensors, with_tokens("channel"), ContextParallel(order=order), shared=1,
            )  # fmt: skip


def rounding_of_bf16(ranks: Ranks) -> None:
    """bf16 inputs, weak gates: outputs, states and gradients are no farther from float64 than those of one rank."""
    for order in ("contiguous", "zigzag"):
        context, tensors = ContextParallel(order=order), operands("channel", None, 16 * TOKENS)
        tensors["g"] = -0.02 * torch.rand_like(tensors["g"])
        rounded = {name: x if name == "initial_state" else x.bfloat16() for name, x in tensors.items()}
        exact = {name: x.double().requires_grad_() for name, x in rounded.items()}
        whole = {name: x.clone().requires_grad_() for name, x in rounded.items()}
        cut = with_tokens("channel")
        mine = {n: (context.shard(x) if n in cut else x).clone().requires_grad_() for n, x in rounded.items()}
        results: list[list[Tensor]] = []
        for inputs, where in ((exact, None), (whole, None), (mine, context)):
            o, state = attend(inputs, where, None)
            (o.double().sum() + state.double().sum() / (1 if where is None else ranks.world)).backward()
            grads = [x.grad for name, x in inputs.items() if name in cut and x.grad is not None]
            found = [o, *grads] if where is not None else [context.shard(x) for x in (o, *grads)]
            results.append([x.detach().double() for x in (*found, state)])
        for want, alone, have in zip(*results, strict=True):
            scale = want.abs().max()
            error, allowed = (have - want).abs().max() / scale, (alone - want).abs().max() / scale
            assert error <= 1.1 * allowed + 1e-6, (order, float(error), float(allowed))


def convolution(ranks: Ranks) -> None:
    for order in ("contiguous", "zigzag"):
        for bounds in (None, BOUNDS):
            rows = 1 if bounds else 2
            tensors = {"x": random(rows, TOKENS, 6), "weight": random(6, 4), "bias": random(6)}
            compare(lambda x, c, b=bounds: (convolve(x, c, b),), tensors, ("x",), ContextParallel(order=order))


def convolution_of_few_tokens(ranks: Ranks) -> None:
    """The last ranks have fewer tokens, or none; a halo that would reach over a fragment is refused on every rank."""
    for total in (4 * ranks.world - 1, 4, 2, 1):
        tensors = {"x": random(2, total, 6), "weight": random(6, 4), "bias": random(6)}
        compare(lambda x, c: (convolve(x, c, None),), tensors, ("x",), ContextParallel(total_length=total))
    alone = {"x": random(1, 5, 6), "weight": random(6, 1), "bias": random(6)}
    mine = {n: ContextParallel().shard(x) if n == "x" else x for n, x in alone.items()}
    torch.testing.assert_close(
        convolve(mine, ContextParallel(), None), F.silu(mine["x"] * mine["weight"].T + mine["bias"])
    )
    for order in ("contiguous", "zigzag"):
        context = ContextParallel(order=order, total_length=2 * ranks.world)
        with pytest.raises(ContextParallelError, match="a convolution of width 4 needs 3 tokens in each fragment"):
            convolve({"x": random(1, 2, 6), "weight": random(6, 4), "bias": random(6)}, context, None)
    # T of all ranks is not given: their tokens are compared, and the last rank knows as well as the others.
    with pytest.raises(ContextParallelError, match="a convolution of width 4 needs 3 tokens in each fragment"):
        convolve({"x": random(1, 2, 6), "weight": random(6, 4), "bias": random(6)}, ContextParallel(), None)
    held = {"x": random(2, (3, 2, 0)[ranks.rank], 6), "weight": random(6, 4), "bias": random(6)}
    assert convolve(held, ContextParallel(), None).shape == held["x"].shape
    with pytest.raises(ContextParallelError, match=r"zigzag over 3 ranks needs a multiple of 6 tokens"):
        convolve({**held, "x": random(1, 3, 6)}, ContextParallel(order="zigzag"), None)


def convolve(tensors: dict[str, Tensor], context: Any, bounds: Sequence[int] | None) -> Tensor:
    x, weight, bias = tensors["x"], tensors["weight"], tensors["bias"]
    if context is not None:
        cu_seqlens = None if bounds is None else torch.tensor(bounds)
        return causal_conv1d(x, weight, bias, context_parallel=context, activation="silu", cu_seqlens=cu_seqlens)
    spans = [(0, x.shape[1])] if bounds is None else itertools.pairwise(bounds)
    parts = [x[:, start:end].mT for start, end in spans if end > start]
    return torch.cat([F.silu(F.conv1d(F.pad(p, (3, 0)), weight[:, None], bias, groups=6)).mT for p in parts], 1)


def latent_attention(ranks: Ranks) -> None:
    for order in ("contiguous", "zigzag"):
        for causal in (True, False):
            compare(
                lambda x, c, causal=causal: latent(x, c, causal),
                latents(), ("q", "q_rope", "latent", "k_rope"), ContextParallel(order=order),
            )  # fmt: skip


def latent_attention_of_documents(ranks: Ranks) -> None:
    """Masks: packed documents that cross ranks, causal within themselves; padding, one row for all; numbers to add."""
    number = torch.bucketize(torch.arange(TOKENS), torch.tensor(BOUNDS[1:]), right=True)
    documents = (number[:, None] == number[None]).tril()[None, None]
    padding = (torch.arange(TOKENS) >= torch.tensor([[0], [5]]))[:, None, None]
    for mask, causal in ((documents, False), (documents, True), (padding, False), (random(2, 3, TOKENS, TOKENS), True)):
        for order in ("contiguous", "zigzag"):
            context = ContextParallel(order=order)
            tensors = latents() | ({"mask": mask} if mask.is_floating_point() else {})

            def call(x: dict[str, Tensor], c: Any, mask: Tensor = mask, causal: bool = causal) -> tuple[Tensor, Tensor]:
                whole = x.get("mask", mask)
                rows = whole if c is None or whole.shape[2] == 1 else c.shard(whole, 2)
                return latent({**x, "mask": rows}, c, causal)

            compare(call, tensors, ("q", "q_rope", "latent", "k_rope"), context)
    short = latents()
    mine = {n: context.shard(x) if n in ("q", "q_rope", "latent", "k_rope") else x for n, x in short.items()}
    with pytest.raises(ContextParallelError, match="columns of all tokens"):
        latent({**mine, "mask": documents[..., : TOKENS // 2, : TOKENS // 2]}, context, False)


def latents() -> dict[str, Tensor]:
    """Operands of MLA with weights, of all tokens."""
    return {
        "q": random(2, TOKENS, 3, 4), "q_rope": random(2, TOKENS, 3, 2), "latent": random(2, TOKENS, 5),
        "k_rope": random(2, TOKENS, 2), "w_uk": random(3, 4, 5), "w_uv": random(3, 6, 5),
    }  # fmt: skip


def latent(tensors: dict[str, Tensor], context: Any, causal: bool) -> tuple[Tensor, Tensor]:
    o, lse = mla(**tensors, causal=causal, return_lse=True, context_parallel=context)  # type: ignore[arg-type, misc]
    return o, lse.transpose(1, 2)


def under_compile(ranks: Ranks) -> None:
    """One graph, with its backward, and the same numbers."""
    tensors, context = operands("channel", None, TOKENS), ContextParallel(order="zigzag", overlap=True)
    mine = [context.shard(x) if n in with_tokens("channel") else x for n, x in tensors.items()]
    leaves = [x.clone().requires_grad_() for x in mine]

    def model(*values: Tensor) -> tuple[Tensor, Tensor | None]:
        return attend(dict(zip(tensors, values, strict=True)), context, None)

    found = []
    for function in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        o, state = function(*leaves)
        assert state is not None
        found.append([o, state, *torch.autograd.grad(o.sum() + state.sum(), leaves)])
    torch.testing.assert_close(*found)


def ranks_that_differ(ranks: Ranks) -> None:
    """Sizes that are not those of rank 0 are named with their ranks, on every rank."""
    x = random(1, 4, 2, 4 if ranks.rank else 6)
    with pytest.raises(ContextParallelError, match="K is 6 on rank 0, but 4 on rank 1"):
        linear_attention(x, x, x, context_parallel=ContextParallel())
    with pytest.raises(ContextParallelError, match="T is 4 on rank 0, but 6 on rank 1"):
        x = random(1, 6 if ranks.rank else 4, 2, 4)
        linear_attention(x, x, x, context_parallel=ContextParallel(order="zigzag"))
    with pytest.raises(ContextParallelError, match="rank 1 of 2 must hold 4 of 8 tokens, but has 6"):
        linear_attention(x, x, x, context_parallel=ContextParallel(), cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises(ContextParallelError, match="rank 0 of 2 must hold 3 of 6 tokens, but has 4"):
        linear_attention(x, x, x, context_parallel=ContextParallel(total_length=6))
    with pytest.raises(ContextParallelError, match="delta is 1 on rank 0, but 0 on rank 1"):
        linear_attention(x, x, x, context_parallel=ContextParallel(), delta=ranks.rank == 0)


def a_rank_that_does_not_come(ranks: Ranks) -> None:
    """The others get torch.distributed's error after the group's timeout, before and behind the check of sizes."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert not isinstance(group, int)
    for check in (True, False):
        x = random(1, 4, 2, 4)
        if ranks.rank == 0:
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|closed|aborted"):
                linear_attention(x, x, x, context_parallel=ContextParallel(group, check=check))


def check_same(placed: dict[str, Any], whole: dict[str, Tensor]) -> None:
    """Results and gradients of the op on DTensors, beside those on whole tensors."""
    found: list[list[Any]] = []
    for inputs in (placed, whole):
        o, state = attend(inputs, None, None)
        total = o.square().sum() + state.square().sum()
        found.append([o, state, *torch.autograd.grad(total, list(inputs.values()))])
    for have, want in zip(*found, strict=True):
        assert isinstance(have, DTensor)
        torch.testing.assert_close(have.full_tensor(), want)


def tokens_of_dtensors(ranks: Ranks) -> None:
    """DTensors sharded along T: the op finds the group in their mesh, and gradients are DTensors too."""
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    for tokens in (TOKENS, TOKENS - 1):
        tensors = operands("channel", None, tokens)
        whole = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        placed: dict[str, Any] = {
            name: distribute_tensor(x, mesh, [Shard(1) if name in with_tokens("channel") else Replicate()])
            for name, x in tensors.items()
        }
        placed = {name: x.requires_grad_() for name, x in placed.items()}
        check_same(placed, whole)
    with pytest.raises(DistributedTensorError, match="k is "):
        linear_attention(placed["q"], placed["k"].redistribute(mesh, [Replicate()]), placed["v"])


def dtensors_cut_otherwise(ranks: Ranks) -> None:
    """One compiled function, of DTensors cut by heads, then by tokens, then by more tokens: only sizes of shards become
    symbols, or those of the whole as well.
    """
    mesh = DeviceMesh("cpu", list(range(ranks.world)))

    def attend(*given: Any) -> Any:
        return linear_attention(*given[:5], A_log=given[5], gate_fn="softplus", output_final_state=True)

    function = torch.compile(attend, backend="kda", options={"kda.inner": "aot_eager"})
    for tokens, cuts in ((TOKENS, (2,) * 5 + (0,)), (TOKENS, (1,) * 5), (TOKENS + 3, (1,) * 5)):
        tensors = operands("channel", None, tokens)
        given = [*(tensors[name] for name in ("q", "k", "v", "g", "beta")), 0.3 * random(4)]
        places = [Shard(dim) for dim in cuts] + [Replicate()] * (len(given) - len(cuts))
        placed: list[Any] = [
            distribute_tensor(x, mesh, [place]).requires_grad_() for x, place in zip(given, places, strict=True)
        ]
        whole = [x.clone().requires_grad_() for x in given]
        found: list[list[Any]] = []
        for inputs, call in ((placed, function), (whole, attend)):
            o, state = call(*inputs)
            found.append([o, state, *torch.autograd.grad(o.square().sum() + state.square().sum(), inputs)])
        for have, want in zip(*found, strict=True):
            torch.testing.assert_close(have.full_tensor(), want)


def checkpoint_of_a_state(ranks: Ranks) -> None:
    """A state sharded by heads, saved by all ranks, is loaded by one process and by ranks that shard the batch."""
    mesh, tensors = DeviceMesh("cpu", list(range(ranks.world))), operands("token", None, TOKENS)
    cuts = {"g": 2, "initial_state": 1}
    placed: dict[str, Any] = {n: distribute_tensor(x, mesh, [Shard(cuts.get(n, 2))]) for n, x in tensors.items()}
    saved: Any = attend(placed, None, None)[1]
    want, folder = saved.full_tensor(), ranks.folder / "checkpoint"
    checkpoint.save({"state": saved}, checkpoint_id=folder)
    by_batch: Any = distribute_tensor(torch.zeros_like(want), mesh, [Shard(0)])
    alone = torch.zeros_like(want)
    checkpoint.load({"state": by_batch}, checkpoint_id=folder)
    checkpoint.load({"state": alone}, checkpoint_id=folder, no_dist=True)
    torch.testing.assert_close(alone, want, rtol=0, atol=0)
    torch.testing.assert_close(by_batch.full_tensor(), want, rtol=0, atol=0)


def example(ranks: Ranks) -> None:
    """A layer's gradients, as ``examples/context_parallel.py`` compares them itself."""
    context_parallel.compare(torch.device("cpu"), quick=True)
