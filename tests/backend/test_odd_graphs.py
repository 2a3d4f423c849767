"""Graphs that have nothing or little to do with linear attention must go through the pass unharmed.

A linear-attention region stands beside each oddity, so that the cheap test lets the graph through.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile import backend, collecting
from tests.backend.layers import delta_arguments, gated_delta_loop, patterns, run_both
from tests.compare import worst_error

Function = Callable[..., Any]
ODD: list[Function] = []


def odd(fn: Function) -> Function:
    ODD.append(fn)
    return fn


@odd
def complex_numbers(x: Tensor) -> Tensor:
    return torch.view_as_real(torch.fft.fft(x, dim=1) * torch.polar(x.abs(), x))


@odd
def booleans_and_integers(x: Tensor) -> Tensor:
    index = (x > 0).sum(-1).to(torch.int64).clamp_(max=2)
    return torch.nn.functional.one_hot(index, 5).to(torch.uint8) << 1


@odd
def eight_bits(x: Tensor) -> Tensor:
    scale = x.abs().amax() / 127
    return (x / scale).round().to(torch.int8) * 1


@odd
def float8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


@odd
def empty_tensors(x: Tensor) -> Tensor:
    nothing = x[:0]
    return torch.cat([nothing @ nothing.transpose(-1, -2), nothing.new_zeros(0, x.shape[1], x.shape[2], x.shape[2])])


@odd
def no_dimensions(x: Tensor) -> Tensor:
    total = x.sum()
    total.add_(1)
    return total * torch.tensor(2.0) + total.clone().squeeze()


@odd
def lists_of_tensors(x: Tensor) -> list[Tensor]:
    pieces = list(x.unbind(1))
    return [*torch._foreach_add(pieces, 1.0), torch.stack(pieces[:3]), *x.split([1, 2], dim=1)]


@odd
def chunks_written(x: Tensor) -> Tensor:
    y = x.clone()
    first, second = y.chunk(2, dim=-1)
    first.mul_(2)
    second.copy_(first)
    return y


@odd
def unbound_rows_written(x: Tensor) -> Tensor:
    y = x.clone()
    for index, row in enumerate(y.unbind(1)):
        row.add_(index)
    return y


@odd
def views_of_views_written(x: Tensor) -> Tensor:
    y = x.clone()
    y.transpose(1, 2)[:, 0].unsqueeze(-1).squeeze(-1)[..., ::2].sub_(3)
    y.view(-1)[4:8] = 0
    return y.permute(2, 0, 1, 3)[1].mul_(2), y  # type: ignore[return-value]


@odd
def diagonals_written(x: Tensor) -> Tensor:
    y = x[..., :3].clone()
    y.diagonal(dim1=-2, dim2=-1).fill_(7)
    torch.diagonal(y, 1, -2, -1)[:] = y.diagonal(0, -2, -1)[..., 1:]
    return y


@odd
def strided_by_hand(x: Tensor) -> Tensor:
    y = x.clone()
    window = y.as_strided((3, 4), (2, 1), 1)
    window.add_(1)
    return window, y  # type: ignore[return-value]


@odd
def masks_and_indices_written(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0.5] = 0
    y[torch.tensor([0, 1]), 1] += 1
    y.index_add_(1, torch.tensor([0, 0]), torch.ones_like(y[:, :2]))
    y.scatter_(1, torch.zeros_like(y[:, :1], dtype=torch.int64), 5.0)
    y.masked_fill_(y < 0, -1)
    return y


@odd
def written_through_out(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    torch.mul(y, 2, out=y)
    return y


@odd
def random_numbers(x: Tensor) -> Tensor:
    return (torch.rand_like(x) + torch.randn(3)[0] + x.new_empty(2).uniform_().sum()) * 0 + x


@odd
def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t @ t.transpose(-1, -2) @ t, (x,))


@odd
def while_loop(x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop as run

    return run(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]


@odd
def scan(x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan as run

    return run(lambda c, y: (c + y, (c * y).clone()), torch.zeros_like(x[:, 0]), x, dim=1)[1]


@odd
def map_over_batch(x: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as run

    return run(lambda row, *_: row.sin(), x)  # type: ignore[no-any-return]


@odd
def sizes_from_data(x: Tensor) -> Tensor:
    picked = x[x[:, 0, 0, 0] > -100]
    return picked.sum() + picked.shape[0]


@odd
def asserts_and_prints(x: Tensor) -> Tensor:
    torch._assert(x.shape[0] == 2, "two rows")
    torch._assert_async(x.sum() > -1e9)
    return x + 1


@odd
def triangular_and_decompositions(x: Tensor) -> Any:
    square = x[..., :3] @ x[..., :3].transpose(-1, -2) + 5 * torch.eye(x.shape[-2])
    return torch.linalg.cholesky(square), torch.linalg.svdvals(square), torch.linalg.solve(square, x), square.logdet()


@odd
def named_tuples(x: Tensor) -> Any:
    return torch.topk(x, 2), torch.sort(x), x.max(-1), torch.aminmax(x)


@odd
def losses_and_pooling(x: Tensor) -> Any:
    images = x.transpose(1, 2)
    return (
        torch.nn.functional.max_pool2d(images, 2, return_indices=True),
        torch.nn.functional.interpolate(images, scale_factor=2.0),
        torch.nn.functional.cross_entropy(x.flatten(0, 2), torch.arange(x[..., 0].numel()) % 3),
        torch.nn.functional.embedding(torch.tensor([1, 2]), x[0, 0]),
        torch.nn.functional.unfold(images, 2),
    )


@odd
def recurrent_network(x: Tensor) -> Tensor:
    cell = x[0, 0, :, :].tanh()
    for t in range(3):
        cell = torch.sigmoid(cell @ cell.T @ x[0, t]) * cell
    return cell


@odd
def cumulative(x: Tensor) -> Any:
    return x.cumsum(1).cumprod(2), x.logcumsumexp(1), torch.cummax(x, 1), torch.cdist(x, x), x.softmax(1).flip(1)


@odd
def broadcast_and_meshes(x: Tensor) -> Any:
    a, b = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    return (
        torch.broadcast_tensors(x, x[:1]),
        a + b,
        torch.cartesian_prod(a[:, 0], b[0]),
        torch.block_diag(x[0, 0], x[1, 1]),
    )


@odd
def inplace_activation(x: Tensor) -> Tensor:
    y = torch.nn.functional.relu(x * 1, inplace=True)
    y.abs_()
    return torch.nn.functional.dropout(y, 0.0, inplace=True)


@odd
def double_and_half(x: Tensor) -> Any:
    return x.double() @ x.double().transpose(-1, -2), x.half().float(), x.bfloat16() * 2, x.to(torch.complex64).abs()


@odd
def tensors_in_keywords(x: Tensor) -> Tensor:
    return torch.where(condition=x > 0, input=x, other=torch.zeros_like(input=x)).addcmul(tensor1=x, tensor2=x, value=2)


@pytest.mark.parametrize("fn", ODD, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("feeds", [False, True], ids=["beside", "before"])
def test_odd_graph(fn: Function, feeds: bool) -> None:
    def with_region(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        if feeds:  # the oddity reads what the region yields
            mixed = gated_delta_loop(q, k, v, g, beta)
            return fn(mixed), mixed
        strange = fn(v)
        return strange, gated_delta_loop(q, k, v, g, beta)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            ours, plain, report = run_both(with_region, delta_arguments(length=3))
    assert worst_error(ours, plain) < 1e-5
    assert patterns(report) == ["gated_delta_rule"]


def with_numbers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention whose decays and places are numbers of the text."""
    decay, place = torch.tensor([2.0, 2.0, 2.0]) / 2.5, torch.as_tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    return (q @ k.mT * (decay[:, None, None] ** (place[:, None] - place).clamp(min=0)).tril()) @ v


