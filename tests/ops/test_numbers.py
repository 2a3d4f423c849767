"""The values: both functional ops against the float64 recurrence, over the family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kdacompile.ops import linear_attention, linear_attention_step
from tests.ops.cases import GATE_FNS, GATES, assert_close, make_case, oracle

FAMILY = [("none", "log"), *((gate, fn) for gate in GATES[1:] for fn in GATE_FNS)]


@pytest.mark.parametrize("key_dim", [5, 8])  # of no kernel, of the CPU's
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "plain"])
@pytest.mark.parametrize(("gate", "gate_fn"), FAMILY)
def test_every_gate(gate: str, gate_fn: str, delta: bool, key_dim: int) -> None:
    case = make_case(gate=gate, gate_fn=gate_fn, delta=delta, length=21, key_dim=key_dim)
    assert_close(case.run(), oracle(case), 1e-5)
    double = case.to(torch.float64)
    assert_close(double.run(), oracle(double), 1e-12)
    step = make_case(gate=gate, gate_fn=gate_fn, delta=delta, length=1, key_dim=key_dim)
    assert_close(step.run_step(), oracle(step), 1e-5)
    assert_close(step.to(torch.float64).run_step(), oracle(step), 1e-12)


@pytest.mark.parametrize("length", [0, 1, 2, 16, 17, 40])
@pytest.mark.parametrize("groups", [1, 3])
def test_lengths_and_groups(length: int, groups: int) -> None:
    case = make_case(length=length, groups=groups)
    o, state = case.run()
    assert_close((o, state), oracle(case), 1e-5)
    assert o.is_contiguous() and state.is_contiguous() and state.dtype == torch.float32


@pytest.mark.parametrize("missing", ["beta", "initial_state", "A_log", "dt_bias"])
def test_optional_tensors(missing: str) -> None:
    for length in (1, 19):
        case = make_case(gate_fn="softplus", length=length).with_tensors(**{missing: None})
        assert_close(case.run(), oracle(case), 1e-5)
        if length == 1:
            assert_close(case.run_step(), oracle(case), 1e-5)


@pytest.mark.parametrize("bounds", [[0, 5, 5, 20], [0, 0, 20], [0, 20], [0, 1, 2, 20, 20]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences(bounds: list[int], dtype: torch.dtype) -> None:
    sequences = len(bounds) - 1
    for gate in ("head", "token", "channel"):
        case = make_case(gate=gate, batch=1, length=bounds[-1], sequences=sequences)
        packed = type(case)(case.tensors, case.options, torch.tensor(bounds, dtype=dtype))
        assert_close(packed.run(), oracle(packed), 1e-5)


def test_empty_batch_of_tokens_passes_the_state_through() -> None:
    case = make_case(length=0)
    given = case.tensors["initial_state"]
    o, state = case.run()
    assert o.shape == (2, 0, 4, 3)
    assert torch.equal(state, given)
    assert state.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    packed = make_case(batch=1, length=0, sequences=2)
    packed = type(packed)(packed.tensors, packed.options, torch.tensor([0, 0, 0]))
    assert torch.equal(packed.run()[1], packed.tensors["initial_state"])
    assert torch.equal(packed.with_tensors(initial_state=None).run()[1], torch.zeros(2, 4, 5, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    """The only rounding is the inputs' and that of o: o within half a unit in its last place, the state as float32."""
    case = make_case(length=33).to(dtype)
    o, state = case.run()
    assert o.dtype == dtype and state.dtype == torch.float32
    assert_close((state,), oracle(case)[1:], 1e-5)
    assert_close((o,), oracle(case)[:1], torch.finfo(dtype).eps)
    assert_close(case.with_options(out_dtype=torch.float32).run(), oracle(case), 1e-5)


def test_mixed_dtypes() -> None:
    case = make_case(length=9).to(torch.bfloat16)
    mixed = case.with_tensors(v=case.tensors["v"].half(), g=case.tensors["g"].float())
    o, state = mixed.run()
    assert (o.dtype, state.dtype) == (torch.float16, torch.float32)
    double = case.with_tensors(k=case.tensors["k"].double())
    o, state = double.run()
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float64)
    assert_close((state,), oracle(double)[1:], 1e-12)


