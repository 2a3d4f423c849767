"""What runs on an NPU, tried on a CPU: which kernels a call gets, and the operators' arguments against their schemas.

The operators themselves are stood in for by what their documentation says, registered under their schemas; that the
schemas are those of torch_npu is checked where its wheel is (tests/ascend).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.ascend.npu import EmittedKernels, choose
from kdacompile.lowering.ascend.operators import CHUNKED, RECURRENT, GatedDeltaRuleOperators
from kdacompile.lowering.ascend.prepare import prepare
from kdacompile.lowering.calls import Call
from kdacompile.ops.fused import FusedKernels
from kdacompile.patterns.recurrence.definition import token_recurrence
from tests.lowering.verify import relative_error
from tests.ops.cases import GATE_FNS, TENSORS, Case, make_case, oracle

NAMESPACE = "kdacompile_test_npu"


def bf16_case(**options: Any) -> Case:
    sizes: dict[str, Any] = {"gate": "token", "heads": 1, "groups": 2, "key_dim": 128, "value_dim": 128, "length": 20}
    return make_case(**{**sizes, **options}).to(torch.bfloat16).with_options(sigmoid_beta=False)


def call_of(case: Case) -> Call:
    options = {name: value for name, value in case.options.items() if name != "out_dtype"}
    tensors = {name: case.tensors[name] for name in TENSORS}
    return Call(**tensors, cu_seqlens=case.cu_seqlens, out_dtype=case.tensors["v"].dtype, **options)


@pytest.fixture(scope="module")
def operators() -> Iterator[GatedDeltaRuleOperators]:
    library = torch.library.Library(NAMESPACE, "DEF")
    library.define(CHUNKED)
    library.define(RECURRENT)
    library.impl("npu_chunk_gated_delta_rule", chunked, "CPU")
    library.impl("npu_recurrent_gated_delta_rule", recurrent, "CPU")
    yield GatedDeltaRuleOperators(getattr(torch.ops, NAMESPACE))
    library._destroy()


def chunked(
    query: Tensor, key: Tensor, value: Tensor, *, beta: Tensor, initial_state: Tensor, actual_seq_lengths: Tensor,
    scale: float, g: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As documented: all but g in bf16, tokens of all sequences in one dimension, states [sequences, HV, V, K]."""
    assert actual_seq_lengths.dtype is torch.int32 and g.dtype is torch.float32
    assert all(x.dtype is torch.bfloat16 for x in (query, key, value, beta, initial_state))
    outputs, states, start = [], [], 0
    for i, length in enumerate(actual_seq_lengths.tolist()):
        q, k, v, b, d = (x[None, start : start + length] for x in (query, key, value, beta, g.exp().unsqueeze(-1)))
        o, state = token_recurrence(q, k, v, d, b, initial_state[i : i + 1].mT, delta=True, scale=scale)
        outputs.append(o[0])
        states.append(state.mT)
        start += length
    return torch.cat(outputs).bfloat16(), torch.cat(states).bfloat16()


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, *, beta: Tensor, scale: float,
    actual_seq_lengths: Tensor, ssm_state_indices: Tensor, num_accepted_tokens: None = None, g: Tensor,
    gk: None = None,
) -> Tensor:  # fmt: skip
    assert state.is_contiguous() and ssm_state_indices.dtype is torch.int32
    assert gk is None  # documented as not supported
    old = state[ssm_state_indices.long()].clone()
    o, new = chunked(
        query, key, value, beta=beta, initial_state=old, actual_seq_lengths=actual_seq_lengths, scale=scale, g=g
    )
    state[ssm_state_indices.long()] = new
    return o


def test_sequences_through_the_operator(operators: GatedDeltaRuleOperators) -> None:
    kernels = FusedKernels(lambda call: None if operators.declines(call) else operators)
    case = bf16_case()
    o, state = kernels.sequence(*case.positional, None, **case.options)
    expected = oracle(case)
    assert o.dtype is torch.bfloat16 and state.dtype is torch.float32 and state.is_contiguous()
    assert relative_error(o, expected[0]) < 8e-3 and relative_error(state, expected[1]) < 8e-3


def test_steps_through_the_operator(operators: GatedDeltaRuleOperators) -> None:
    """In place, on a state that lies in memory as [B, HV, V, K]."""
    kernels = FusedKernels(lambda call: None if operators.declines(call) else operators)
    case = bf16_case(length=1)
    expected = oracle(case)
    state = case.tensors["initial_state"].mT.contiguous().mT
    case = case.with_tensors(initial_state=state)
    assert operators.declines(call_of(case)) is None
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    new_o, new_state = kernels.step(*case.positional, **options)
    o = kernels.inplace_step(*case.positional, **options)
    assert torch.equal(o, new_o) and torch.equal(state.float(), new_state)
    assert relative_error(o, expected[0]) < 8e-3 and relative_error(state, expected[1]) < 8e-3


def test_the_operators_take_only_what_loses_nothing(operators: GatedDeltaRuleOperators) -> None:
    case = bf16_case()
    assert operators.declines(call_of(case)) is None
    state, beta = (case.tensors[name] for name in ("initial_state", "beta"))
    others = {
        "gate": bf16_case(gate="channel"),
        "state": case.with_tensors(initial_state=state.float()),
        "no state": case.with_tensors(initial_state=None),
        "beta": case.with_tensors(beta=beta.float()),
        "sigmoid": case.with_options(sigmoid_beta=True),
        "delta": case.with_options(delta=False),
        "width": bf16_case(key_dim=64),
        "layout": bf16_case(length=1),
    }
    assert all(operators.declines(call_of(other)) for other in others.values())
    assert GatedDeltaRuleOperators(object()).declines(call_of(case)) == "this torch_npu does not have the operators"
    namespace = getattr(torch.ops, NAMESPACE)
    for device, reason in (("Ascend910B3", None), ("Ascend910_9599", "documented for the A2 and A3 alone")):
        assert GatedDeltaRuleOperators(namespace, device).declines(call_of(case)) == reason


def test_emitted_kernels_take_the_rest() -> None:
    kernels = EmittedKernels(lambda launch: None, 20)
    assert kernels.declines(call_of(make_case(key_dim=64, value_dim=64))) is None
    assert kernels.declines(call_of(make_case())) is None  # K = 5, filled up
    assert "K = 300" in str(kernels.declines(call_of(make_case(key_dim=300))))
    assert "float64" in str(kernels.declines(call_of(make_case(key_dim=64, value_dim=64).to(torch.float64))))
    assert EmittedKernels().declines(call_of(bf16_case())) == "triton-ascend is not installed"
    assert choose(call_of(bf16_case())) is None  # not a call on an NPU


@pytest.mark.parametrize("gate_fn", GATE_FNS)
def test_prepared_calls_mean_the_same(gate_fn: str) -> None:
    """Through the device-independent op, before and after."""
    case = make_case(gate_fn=gate_fn)
    call = prepare(call_of(case))
    assert (call.gate_fn, call.sigmoid_beta, call.qk_l2norm_eps) == ("log", False, 0.0)
    names = {name: getattr(call, name) for name in TENSORS}
    options = {name: getattr(call, name) for name in case.options if name != "out_dtype"}
    prepared = replace(case, tensors=names, options={**options, "out_dtype": None})
    for found, expected in zip(prepared.run(), case.run(), strict=True):
        torch.testing.assert_close(found, expected)
