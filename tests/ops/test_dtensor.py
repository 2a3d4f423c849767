"""Distributed tensors in one process: what is refused, and the way around that the message names.

Shards of several processes are checked with context parallelism (``tests/distributed``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor

from kdacompile.ops import errors, linear_attention, linear_attention_step
from kdacompile.report.collect import collecting
from tests.backend.layers import compiled, delta_arguments, gated_delta_loop
from tests.distributed.processes import one_rank
from tests.ops.cases import assert_close, make_case

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import local_map


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank():
        yield DeviceMesh("cpu", [0])


def distribute_tensor(x: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    """Torch's own, of one rank: it would scatter x, which the group "fake" does not up to torch 2.11."""
    return DTensor.from_local(x, mesh, placements)


GATHERS = Version(torch.__version__) < Version("2.12")
CUT = pytest.mark.skipif(
    GATHERS,
    reason="new_zeros of a sharded tensor is a whole one in torch 2.11, so that the state's loop gathers every head",
)

SHAPE = (2, 4, 2, 8)
REFUSED: dict[str, tuple[list[Any], str]] = {
    "tokens of some": ([Shard(1), Replicate(), Shard(1)], "k is Replicate.* cuts the tokens"),
    "columns": ([Shard(3)] * 3, "q is sharded along K"),
    "one alone": ([Shard(2), Replicate(), Shard(2)], "k is Replicate.* cuts the heads"),
    "two ways": ([Shard(0), Shard(0), Shard(2)], "v is Shard.* cuts the batch"),
    "plain": ([Shard(2), Shard(2), None], "v is no DTensor"),
    "partial": ([Replicate(), Replicate(), Partial()], "v is Partial|v is _Partial"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("label", REFUSED)
def test_refused(mesh: DeviceMesh, label: str, grad: bool) -> None:
    placements, problem = REFUSED[label]
    x = torch.ones(SHAPE)
    q, k, v = (x if place is None else DTensor.from_local(x, mesh, [place]) for place in placements)
    with pytest.raises(errors.DistributedTensorError, match=problem) as caught:
        linear_attention(q.requires_grad_(grad), k, v)
    assert "local_map" in str(caught.value)


def test_a_shard_in_place(mesh: DeviceMesh) -> None:
    """The state's own memory is written, and its version counted."""
    q = distribute_tensor(torch.ones(2, 1, 2, 8), mesh, [Shard(2)])
    state = distribute_tensor(torch.ones(2, 2, 8, 8), mesh, [Shard(1)])
    local = state.to_local()
    before = local.clone()
    with torch.no_grad():
        _, new = linear_attention_step(q, q, q, state=state, inplace=True)
    assert new is state and not torch.equal(local, before)


def test_a_pool_of_states_in_place(mesh: DeviceMesh) -> None:
    """Cut by heads every rank writes its heads of the slots; cut by requests each would write a pool of its own."""
    x, states, slots = torch.ones(2, 1, 2, 8), torch.ones(5, 2, 8, 8), torch.tensor([3, -1])
    q, pool = distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(states, mesh, [Shard(1)])
    with torch.no_grad():
        linear_attention_step(q, q, q, state=pool, state_indices=slots, inplace=True)
        linear_attention_step(x, x, x, state=states, state_indices=slots, inplace=True)
        assert torch.equal(pool.to_local(), states) and not torch.equal(states[3], states[2])
        q, pool = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(states, mesh, [Replicate()])
        indices = distribute_tensor(slots, mesh, [Shard(0)])
        with pytest.raises(errors.DistributedTensorError, match="a pool of its own"):
            linear_attention_step(q, q, q, state=pool, state_indices=indices, inplace=True)


def test_local_map_over_heads(mesh: DeviceMesh) -> None:
    case = make_case(length=19)
    plain = [case.tensors[name] for name in ("q", "k", "v", "g", "beta")]
    sharded: list[Any] = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in plain]

    def attend(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return linear_attention(q, k, v, g, beta, sigmoid_beta=True, qk_l2norm=True)[0]

    o: Any = local_map(attend, out_placements=[Shard(2)], in_placements=([Shard(2)],) * 5, device_mesh=mesh)(*sharded)
    leaves = [x.clone().requires_grad_() for x in plain]
    expected = attend(*leaves)
    assert_close((o.full_tensor(),), (expected.double(),), 1e-6)
    actual: Any = torch.autograd.grad(o.sum(), sharded)
    for got, want in zip(actual, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert_close((got.full_tensor(),), (want.double(),), 1e-6)


@CUT
def test_a_graph_of_dtensors_sharded_by_heads_is_rewritten_on_its_parts(mesh: DeviceMesh) -> None:
    arguments = [distribute_tensor(x, mesh, [Shard(2)]) for x in delta_arguments()]
    with torch.no_grad(), collecting() as report:
        out = compiled(gated_delta_loop)(*arguments)
    assert report.counts == {"gated_delta_rule": 1} and not report.rejections, report
    assert out.placements == (Shard(2),)
    torch.testing.assert_close(out.full_tensor(), gated_delta_loop(*delta_arguments()))


@CUT
def test_autocast_switched_off_where_it_is_off_keeps_the_rewrite_on_parts(mesh: DeviceMesh) -> None:
    """As models do around the angles of their rotations."""

    def fn(*arguments: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return gated_delta_loop(*arguments)

    arguments = [distribute_tensor(x, mesh, [Shard(2)]) for x in delta_arguments()]
    with torch.no_grad(), collecting() as report:
        out = compiled(fn)(*arguments)
    assert report.counts == {"gated_delta_rule": 1} and not report.rejections, report
    torch.testing.assert_close(out.full_tensor(), gated_delta_loop(*delta_arguments()))


@pytest.mark.parametrize("where", [torch.no_grad, lambda: torch.autocast("cpu", dtype=torch.bfloat16)])
def test_modes_that_are_switched_leave_dtensors_alone(mesh: DeviceMesh, where: Callable[[], Any]) -> None:
    """A call on the parts would be made under one mode, where the chain has two."""

    def fn(q: Any, k: Any, v: Any, *gates: Any) -> Any:
        with where():
            q = q * 2.0
        return gated_delta_loop(q, k, v, *gates)

    arguments = [distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in delta_arguments()]
    with collecting() as report:
        out = compiled(fn)(*arguments)
    assert not report.matches
    assert "subclass" in {rejection.code for rejection in report.rejections}
    torch.testing.assert_close(out.full_tensor(), fn(*arguments).full_tensor())


def test_partial_sums_are_left_alone(mesh: DeviceMesh) -> None:
    """The product of two partial sums is not the sum of the products, which each rank could compute."""
    arguments = [distribute_tensor(x, mesh, [Shard(2)]) for x in delta_arguments()]
    arguments[2] = DTensor.from_local(arguments[2].to_local(), mesh, [Partial()])
    with torch.no_grad(), collecting() as report:
        out = compiled(gated_delta_loop)(*arguments)
    assert not report.matches
    assert GATHERS or "subclass" in {rejection.code for rejection in report.rejections}
    torch.testing.assert_close(out.full_tensor(), gated_delta_loop(*delta_arguments()))
