"""A call of the recurrence on a CPU is one function in C: it reads tensors as a model has them, torch runs no operator
around it, and its numbers are the definition's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.cpu import runs_recurrence
from kdacompile.ops import definitions
from tests.ops.cases import GATE_FNS, GATES, Case, assert_close, make_case, oracle, relative_error

WIDTH = 8
FLOATS = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
pytestmark = pytest.mark.skipif(not runs_recurrence(torch.zeros(1, 1, 1, WIDTH)), reason="no C compiler")
SEQUENCE, STEP_ = definitions.linear_attention, definitions.linear_attention_step_


def step_options(case: Case) -> dict[str, Any]:
    return {name: value for name, value in case.options.items() if name != "chunk_size"}


def operators(call: Any) -> list[str]:
    """What torch's profiler sees inside a call of an op, views apart."""
    with torch.profiler.profile(acc_events=True) as profile:
        call()
    return [event.key for event in profile.key_averages() if event.key.startswith("aten::")]


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("gate_fn", GATE_FNS)
def test_no_operator_of_torch_runs(gate_fn: str, gate: str, length: int) -> None:
    case = make_case(gate=gate, gate_fn=gate_fn, length=length, key_dim=WIDTH)
    half = case.to(torch.bfloat16).with_tensors(A_log=case.tensors["A_log"])
    strided = case.with_tensors(q=case.tensors["q"].transpose(-1, -2).contiguous().transpose(-1, -2))
    for one in (case, half, strided):
        assert_close(one.run(), oracle(one), 2e-6 if one.tensors["q"].dtype is torch.float32 else 2.0**-8)
        assert set(operators(one.run)) <= {"aten::empty"}, one.options


