"""Operators and values are kept in sets, which have the order of addresses: no verdict may depend on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdacompile import explain
from kdacompile.graph.ir import Op, Value
from tests.soundness.programs import Program, tokens


def read_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The state is read before it is written: outputs and state depend on as many products."""
    o = torch.zeros_like(v)
    for t in range(q.shape[1]):
        o[:, t] = (q[:, t].unsqueeze(-2) @ s).squeeze(-2)
        s = s * g[:, t].exp().unsqueeze(-1)
        e = (v[:, t] - (k[:, t].unsqueeze(-2) @ s).squeeze(-2)) * beta[:, t].unsqueeze(-1)
        s = s + k[:, t].unsqueeze(-1) @ e.unsqueeze(-2)
    return o, s


def stages(program: Program, inputs: tuple[Tensor, ...], factor: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was put to the proof, the operators having other places in sets for every odd ``factor``."""
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(Value, "__hash__", lambda value: value.index * factor % (1 << 31))
        patched.setattr(Op, "__hash__", lambda op: op.out.index * factor % (1 << 31))
        torch._dynamo.reset()
        report = explain(program, stages=True, options={"kda.lift": False})(*inputs)
    return [stage.text.partition("\n")[2] for stage in report.stages if stage.name == "match"]


def test_verdicts_do_not_depend_on_the_order_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tuple(tokens(2, B=2, H=1, K=4, V=6, channel=True).values())
    one, *others = (stages(read_before, inputs, factor, monkeypatch) for factor in (1, -1, 0x5BD1E995))
    assert one and all(other == one for other in others)
