"""What the user's code gets has its strides of eager mode, and no copy in the graph where the op can see to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from kdacompile.search import compiler_pass
from kdacompile.settings import parse


def heads_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated linear attention that computes in [B, H, T, D], as transformers' functions do."""
    q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
    state = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3])
    out = torch.zeros(*v.shape)
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp()[..., None] + k[:, :, t, :, None] * v[:, :, t, None]
        out[:, :, t] = (q[:, :, t, :, None] * state).sum(-2)
    return out.transpose(1, 2)


def test_a_result_with_other_strides_needs_no_copy() -> None:
    calls: list[str] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        assert len(compiler_pass.run(gm, parse(None, {"kda.cost_model": False})).matches) == 1
        calls.extend(str(node.target) for node in gm.graph.nodes if node.op in ("call_function", "call_method"))
        return gm.forward

    inputs = [torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3, 6), -torch.rand(2, 5, 3, 4)]
    expected = heads_first(*inputs)
    result = torch.compile(heads_first, backend=backend)(*inputs)
    assert result.stride() == expected.stride() == (90, 6, 30, 1)
    assert torch.allclose(result, expected, atol=1e-5)
    assert any("linear_attention" in call for call in calls)
    assert not {"contiguous", "clone", "copy_", "select", "unsqueeze", "permute"} & set(calls)
