"""What two GPUs check (NCCL, Inductor): ``test_parallel_cuda.py`` runs these in two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from examples import context_parallel, tensor_parallel
from kdacompile.bench.parallel import Case, inputs
from kdacompile.distributed import ContextParallel, causal_conv1d
from kdacompile.ops import linear_attention, mla
from kdacompile.report.collect import collecting
from tests.distributed.processes import Ranks

WITH_TOKENS = ("q", "k", "v", "g", "beta", "q_rope", "latent", "k_rope")
SLACK = 1.1
"""How much farther from float64 than one GPU a result may be."""
NOISY = {"dA_log": 1.5, "ddt_bias": 1.25}
"""The same of sums over all tokens in which most cancels: a number for each head, or channel."""

Function = Callable[..., tuple[Tensor, ...]]


def gradients(
    function: Function, tensors: dict[str, Tensor], context: Any, weights: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Results and gradients by float64: of all tokens, or of a rank's with what is shared summed over ranks."""
    given = {n: context.shard(x) if context and n in WITH_TOKENS else x for n, x in tensors.items()}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in given.items()}
    found = function(leaves, context)
    if weights is None:
        generator = torch.Generator("cuda").manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator, device="cuda") for x in found]
    parts = [weights[0] if context is None else context.shard(weights[0])]
    parts += [x if context is None else x / context.ranks for x in weights[1:]]  # a state is on every rank
    grads = torch.autograd.grad(
        found, list(leaves.values()), [w.to(x.dtype) for w, x in zip(parts, found, strict=True)]
    )
    grads = [x.double() for x in grads]
    if context is not None:
        for name, grad in zip(leaves, grads, strict=True):
            if name not in WITH_TOKENS:
                dist.all_reduce(grad)
    return [*(x.detach().double() for x in found), *grads], weights


def compare(
    label: str, function: Function, tensors: dict[str, Tensor], context: ContextParallel, slack: float = SLACK
) -> None:
    """bf16 results and gradients of the ranks are no farther from float64 than those of one GPU."""
    exact = {name: x.double() for name, x in tensors.items()}
    want, weights = gradients(function, exact, None, None)
    alone, _ = gradients(function, tensors, None, weights)
    have, _ = gradients(function, tensors, context, weights)
    count = len(want) - len(tensors)
    names = ["o", *("state",) * (count - 1), *(f"d{name}" for name in tensors)]
    cut = [True, *(False,) * (count - 1), *(name in WITH_TOKENS for name in tensors)]
    worse, said = [], []
    for name, sharded, w, one, mine in zip(names, cut, want, alone, have, strict=True):
        if not sharded:
            errors = [(x - w).square().sum() for x in (one, mine)]
        else:
            errors = [(x - context.shard(w)).square().sum() for x in (context.shard(one), mine)]
            for error in errors:
                dist.all_reduce(error)
        by_one, by_ranks = (float((error / w.square().sum()).sqrt()) for error in errors)
        said.append(f"{name} {by_ranks:.2e} ({by_one:.2e})")
        if not by_ranks <= max(slack, NOISY.get(name, 0.0)) * by_one + 1e-6:
            worse.append(said[-1])
    if dist.get_rank() == 0:
        print(f"{label}, ranks (one GPU): {', '.join(said)}", flush=True)
    assert not worse, (label, worse)


def row(name: str, tokens: int = 8192, width: int = 128) -> None:
    """Contiguous, zigzag, and packed sequences that cross the ranks, from an initial state."""
    case = Case(name, name, length=tokens, heads=4, width=width)
    tensors, options = inputs(case)
    for order, packed in (("contiguous", False), ("zigzag", False), ("contiguous", True)):
        third = tokens // 3
        bounds = torch.tensor([0, 70, third, 2 * third + 5, tokens], device="cuda") if packed else None
        state = 0.1 * torch.randn(4 if packed else 1, 4, width, width, device="cuda")
        dist.broadcast(state, 0)

        def attend(x: dict[str, Tensor], context: Any, bounds: Any = bounds) -> tuple[Tensor, ...]:
            found = linear_attention(
                **x, **options, cu_seqlens=bounds, output_final_state=True, context_parallel=context
            )  # type: ignore[arg-type]
            assert found[1] is not None
            return found[0], found[1]

        label = f"{name}, {width} wide, {'packed' if packed else order}"
        compare(label, attend, {**tensors, "initial_state": state}, ContextParallel(order=order))


def kda(ranks: Ranks) -> None:
    row("kda")


def gdn(ranks: Ranks) -> None:
    row("gdn")


def gla(ranks: Ranks) -> None:
    row("gla")