@pytest.mark.parametrize("sizes", [False, True], ids=["text", "sizes"])
def test_numbers_made_by_a_tensor(sizes: bool) -> None:
    """``q.new_tensor(numbers)``, which torch 2.11 captures as that method. On stand-ins without data the numbers are
    lost: they are those of the text, or, as sizes of another tensor, unknown.
    """

    def captured(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        first = next(node for node in gm.graph.nodes if node.op == "placeholder")
        made = [node for node in gm.graph.nodes if node.target in (torch.tensor, torch.as_tensor)]
        with gm.graph.inserting_before(made[0]):
            batch = gm.graph.call_method("size", (first, 0))
        batch.meta["example_value"] = 2
        for node in made:
            numbers = [batch] * 3 if sizes and node is made[0] else node.args[0]
            node.op, node.target, node.args, node.kwargs = "call_method", "new_tensor", (first, numbers), {}
        gm.recompile()
        return backend.kda(gm, inputs, options={"kda.cost_model": False})

    arguments = [torch.randn(2, 3, 6, 4) for _ in range(3)]
    torch._dynamo.reset()
    with collecting() as report:
        have = torch.compile(with_numbers, backend=captured)(*arguments)
    assert worst_error(have, with_numbers(*arguments)) < 1e-5
    assert sizes or patterns(report) == ["retention"]
    assert not [rejection for rejection in report.rejections if rejection.code == "internal"]


def of_places(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention whose queries, keys and values are chosen by lists of numbers."""
    return (q[:, [2, 1, 0]] @ k[:, :, [0, 0, 1, 2, 3, 4]].mT).tril() @ v[..., [[3, 1]]].squeeze(-2)


def of_a_loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outs = torch.zeros(2, 3, 4, 4), torch.zeros_like(v)
    for t in range(q.shape[2]):
        state = state + k[:, :, [t]].mT @ v[:, :, [t]]
        outs[:, :, [t]] = q[:, :, [t]] @ state
    return outs


@pytest.mark.parametrize("program", [of_places, of_a_loop])
def test_places_in_a_list(program: Any) -> None:
    """Lists become tensors on the indexed one's device: on stand-ins they were lost, and an internal error."""
    arguments = [torch.randn(2, 3, 6, 4) for _ in range(3)]
    torch._dynamo.reset()
    with collecting() as report:
        have = torch.compile(program, backend="kda", options={"kda.inner": "eager", "kda.lift": False})(*arguments)
    assert worst_error(have, program(*arguments)) < 1e-5
    assert patterns(report) == ["linear_attention"], str(report)