def test_extreme_gates() -> None:
    case = make_case(length=40)
    g = case.tensors["g"]
    for value in (-1000.0, -float("inf")):
        strong = case.with_tensors(g=torch.where(torch.arange(40).remainder(7).eq(3).view(1, 40, 1, 1), value, g))
        assert_close(strong.run(), oracle(strong), 1e-5)
    zeros = make_case(length=40, gate_fn="factor")
    zeros = zeros.with_tensors(g=torch.where(g < -1.0, 0.0, zeros.tensors["g"]))
    assert_close(zeros.run(), oracle(zeros), 1e-5)
    step = make_case(length=1, gate_fn="factor")
    step = step.with_tensors(g=torch.zeros_like(step.tensors["g"]))
    assert_close(step.run_step(), oracle(step), 1e-5)


def test_zero_keys_survive_the_norm() -> None:
    case = make_case(length=18)
    case = case.with_tensors(k=torch.zeros_like(case.tensors["k"]))
    assert_close(case.run(), oracle(case), 1e-5)


def test_permuted_inputs() -> None:
    """Models hold [B, H, T, D]; the op takes the transposed view and returns contiguous tensors."""
    case = make_case(length=20)
    permuted = case.with_tensors(
        **{n: case.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "g")}
    )
    for actual, expected in zip(permuted.run(), case.run(), strict=True):
        assert_close((actual,), (expected.double(),), 1e-6)
        assert actual.is_contiguous()


def test_functional_api_defaults_and_layouts() -> None:
    case = make_case(length=12)
    q, k, v, g, beta, state, _, _ = case.positional
    beta = torch.sigmoid(beta)
    plain = case.with_tensors(beta=beta).with_options(scale=q.shape[-1] ** -0.5, sigmoid_beta=False, qk_l2norm_eps=0.0)
    o, final = linear_attention(q, k, v, g, beta, initial_state=state, output_final_state=True)
    assert final is not None
    assert_close((o, final), oracle(plain), 1e-5)
    assert linear_attention(q, k, v, g, beta)[1] is None
    normed = plain.with_options(qk_l2norm_eps=1e-6)
    options: dict[str, Any] = {"initial_state": state.mT.contiguous(), "state_layout": "VK", "qk_l2norm": True}
    o, final_vk = linear_attention(q, k, v, g, beta, **options, output_final_state=True)
    assert final_vk is not None
    assert_close((o, final_vk.mT), oracle(normed), 1e-5)
    o, _ = linear_attention(q, k, v, g, beta, initial_state=state, qk_l2norm=0.5, chunk_size=32)
    assert_close((o,), oracle(plain.with_options(qk_l2norm_eps=0.5))[:1], 1e-5)


def test_functional_step_without_token_dimension() -> None:
    for gate in GATES:
        case = make_case(gate=gate, length=1).with_options(sigmoid_beta=False, qk_l2norm_eps=0.0)
        q, k, v, g, beta, state, _, _ = case.positional
        flat_g = g[:, 0] if gate in ("token", "channel") else g
        o, final = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], flat_g, beta[:, 0], state=state, scale=0.7)
        assert_close((o[:, None], final), oracle(case), 1e-5)
        o, final = linear_attention_step(q, k, v, g, beta, state=state.mT, scale=0.7, state_layout="VK")
        assert_close((o, final.mT), oracle(case), 1e-5)


def test_outputs_own_no_more_memory_than_they_need() -> None:
    """A view of a per-chunk buffer would keep the whole buffer alive, and CUDA graphs replay into it."""
    for tensor in (*make_case(length=40, batch=1).run(), *make_case(length=1, batch=1).run_step()):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_empty_batch() -> None:
    case = make_case(batch=0, length=19)
    o, state = case.run()
    assert (o.shape, state.shape) == ((0, 19, 4, 3), (0, 4, 5, 3))
    assert make_case(batch=0, length=1).run_step()[0].shape == (0, 1, 4, 3)


def test_outputs_do_not_depend_on_later_tokens() -> None:
    case = make_case(length=40)
    later = make_case(length=40, seed=1)
    tensors = {
        name: torch.cat([case.tensors[name][:, :21], 1e3 * later.tensors[name][:, 21:]], dim=1)
        for name in ("q", "k", "v", "g", "beta")
    }
    assert torch.equal(case.run()[0][:, :21], case.with_tensors(**tensors).run()[0][:, :21])
