"""The corpus is right: every spelling equals the token recurrence, without any backend."""

from __future__ import annotations

import pytest
import torch

from tests.spellings import NEAR_MISSES, PATTERNS, SPELLINGS
from tests.spellings.near_misses import NearMiss
from tests.spellings.registry import Spelling

BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 1e-2}


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    y = y.double()
    return float((x.double() - y).norm() / y.norm().clamp_min(1e-30))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_spelling_equals_recurrence(spelling: Spelling) -> None:
    for length in spelling.lengths:
        for dtype, bound in BOUNDS.items():
            if dtype not in spelling.dtypes:
                continue
            inputs = spelling.make_inputs(T=length, dtype=dtype, seed=length)
            expected, expected_state = spelling.expected(inputs)  # before the call: it may overwrite the state
            o, state = spelling.read(spelling.fn(*inputs), inputs)
            assert o.shape == expected.shape
            assert relative(o, expected) < bound, (length, dtype)
            if state is not None:
                assert relative(state, expected_state) < bound, (length, dtype)


@pytest.mark.parametrize("miss", NEAR_MISSES, ids=lambda m: m.name)
def test_near_miss_is_what_it_says(miss: NearMiss) -> None:
    """Those that differ do so visibly on their own inputs, so that taking them for the pattern cannot pass."""
    inputs = miss.make_inputs(dtype=torch.float64)
    tempting = miss.tempting(inputs)
    torch.manual_seed(0)
    result = miss.fn(*inputs)
    o = result if isinstance(result, torch.Tensor) else result[0]
    assert o.shape == tempting.shape
    error = (o - tempting).norm() / o.norm()
    if miss.differs:
        assert not error < 1e-4  # a NaN in the tempting answer is a difference
    else:
        assert error < 1e-6


def test_corpus_is_wide() -> None:
    assert {s.pattern for s in SPELLINGS if s.mode == "sequence"} == set(PATTERNS)
    assert {s.pattern for s in SPELLINGS if s.mode == "step"} == set(PATTERNS)
    assert len(NEAR_MISSES) >= 30
    assert {m.expect for m in NEAR_MISSES} == {"decline", "either"}