def narrow(ranks: Ranks) -> None:
    """Heads for which the maps are columns of one pass."""
    row("kda", 512, 16)
    row("gla", 512, 16)


def latents(ranks: Ranks) -> None:
    """DeepSeek-V3's latent and heads, fewer of them."""
    sizes: dict[str, tuple[int, ...]] = {
        "q": (1, 1024, 4, 128), "q_rope": (1, 1024, 4, 64), "latent": (1, 1024, 512), "k_rope": (1, 1024, 64),
        "w_uk": (4, 128, 512), "w_uv": (4, 128, 512),
    }  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {name: torch.randn(size, generator=generator, device="cuda").bfloat16() for name, size in sizes.items()}
    tensors |= {name: (tensors[name] / 512**0.5).bfloat16() for name in ("w_uk", "w_uv")}
    for order in ("contiguous", "zigzag"):
        compare(
            f"latents, {order}",
            lambda x, context: (mla(**x, causal=True, context_parallel=context),),  # type: ignore[arg-type]
            tensors, ContextParallel(order=order), 2**0.5,  # gradients of latents: bf16 parts, summed
        )  # fmt: skip


def convolution(ranks: Ranks) -> None:
    x = {"latent": torch.randn(2, 64, 96, device="cuda"), "weight": torch.randn(96, 4, device="cuda")}
    for value in x.values():
        dist.broadcast(value, 0)
    whole = causal_conv1d(x["latent"], x["weight"], context_parallel=_alone())
    context = ContextParallel(order="zigzag")
    mine = causal_conv1d(context.shard(x["latent"]), x["weight"], context_parallel=context)
    torch.testing.assert_close(mine, context.shard(whole))


def _alone() -> ContextParallel:
    """A group of this rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    assert not isinstance(group, int)
    return ContextParallel(group)


def dtensors(ranks: Ranks) -> None:
    """Heads or tokens of DTensors on different GPUs, eagerly and compiled by Inductor."""
    mesh = DeviceMesh("cuda", list(range(ranks.world)))
    tensors, options = inputs(Case("kda", "kda", length=2048, heads=4))
    heads: dict[str, int] = {"A_log": 0, "dt_bias": 0}

    def attend(*given: Any) -> Any:
        return linear_attention(**dict(zip(tensors, given, strict=True)), **options)[0]  # type: ignore[arg-type]

    want = attend(*tensors.values())
    by_heads, by_tokens = (dict.fromkeys(map(str, WITH_TOKENS), dim) for dim in (2, 1))
    for cuts in (heads | by_heads, by_tokens):
        placed: list[Any] = [
            distribute_tensor(x, mesh, [Shard(cuts[n]) if n in cuts else Replicate()]).requires_grad_()
            for n, x in tensors.items()
        ]
        torch.compiler.reset()
        found: list[list[Any]] = []
        for function in (attend, torch.compile(attend, backend="kda")):
            o = function(*placed)
            assert isinstance(o, DTensor)
            grads = torch.autograd.grad(o.float().square().sum(), placed)
            results: list[Any] = [o, *grads]
            found.append([x.full_tensor() for x in results])
        torch.testing.assert_close(found[0][0], want, rtol=2e-2, atol=2e-2)
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=2e-2, atol=2e-2 * float(eager.abs().max()))


def compiled_models(ranks: Ranks) -> None:
    """``kda.context_parallel`` with Inductor: a layer that calls the op, and the loop of latent attention."""
    context = ContextParallel(order="zigzag", total_length=1024)
    torch.manual_seed(0)
    block, x = tensor_parallel.Block(256, 4).cuda(), torch.randn(1, 1024, 256, device="cuda")
    options: Any = {"kda.context_parallel": context}
    cos = torch.randn(1024, 1, tensor_parallel.ROPE, device="cuda")
    for value in (*block.parameters(), x, cos):
        dist.broadcast(value.data, 0)
    want = block(x, cos)
    want.square().sum().backward()
    expected = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    with collecting() as report:
        have = torch.compile(block, backend="kda", options=options)(context.shard(x), context.shard(cos, 0))
    assert report.counts == {"mla": 1}, report
    torch.testing.assert_close(have, context.shard(want), rtol=1e-3, atol=1e-3)
    have.square().sum().backward()
    for parameter, grad in zip(block.parameters(), expected, strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max()))


def layers(ranks: Ranks) -> None:
    """The examples: a layer of KDA under context parallelism, latent attention under TP, and under FSDP2."""
    context_parallel.compare(torch.device("cuda", torch.cuda.current_device()), quick=False)
    assert tensor_parallel.train("cuda", 2, ranks.world, 5)
    assert tensor_parallel.train("cuda", 1, ranks.world, 5)
