"""The in-place step: which memory it writes, and to what precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdacompile.ops import errors, linear_attention_step
from tests.ops.cases import Case, assert_close, make_case, oracle


def _step(case: Case, state: Tensor) -> Tensor:
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    q, k, v, g, beta, _, A_log, dt_bias = case.positional
    return torch.ops.kdacompile.linear_attention_step_(q, k, v, g, beta, state, A_log, dt_bias, None, **options)


@pytest.mark.parametrize("key_dim", [5, 8])  # of no kernel, of the CPU's
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_state_is_overwritten_in_its_dtype(dtype: torch.dtype, key_dim: int) -> None:
    case = make_case(length=1, key_dim=key_dim)
    case = case.with_tensors(initial_state=case.tensors["initial_state"].to(dtype))
    expected = oracle(case)
    state = case.tensors["initial_state"].clone()
    o = _step(case, state)
    assert state.dtype == dtype
    assert_close((o,), expected[:1], 1e-5)  # o is computed from the unrounded state
    assert_close((state,), expected[1:], max(1e-5, torch.finfo(dtype).eps))


def test_a_slot_of_a_cache_is_written_and_nothing_else() -> None:
    """A cache holds [layers, B, V, K, HV] or the like: the op writes through any view without overlap."""
    case = make_case(length=1)
    cache = torch.full((3, 2, 3, 5, 4), 7.0, dtype=torch.bfloat16)
    slot = cache[1].permute(0, 3, 2, 1)
    slot.copy_(case.tensors["initial_state"])
    case = case.with_tensors(initial_state=slot.clone())
    o = _step(case, slot)
    assert_close((o,), oracle(case)[:1], 1e-5)
    assert_close((cache[1].permute(0, 3, 2, 1),), oracle(case)[1:], 2.0**-8)
    assert bool((cache[0] == 7.0).all()) and bool((cache[2] == 7.0).all())


@pytest.mark.parametrize("size", [3, 8])  # of no kernel, of the CPU's
@pytest.mark.parametrize("role", ["q", "k", "v", "g"])
def test_inputs_that_share_memory_with_the_state_are_read_first(role: str, size: int) -> None:
    case = make_case(length=1, groups=1, heads=1, key_dim=size, value_dim=size, batch=1, gate_fn="factor")
    memory = torch.rand_like(case.tensors["initial_state"])
    aliased = case.with_tensors(**{role: memory[:, :, 0].unsqueeze(1)})
    expected = oracle(aliased.with_tensors(initial_state=memory.clone(), **{role: aliased.tensors[role].clone()}))
    assert_close((_step(aliased, memory), memory), expected, 1e-5)


def test_overlapping_state_is_refused() -> None:
    case = make_case(length=1)
    state = case.tensors["initial_state"][:, :1].expand(-1, 4, -1, -1)
    with pytest.raises(errors.StateError):
        _step(case, state)


@pytest.mark.parametrize("layout", ["KV", "VK"])
def test_functional_api(layout: str) -> None:
    case = make_case(length=1).with_options(sigmoid_beta=False, qk_l2norm_eps=0.0)
    q, k, v, g, beta, given, _, _ = case.positional
    state = given.mT.contiguous() if layout == "VK" else given.clone()
    o, returned = linear_attention_step(q, k, v, g, beta, state=state, inplace=True, scale=0.7, state_layout=layout)
    assert returned is state
    assert_close((o, state.mT if layout == "VK" else state), oracle(case), 1e-5)


def test_many_steps_equal_the_sequence() -> None:
    case = make_case(length=12)
    o, final = case.run()
    state = case.tensors["initial_state"].clone()
    for t in range(12):
        token = case.with_tensors(**{n: case.tensors[n][:, t : t + 1] for n in ("q", "k", "v", "g", "beta")})
        assert_close((_step(token, state),), (o[:, t : t + 1].double(),), 1e-5)
    assert_close((state,), (final.double(),), 1e-5)