def test_a_step_in_place_runs_none_either() -> None:
    """Once it has run: before the first one of a kind, the state is kept."""
    case = make_case(gate_fn="softplus", length=1, key_dim=WIDTH)
    q, k, v, g, beta, state, A_log, dt_bias = case.positional

    def step() -> object:
        return STEP_(q, k, v, g, beta, state, A_log, dt_bias, None, **step_options(case))

    step()
    assert set(operators(step)) <= {"aten::empty"}


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("gate_fn", GATE_FNS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_and_gate(dtype: torch.dtype, gate_fn: str, gate: str, length: int) -> None:
    """Value heads and widths that fill no register, and several."""
    for heads, groups, width, value in ((1, 3, 4, 5), (2, 2, 36, 70)):
        case = make_case(
            gate=gate, gate_fn=gate_fn, length=length, heads=heads, groups=groups, key_dim=width, value_dim=value
        ).to(dtype)
        assert_close(case.run(), oracle(case), FLOATS[dtype])


@pytest.mark.parametrize("gate", ["token", "channel"])
@pytest.mark.parametrize(
    ("gate_fn", "values"),
    [
        ("log", (0.0, -1e-7, -30.0, -90.0, -1e4, -torch.inf)),
        ("factor", (0.0, 1.0, 1e-30, 0.5)),
        ("softplus", (-100.0, -20.0, -1.0, 0.0, 19.0, 21.0, 90.0, 1e4, torch.inf, -torch.inf)),
        ("sigmoid", (-1e4, -90.0, -3.0, 0.0, 3.0, 90.0, 1e4)),
        ("logsigmoid", (-1e4, -90.0, -3.0, 0.0, 3.0, 90.0, 1e4)),
    ],
)
def test_gates_of_any_strength(gate_fn: str, values: tuple[float, ...], gate: str) -> None:
    """The state alone, so that what is decayed to little is seen as well: relative to each element."""
    for value in values:
        case = make_case(gate=gate, gate_fn=gate_fn, length=1, key_dim=WIDTH)
        x = torch.full_like(case.tensors["g"], value)
        case = case.with_tensors(g=x, k=torch.zeros_like(case.tensors["k"]), beta=None)
        (_, have), (_, want) = case.run(), oracle(case)
        torch.testing.assert_close(have.double(), want, rtol=2e-5, atol=1e-37)


def test_weak_gates_are_not_rounded_away() -> None:
    """log(1 + e^x) of a far negative x, times a large rate."""
    case = make_case(gate_fn="softplus", length=1, key_dim=WIDTH, delta=False)
    shape = case.tensors["g"].shape
    case = case.with_tensors(
        g=torch.full(shape, -18.0),
        dt_bias=None,
        A_log=torch.full((shape[2],), 15.0),
        k=torch.zeros_like(case.tensors["k"]),
    )
    assert relative_error(case.run()[1], oracle(case)[1]) < 2e-6


def test_any_strides() -> None:
    """Turned, every second element, shared by all tokens or heads."""
    case = make_case(gate_fn="softplus", length=5, heads=2, key_dim=WIDTH, value_dim=20)

    def turned(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x

    def spread(x: Tensor) -> Tensor:
        memory = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
        memory[..., 1::2] = x
        return memory[..., 1::2]

    for change in (turned, spread):
        changed = case.with_tensors(**{name: change(x) for name, x in case.tensors.items() if x is not None})
        assert_close(changed.run(), oracle(case), 2e-6)
    shared = case.with_tensors(
        **{n: case.tensors[n][:, :1].expand_as(case.tensors[n]) for n in ("q", "v", "g", "beta")}
    )
    assert_close(shared.run(), oracle(shared), 2e-6)


@pytest.mark.parametrize("order", ["BHTV", "BTVH", "VHTB"])
def test_o_is_written_in_the_layout_asked_for(order: str) -> None:
    case = make_case(length=4, key_dim=WIDTH, value_dim=20)
    expected = oracle(case)
    for _ in range(3):
        o, state = SEQUENCE(*case.positional, None, **case.options, o_layout=order)
        assert o.permute(["BTHV".index(letter) for letter in order]).is_contiguous()
        assert_close((o, state), expected, 2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("width", "value"), [(WIDTH, 20), (32, 70), (48, 128)])
def test_states_in_place_of_any_dtype_and_layout(dtype: torch.dtype, width: int, value: int) -> None:
    """Turned (Mamba-2's has V before K), and a part of a larger cache."""
    for place in (lambda x: x.mT.contiguous().mT, lambda x: torch.cat([x, x], 1)[:, x.shape[1] :], torch.clone):
        for seed in range(3):
            case = make_case(length=1, key_dim=width, value_dim=value, seed=seed)
            state = place(case.tensors["initial_state"].to(dtype))
            wanted = oracle(case.with_tensors(initial_state=state.clone()))
            q, k, v, g, beta, _, A_log, dt_bias = case.positional
            o = STEP_(q, k, v, g, beta, state, A_log, dt_bias, None, **step_options(case))
            assert_close((o,), wanted[:1], 2e-6)
            assert_close((state,), wanted[1:], max(2e-6, FLOATS[dtype]))


def test_half_precision_is_rounded_as_torch_rounds_it() -> None:
    """Every number of 16 bits in, and halves between two of them out."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = every.view(dtype)
        x = x[x.isfinite()].reshape(1, 1, 1, -1)
        one = torch.ones(1, 1, 1, 4)
        for factor in (1.0, 1.0 / 3, 1e-5):
            o, _ = SEQUENCE(
                one * torch.tensor([1.0, 0, 0, 0]), one * torch.tensor([1.0, 0, 0, 0]), x, None, None, None, None, None,
                None, scale=factor, delta=False, gate="none", gate_fn="log", gate_scale=1.0, sigmoid_beta=False,
                qk_l2norm_eps=0.0, chunk_size=0, out_dtype=dtype,
            )  # fmt: skip
            torch.testing.assert_close(o, (x.float() * factor).to(dtype), rtol=0, atol=0)
