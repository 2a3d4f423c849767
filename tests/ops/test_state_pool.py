"""The step on states that lie in a pool: ``state_indices`` names the slot of each request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from kdacompile.lowering.cpu import runs_recurrence
from kdacompile.ops import linear_attention_step
from tests.ops.cases import GATES, Case, assert_close, make_case, oracle

OP = torch.ops.kdacompile.linear_attention_step_.default
SLOTS = (4, -1, 0, 2)


def case_of(**sizes: Any) -> Case:
    return make_case(length=1, batch=len(SLOTS), heads=2, **sizes)


def pool_of(case: Case, dtype: torch.dtype = torch.float32, slots: tuple[int, ...] = SLOTS) -> Tensor:
    """Six slots, with the states of the case in theirs and 7 in all others."""
    pool = torch.full((6, *case.tensors["initial_state"].shape[1:]), 7.0, dtype=dtype)
    for request, slot in enumerate(slots):
        if slot >= 0:
            pool[slot] = case.tensors["initial_state"][request]
    return pool


def call(case: Case, pool: Tensor, indices: Tensor) -> Tensor:
    q, k, v, g, beta, _, A_log, dt_bias = case.positional
    options = {name: x for name, x in case.options.items() if name != "chunk_size"}
    return OP(q, k, v, g, beta, pool, A_log, dt_bias, indices, **options)


def expected(case: Case, pool: Tensor, slots: tuple[int, ...] = SLOTS) -> tuple[Tensor, Tensor]:
    o, states = oracle(case)
    after = pool.to(torch.float64, copy=True)
    for request, slot in enumerate(slots):
        if slot >= 0:
            after[slot] = states[request]
        else:
            o[request] = 0
    return o, after


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("key_dim", [5, 8])  # of no kernel, of the CPU's
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_slots_are_overwritten_and_nothing_else(dtype: torch.dtype, key_dim: int, index: torch.dtype) -> None:
    case = case_of(gate_fn="softplus", key_dim=key_dim)
    assert key_dim == 5 or runs_recurrence(case.tensors["q"])
    pool = pool_of(case, dtype)
    case = case.with_tensors(initial_state=case.tensors["initial_state"].to(dtype))
    o, after = expected(case, pool)
    assert_close((call(case, pool, torch.tensor(SLOTS, dtype=index)),), (o,), 1e-5)
    assert_close((pool,), (after,), max(1e-5, torch.finfo(dtype).eps))
    assert bool((pool[[1, 3, 5]] == 7.0).all())


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("delta", [True, False])
def test_every_row(gate: str, delta: bool) -> None:
    case = case_of(gate=gate, delta=delta, key_dim=8)
    pool = pool_of(case)
    want = expected(case, pool)
    assert_close((call(case, pool, torch.tensor(SLOTS)), pool), want, 1e-5)


@pytest.mark.parametrize("slots", [(-1, -1, -1, -1), (-1, -7, 3, 0), (5, 4, 1, 0)])
@pytest.mark.parametrize("key_dim", [5, 8])
def test_padding(slots: tuple[int, ...], key_dim: int) -> None:
    """Padding may hold NaN, and the slots it does not name are not touched: not the first one either."""
    case = case_of(key_dim=key_dim)
    pool = pool_of(case, slots=slots)
    want = expected(case, pool, slots)
    v = case.tensors["v"].clone()
    v[torch.tensor(slots) < 0] = float("nan")
    assert_close((call(case.with_tensors(v=v), pool, torch.tensor(slots)), pool), want, 1e-5)


@pytest.mark.parametrize("key_dim", [5, 8])
def test_a_pool_of_any_strides(key_dim: int) -> None:
    """A layer's slots in a cache [P, layers, HV, V, K]."""
    case = case_of(key_dim=key_dim)
    cache = torch.full((6, 3, 4, 3, key_dim), 7.0)
    pool = cache[:, 1].mT
    pool.copy_(pool_of(case))
    o, after = expected(case, pool)
    assert_close((call(case, pool, torch.tensor(SLOTS)), pool), (o, after), 1e-5)
    assert bool((cache[:, 0] == 7.0).all()) and bool((cache[:, 2] == 7.0).all())


def test_the_functional_api() -> None:
    case = case_of().with_options(sigmoid_beta=False, qk_l2norm_eps=0.0)
    q, k, v, g, beta, _, _, _ = case.positional
    pool = pool_of(case)
    want = expected(case, pool)
    stored, indices = pool.mT.contiguous(), torch.tensor(SLOTS, dtype=torch.int32)
    tokens = [x.squeeze(1) for x in (q, k, v, g, beta)]
    o, returned = linear_attention_step(
        *tokens, state=stored, inplace=True, state_indices=indices, scale=0.7, state_layout="VK"
    )
    assert returned is stored
    assert_close((o.unsqueeze(1), stored.mT), want, 1e-5)


@pytest.mark.parametrize("slots", [SLOTS, (-1, -1, -1, -1)])
def test_gradients(slots: tuple[int, ...]) -> None:
    """Of operands and of the pool before: what is overwritten has none of what comes after."""
    case = case_of(gate_fn="softplus").to(torch.float64)
    start = pool_of(case, torch.float64, slots)
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    random = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(shape, generator=random, dtype=torch.float64) for shape in (case.tensors["v"].shape, start.shape)
    ]

    def gradients(ours: bool) -> list[Tensor]:
        leaves = [case.tensors[name].clone().requires_grad_() for name in names]
        before = start.clone().requires_grad_()
        given = case.with_tensors(**dict(zip(names, leaves, strict=True)))
        pool = before * 1.0
        if ours:
            o = call(given, pool, torch.tensor(slots))
        else:
            live = [i for i, slot in enumerate(slots) if slot >= 0]
            places = [slots[i] for i in live]
            own = given.with_tensors(initial_state=pool[[max(slot, 0) for slot in slots]])
            all_o, states = oracle(own)
            o = torch.zeros_like(all_o).index_copy(0, torch.tensor(live, dtype=torch.long), all_o[live])
            pool = pool.index_copy(0, torch.tensor(places, dtype=torch.long), states[live])
        loss = (o * weights[0]).sum() + (pool * weights[1]).sum()
        return list(torch.autograd.grad(loss, [*leaves, before]))

    for found, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(grad: bool) -> None:
    case = case_of(gate_fn="softplus")
    q, k, v, g, beta, _, A_log, dt_bias = (
        x.clone().requires_grad_(grad) if x is not None else None for x in case.positional
    )
    options = {name: x for name, x in case.options.items() if name != "chunk_size"}
    opcheck(OP, (q, k, v, g, beta, pool_of(case), A_log, dt_bias, torch.tensor(SLOTS)), options)


def test_compiled() -> None:
    """The step of a serving engine: batches of other sizes and padding, one graph."""
    cases = [case_of(key_dim=8, seed=seed) for seed in range(2)]
    options = {name: x for name, x in cases[0].options.items() if name != "chunk_size"}

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, indices: Tensor) -> Tensor:
        return torch.ops.kdacompile.linear_attention_step_(q, k, v, g, beta, pool, None, None, indices, **options)

    for case in cases:
        pool = pool_of(case)
        want = expected(case, pool)
        q, k, v, g, beta = case.positional[:5]
        assert_close((step(q, k, v, g, beta, pool, torch.tensor(SLOTS)), pool), want, 1e-5)
