"""Mamba-2: scalar-gated linear attention whose step size both writes and decays."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.published.draw import B, H, gates, normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

MAMBA = Repository("state-spaces/mamba", "e9594ce1c732d97440f0332fdc43170a2294dbfa")
N, P = 8, 12


def _scan(heads: int = 4, groups: int = 2, tokens: int = 32) -> tuple[torch.Tensor, ...]:
    """x, dt before its softplus, A, B and C."""
    x, dt = normal(B, tokens, heads, P), normal(B, tokens, heads) - 2
    return x, dt, -torch.rand(heads).exp(), normal(B, tokens, groups, N), normal(B, tokens, groups, N)


@case(MAMBA, "mamba_ssm/modules/ssd_minimal.py", "simple_gla")
def ssd_minimal(m: Any) -> Program:
    x, b, c = normal(B, 32, H, P), normal(B, 32, H, N), normal(B, 32, H, N)
    return partial(m.ssd_minimal_discrete, block_len=8), (x, gates(B, 32, H), b, c)


@case(MAMBA, "mamba_ssm/ops/triton/ssd_combined.py", "simple_gla")
def ssd_reference(m: Any) -> Program:
    x, dt, a, b, c = _scan()
    return partial(m.ssd_chunk_scan_combined_ref, chunk_size=8, D=normal(4)), (x, F.softplus(dt), a, b, c)


@case(MAMBA, "mamba_ssm/ops/triton/ssd_combined.py", "simple_gla")
def ssd_reference_softplus(m: Any) -> Program:
    options = {"chunk_size": 8, "D": normal(4), "dt_bias": normal(4), "dt_softplus": True}
    return partial(m.ssd_chunk_scan_combined_ref, **options), _scan()


@case(MAMBA, "mamba_ssm/ops/triton/selective_state_update.py", "simple_gla")
def step_tied(m: Any) -> Program:
    """Mamba-2 calls the reference with one step size and one rate a head, expanded over the head."""

    def step(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, bias: Any) -> Any:
        rate = a[:, None, None].expand(-1, P, N)
        wide, wide_bias = dt[:, :, None].expand(-1, -1, P), bias[:, None].expand(-1, P)
        return m.selective_state_update_ref(state, x, wide, rate, b, c, dt_bias=wide_bias, dt_softplus=True)

    x, dt, a, b, c = _scan(tokens=1)
    return step, (normal(B, 4, P, N), x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], normal(4))
