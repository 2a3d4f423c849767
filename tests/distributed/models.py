"""Models compiled under context parallelism (``kda.context_parallel``): a rank's tokens, results of the whole."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

from examples.tensor_parallel import ROPE, Block
from kdacompile.distributed import ContextParallel
from kdacompile.ops import linear_attention
from kdacompile.report.collect import collecting
from tests.backend.layers import gated_delta_loop
from tests.distributed.processes import Ranks

TOKENS, WIDTH = 8, 12


class Hybrid(nn.Module):
    """A short convolution, written in two ways or not at all, in front of the gated delta rule."""

    def __init__(self, padded: bool | None, mixer: Callable[..., Tensor], heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.heads, self.padded, self.mixer = heads, padded, mixer
        channels = 3 * heads * size
        self.qkv = nn.Linear(WIDTH, channels, bias=False)
        if padded is not None:
            self.conv = nn.Conv1d(channels, channels, 3, groups=channels, padding=0 if padded else 2, bias=bool(padded))
        self.gates = nn.Linear(WIDTH, 2 * heads)
        self.out = nn.Linear(heads * size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.qkv(x)
        if self.padded is not None:
            mixed = mixed.transpose(1, 2)
            mixed = self.conv(F.pad(mixed, (2, 0))) if self.padded else self.conv(mixed)[:, :, : x.shape[1]]
            mixed = mixed.transpose(1, 2)
        q, k, v = F.silu(mixed).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        gate, beta = self.gates(x).unflatten(-1, (2, self.heads)).unbind(-2)
        o = self.mixer(q, F.normalize(k, dim=-1), v, -F.softplus(gate), beta.sigmoid())
        return x + self.out(o.flatten(-2))


def operator(*operands: Tensor) -> Tensor:
    """The op itself, which the model may call as well."""
    return linear_attention(*operands, scale=1.0)[0]


def compiled(model: Any, context: ContextParallel) -> Any:
    options: Any = {"kda.inner": "aot_eager", "kda.lift": False, "kda.context_parallel": context}
    return torch.compile(model, backend="kda", fullgraph=True, dynamic=False, options=options)


def compare(
    model: nn.Module, tensors: tuple[Tensor, ...], dims: tuple[int, ...], order: str, counts: dict[str, int]
) -> None:
    """Results and gradients of a rank's tokens, those of the weights summed over ranks, beside eager on all tokens."""
    context = ContextParallel(order=order, total_length=TOKENS)
    want = model(*tensors)
    weight = torch.linspace(-1, 1, want.numel()).view_as(want)
    (want * weight).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    mine = [context.shard(x, dim) for x, dim in zip(tensors, dims, strict=True)]
    with collecting() as report:
        have = compiled(model, context)(*mine)
    assert report.counts == counts, report
    torch.testing.assert_close(have, context.shard(want))
    (have * context.shard(weight)).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)


def recurrences_and_convolutions(ranks: Ranks) -> None:
    x = (torch.randn(2, TOKENS, WIDTH),)
    compare(Hybrid(False, gated_delta_loop), x, (1,), "contiguous", {"gated_delta_rule": 1})
    compare(Hybrid(True, operator), x, (1,), "zigzag", {})


def latents(ranks: Ranks) -> None:
    compare(Block(), (torch.randn(2, TOKENS, 32), torch.randn(TOKENS, 1, ROPE)), (1, 0), "zigzag", {"mla": 1})


def activations_of_dtensors(ranks: Ranks) -> None:
    """Activations sharded by tokens from layer to layer (``Shard(1)``), the weights replicated."""
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    alone = nn.Sequential(*(Hybrid(None, operator) for _ in range(2)))
    model, x = copy.deepcopy(alone), torch.randn(2, TOKENS, WIDTH)
    distribute_module(model, mesh)
    want = alone(x)
    want.square().sum().backward()
    options: Any = {"kda.inner": "aot_eager"}
    have = torch.compile(model, backend="kda", fullgraph=True, options=options)(distribute_tensor(x, mesh, [Shard(1)]))
    assert isinstance(have, DTensor) and have.placements == (Shard(1),)
    torch.testing.assert_close(have.full_tensor(), want)
    have.square().sum().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        grad: Any = ours.grad
        torch.testing.assert_close(grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)


