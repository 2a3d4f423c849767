"""The ops on DTensors over several processes: a check of ``tests/distributed/test_context_parallel.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kdacompile.lowering.operands import dimensions
from kdacompile.ops.signature import LINEAR_ATTENTION, MLA
from tests.distributed.processes import Ranks
from tests.ops.cases import Case, make_case
from tests.ops.mla_cases import make_mla

OPS = torch.ops.kdacompile


def placed(x: Tensor | None, layout: str, axes: Mapping[str, str], mesh: DeviceMesh, cuts: tuple[str, ...]) -> Any:
    """A leaf that is sharded as ``cuts`` say, a word for each dimension of the mesh."""
    if x is None:
        return None
    places: list[Any] = []
    for cut in cuts:
        found = [i for i, name in enumerate(dimensions(layout)) if axes.get(name) == cut and x.shape[i] > 1]
        places.append(Shard(found[0]) if found else Replicate())
    return distribute_tensor(x, mesh, places).requires_grad_(x.is_floating_point())


def compare(op: Any, signature: Any, tensors: list[Any], options: dict[str, Any], mesh: DeviceMesh, cuts: Any) -> None:
    """Results and gradients of DTensors against those of whole tensors."""
    plain: list[Any] = [x.clone().requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors]
    call = signature.call(*tensors, **options)
    layouts = [x.layout if isinstance(x.layout, str) else x.layout(call) for x in signature.operands]
    sharded = [placed(x, layout, signature.axes, mesh, cuts) for x, layout in zip(tensors, layouts, strict=True)]
    expected, have = op(*plain, **options), op(*sharded, **options)
    for got, want in zip(have, expected, strict=True):
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-5)
    leaves = [i for i, x in enumerate(plain) if x is not None and x.requires_grad]
    gradients: list[Any] = []
    for inputs, results in ((sharded, have), (plain, expected)):
        total: Any = sum(x.square().sum() for x in results)
        gradients.append(torch.autograd.grad(total, [inputs[i] for i in leaves]))
    for i, got, want in zip(leaves, *gradients, strict=True):
        close = torch.allclose(got.full_tensor(), want, rtol=1e-3, atol=1e-4)
        assert close, (signature.operands[i].name, cuts)


def linear_attention(case: Case, mesh: DeviceMesh, cuts: tuple[str, ...]) -> None:
    tensors = [*case.positional, case.cu_seqlens]
    compare(OPS.linear_attention.default, LINEAR_ATTENTION, tensors, case.options, mesh, cuts)


def step(mesh: DeviceMesh) -> None:
    """In place: each rank writes its own shard of the state."""
    case = make_case(gate_fn="softplus", length=1, heads=2, groups=2)
    options = {name: x for name, x in case.options.items() if name != "chunk_size"}
    call = LINEAR_ATTENTION.call(*case.positional, **case.options)
    layouts = [x.layout if isinstance(x.layout, str) else x.layout(call) for x in LINEAR_ATTENTION.operands]
    shards = [
        placed(x, y, LINEAR_ATTENTION.axes, mesh, ("heads",)) for x, y in zip(case.positional, layouts, strict=False)
    ]
    whole = list(case.positional)
    whole[5] = whole[5].clone()
    with torch.no_grad():
        have, want = (OPS.linear_attention_step_(*x, None, **options) for x in (shards, whole))
    torch.testing.assert_close(have.full_tensor(), want)
    torch.testing.assert_close(shards[5].full_tensor(), whole[5])


def on_shards(ranks: Ranks) -> None:
    """Results, states and gradients of both ops as on whole tensors."""
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    for gate, fn in (("channel", "softplus"), ("token", "sigmoid"), ("head", "log"), ("none", "log")):
        for cut in ("heads", "batch"):
            linear_attention(make_case(gate=gate, gate_fn=fn, heads=2, groups=2), mesh, (cut,))
    packed = make_case(batch=1, length=7, sequences=2, heads=2)
    linear_attention(Case(packed.tensors, packed.options, torch.tensor([0, 3, 7])), mesh, ("heads",))
    linear_attention(make_case(length=9), mesh, ("",))
    both = init_device_mesh("cpu", (1, ranks.world), mesh_dim_names=("dp", "tp"))
    linear_attention(make_case(), both, ("batch", "heads"))
    step(mesh)
    changes: tuple[dict[str, Any], ...] = ({}, {"weights": False}, {"mask": "float"})
    for change in changes:
        case = make_mla(heads=4, causal=True, **change)
        for cut in ("heads", "batch"):
            compare(OPS.mla.default, MLA, [*case.positional, None], case.options, mesh, (cut,))
