"""Distributed tensors: the typed decline, and the way around it that its message names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.ops import errors, linear_attention
from kdacompile.report.collect import collecting
from tests.backend.layers import compiled, delta_arguments, gated_delta_loop
from tests.ops.cases import assert_close, make_case

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_declined(mesh: DeviceMesh, grad: bool) -> None:
    q = distribute_tensor(make_case().tensors["q"], mesh, [Shard(2)]).requires_grad_(grad)
    with pytest.raises(errors.DistributedTensorError, match="local_map"):
        linear_attention(q, q, q)


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


def test_a_graph_of_dtensors_is_left_alone(mesh: DeviceMesh) -> None:
    arguments = [distribute_tensor(x, mesh, [Shard(2)]) for x in delta_arguments()]
    with torch.no_grad(), collecting() as report:
        out = compiled(gated_delta_loop)(*arguments)
    assert not report.matches
    assert {rejection.code for rejection in report.rejections} == {"subclass"}
    torch.testing.assert_close(out.full_tensor(), gated_delta_loop(*delta_arguments()))