def region_of_torch(ranks: Ranks) -> None:
    """Inside PyTorch's ``context_parallel``, which cuts the buffers in the order "zigzag"; no other order is taken."""
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    context = ContextParallel(mesh.get_group(), order="zigzag", total_length=TOKENS)
    model, x = Hybrid(False, operator), torch.randn(1, TOKENS, WIDTH)
    want = context.shard(model(x))
    with torch.no_grad(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        assert x.shape[1] == TOKENS // ranks.world
        torch.testing.assert_close(compiled(model, context)(x), want)
        torch.compiler.reset()
        with pytest.raises(Exception, match=r'cut tokens in the order "zigzag", and kda.context_parallel says "contig'):
            compiled(model, ContextParallel(mesh.get_group()))(x)


def refused_in_region_of_torch(ranks: Ranks) -> None:
    """SDPA that PyTorch does not spread over ranks, since it was bound before the region began; products by hand."""
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    context = ContextParallel(mesh.get_group(), order="zigzag", total_length=TOKENS)
    x, bound = torch.randn(1, 2, TOKENS, 4), F.scaled_dot_product_attention

    def alone(x: Tensor) -> Tensor:
        return bound(x, x, x, is_causal=True)

    def by_hand(x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x

    def beside(x: Tensor) -> Tensor:
        placed: Any = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
        scores: Any = (placed @ placed.mT).softmax(-1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) + (scores @ placed).to_local()

    cases = [
        (alone, "attention would see a rank's"),
        (by_hand, "attention would see a rank's"),
        (beside, "not matched"),
    ]
    with torch.no_grad(), ring_on_cpus(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        for model, problem in cases:
            torch.compiler.reset()
            with pytest.raises(Exception, match=problem):
                compiled(model, context)(x)


class Softmax(nn.Module):
    """Causal attention that is nobody's but PyTorch's."""

    def __init__(self, heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * heads * size), nn.Linear(heads * size, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(-2))


def region_of_torch_with_softmax(ranks: Ranks) -> None:
    """SDPA and linear attention of one model in one region, forward and backward.

    PyTorch has rules for the kernels of CUDA alone. Here its own ring runs over the CPU's.
    """
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    context = ContextParallel(mesh.get_group(), order="zigzag", total_length=TOKENS)
    model = nn.Sequential(Hybrid(False, operator), Softmax(), Hybrid(None, gated_delta_loop))
    x = torch.randn(1, TOKENS, WIDTH)
    want = model(x)
    weight = torch.linspace(-1, 1, want.numel()).view_as(want)
    (want * weight).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with ring_on_cpus(), context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]), collecting() as report:
        have = compiled(model, context)(x)
        torch.testing.assert_close(have, context.shard(want))
        (have * context.shard(weight)).sum().backward()
    assert report.counts == {"gated_delta_rule": 1}, report
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)


@contextmanager
def ring_on_cpus() -> Generator[None]:
    """Torch-private: what ``context_parallel`` does to CUDA's kernels of SDPA, for the one of CPUs."""
    ring: Any = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    ops: Any = torch.ops.aten
    forward = ops._scaled_dot_product_flash_attention_for_cpu
    backward = ops._scaled_dot_product_flash_attention_for_cpu_backward

    def local(args: tuple[Any, ...]) -> tuple[DeviceMesh, list[Any]]:
        q = next(x for x in args if isinstance(x, DTensor))
        return q.device_mesh, [x._local_tensor if isinstance(x, DTensor) else x for x in args]

    def placed(results: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in results)

    def go(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
        mesh, (q, k, v, dropout, causal) = local(args)
        found = ring._templated_ring_attention(
            mesh.get_group(), 2, forward, q, k, v, is_causal=causal, dropout_p=dropout, scale=kwargs.get("scale")
        )
        return placed(found[:2], mesh)

    def back(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
        mesh, (grad, q, k, v, out, lse, dropout, causal, *_) = local(args)
        found = ring._templated_ring_attention_backward(
            mesh.get_group(), 2, backward.default, grad_out=grad, grad_out_name="grad_out", query=q, key=k, value=v,
            out=out, logsumexp=lse, is_causal=causal, dropout_p=dropout, scale=kwargs.get("scale"),
        )  # fmt: skip
        return placed(found[:3], mesh)

    with mock.patch.dict(ring.custom_ops, {forward.default: go, backward.default: back}):
        yield


def refused(ranks: Ranks) -> None:
    """What would see a rank's tokens alone is an error, not a wrong result."""
    x = torch.randn(1, 2, 8, 4)

    def softmax(x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def not_causal(x: Tensor) -> Tensor:
        return F.conv1d(x[0], torch.ones(8, 1, 3), padding=1, groups=8)

    cases: list[tuple[Callable[..., Tensor], str]] = [
        (softmax, "attention would see"),
        (attention, "attention would see"),
        (not_causal, "not known to be causal"),
    ]
    for model, problem in cases:
        torch.compiler.reset()
        with pytest.raises(Exception, match=problem):
            compiled(model, ContextParallel(order="contiguous"))(x)
    with pytest.raises(Exception, match="zigzag needs total_length"):
        compiled(Hybrid(False, operator), ContextParallel(order="zigzag"))(torch.randn(1, TOKENS, WIDTH))
