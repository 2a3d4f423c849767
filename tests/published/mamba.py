"""Mamba-2: scalar-gated linear attention whose step size both writes and decays."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.published.draw import B, H, gates, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

MAMBA = Repository("state-spaces/mamba", "e9594ce1c732d97440f0332fdc43170a2294dbfa")
MINIMAL2 = Repository("tommyip/mamba2-minimal", "4f4413731f24303b4e046962bce6ca5b6a3b13d6")
MAMBA2_TORCH = Repository("vasqu/mamba2-torch", "e55f71764590e5a67049976e95657e7750fa4eb7")
MINIMAL = Repository("johnma2006/mamba-minimal", "03de542a36d873f6e6c4057ad687278cc6ae944d")
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


@case(MINIMAL2, "mamba2.py", "simple_gla")
def minimal_ssd(m: Any) -> Program:
    x, b, c = normal(B, 32, H, P), normal(B, 32, 1, N), normal(B, 32, 1, N)
    return partial(m.ssd, chunk_size=8), (x, gates(B, 32, H), b, c)


def _minimal(m: Any) -> tuple[Any, Any]:
    config = m.Mamba2Config(d_model=16, n_layer=1, d_state=N, headdim=8, chunk_size=8, vocab_size=16)
    layer = m.Mamba2(config)
    for parameter in (layer.dt_bias, layer.A_log, layer.D):
        torch.nn.init.uniform_(parameter)
    return layer, m.InferenceCache.alloc(B, config)


@case(MINIMAL2, "mamba2.py", "simple_gla")
def minimal_layer(m: Any) -> Program:
    return _minimal(m)[0], (normal(B, 16, 16),)


@case(MINIMAL2, "mamba2.py", "simple_gla")
def minimal_step(m: Any) -> Program:
    layer, cache = _minimal(m)
    cache.ssm_state.normal_()
    return layer.step, (normal(B, 1, 16), cache)


@case(MAMBA2_TORCH, "tests/ssd_minimal_no_einops.py", "simple_gla")
def ssd_without_einops(m: Any) -> Program:
    x, dt, a, b, c = _scan(groups=4, tokens=30)
    return partial(m.ssd_minimal_discrete, block_len=8, D=normal(4)), (x, F.softplus(dt), a, b, c)


@case(MINIMAL, "model.py")
def mamba1_scan(m: Any) -> Program:
    """Mamba-1 has a decay for each channel and state: no product of heads."""
    u, delta, a = normal(B, 6, P), unit(B, 6, P), -unit(P, N)
    return partial(m.MambaBlock.selective_scan, None), (u, delta, a, normal(B, 6, N), normal(B, 6, N), normal(P))
