"""The table of gate functions: formulas, derivatives, bounds, and that every part of the house knows every entry.

Their Triton form is run by ``interpreted.py``, their kernels by the tests that go over ``GATE_FNS``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kdacompile.ops
from kdacompile.lowering.gates import GATE_FUNCTIONS, GateFunction, log_decay, slopes
from kdacompile.lowering.hopper import gates as hopper_gates
from kdacompile.lowering.triton import gates as triton_gates
from tests.ops.cases import decay_factor, make_case

ROWS = [(name, gate) for name in GATE_FUNCTIONS for gate in ("token", "channel")]


def arguments(name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """x over the range that matters, a rate and a scale with the sign that the function wants."""
    x = torch.linspace(-30.0, 30.0, 121, dtype=torch.float64)
    gate_scale = -4.0 if GATE_FUNCTIONS[name].scale == "lower bound" else 0.4
    return x.sigmoid() if name == "factor" else x, torch.tensor(0.3, dtype=torch.float64), gate_scale


@pytest.mark.parametrize("name", GATE_FUNCTIONS)
def test_derivatives(name: str) -> None:
    x, A_log, gate_scale = arguments(name)
    A_log = A_log.expand_as(x).clone().requires_grad_()
    leaf = x.clone().requires_grad_()
    d = log_decay(leaf, A_log.exp(), name, gate_scale)
    by_x, by_rate = torch.autograd.grad(d.sum(), (leaf, A_log), allow_unused=True, materialize_grads=True)
    have = slopes(x, A_log.detach().exp(), name, gate_scale)
    torch.testing.assert_close(have[0], by_x)
    torch.testing.assert_close(have[1], by_rate)


@pytest.mark.parametrize("name", GATE_FUNCTIONS)
def test_bounds(name: str) -> None:
    x, A_log, gate_scale = arguments(name)
    d = log_decay(-x.abs() if name == "log" else x, A_log.exp(), name, gate_scale)
    low = GATE_FUNCTIONS[name].lower_bound(gate_scale)
    assert d.max() <= 0.0 and d.min() >= low
    assert math.isinf(low) or d.min() < 0.999 * low  # as tight as it can be


@pytest.mark.parametrize(("name", "gate"), ROWS)
def test_the_op_computes_it(name: str, gate: str) -> None:
    """One token: the state is decayed by what an independent formula says."""
    case = make_case(gate=gate, gate_fn=name, delta=False, length=1, groups=1)
    case = case.with_tensors(k=torch.zeros_like(case.tensors["k"]))
    _, state = case.run_step()
    decay: Any = decay_factor(case)
    want = case.tensors["initial_state"].double() * decay[:, 0].unsqueeze(-1)
    torch.testing.assert_close(state.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GATE_FUNCTIONS)
def test_in_powers_of_two(name: str) -> None:
    """What Hopper's kernels are given, its functions spelled in torch."""
    x, A_log, gate_scale = arguments(name)
    ln2 = math.log(2.0)
    functions = {
        "LOG2E": 1.0 / ln2,
        "log2": torch.log2,
        "sigmoid2": lambda y: torch.sigmoid(y * ln2),
        "softplus2": lambda y: torch.nn.functional.softplus(y) / ln2,
        "logsigmoid2": lambda y: torch.nn.functional.logsigmoid(y) / ln2,
    }
    given = {"x": x, "rate": A_log.exp(), "gate_scale": gate_scale}
    have = eval(GATE_FUNCTIONS[name].log2, functions | given)
    torch.testing.assert_close(have * ln2, log_decay(x, A_log.exp(), name, gate_scale))


def test_people_are_told_of_every_function() -> None:
    documented = str(kdacompile.ops.linear_attention.__doc__)
    assert [name for name in GATE_FUNCTIONS if f'"{name}"' not in documented] == []


def test_an_entry_is_all_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recognition, the op, its gradients and the emitted kernels know a function that only the table has."""
    falls = "sigmoid(x) / sigmoid(-x)"  # exp(x), in the functions that formulas are written in
    entry = GateFunction(
        "exponential", f"-rate * {falls}", "0.0", f"-rate * {falls}", f"-rate * {falls}", parametric=True
    )
    monkeypatch.setitem(GATE_FUNCTIONS, entry.name, entry)

    def model(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor, A_log: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        decay = (-(A_log[:, None] + (x + bias)).exp()).exp()
        state, rows = q.new_zeros(2, 3, 8, 4), []
        for t in range(q.shape[1]):
            state = state * decay[:, t, :, :, None] + k[:, t, :, :, None] * v[:, t, :, None]
            rows.append((q[:, t, :, None] @ state).squeeze(-2))
        return torch.stack(rows, 1)

    draw = torch.Generator().manual_seed(0)
    q, k, x = (torch.randn(2, 6, 3, 8, generator=draw) for _ in range(3))
    v, bias = torch.randn(2, 6, 3, 4, generator=draw), torch.randn(3, 8, generator=draw)
    given = [q, k, v, x - 2.0, torch.zeros(3), bias]
    leaves, others = ([tensor.clone().requires_grad_() for tensor in given] for _ in range(2))
    report = kdacompile.explain(model)(*leaves)
    assert {"gate_exponential", "dt_bias"} <= set(report.matches[0].absorbed)
    want = model(*others)
    torch.testing.assert_close(report.result, want)
    torch.testing.assert_close(
        torch.autograd.grad(report.result.sum(), leaves), torch.autograd.grad(want.sum(), others)
    )
    assert all('FN == "exponential"' in module.source() for module in (triton_gates, hopper_gates))
