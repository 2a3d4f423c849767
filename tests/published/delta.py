"""Delta rules of NVlabs, NVIDIA, inclusionAI, flashinfer and RWKV."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.published.draw import B, H, K, V, bhtd, bthd, gates, keys, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

NVLABS = Repository("NVlabs/GatedDeltaNet", "5ddd1e4845336f6b07b506ad77a8c92db9e5478d")
MEGATRON = Repository("NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553")
CULA = Repository("inclusionAI/cuLA", "fa742a23fcc6d818b0f591532ecad7985e3f64e5")
FLASHINFER = Repository("flashinfer-ai/flashinfer", "fb28d7242b3506a2348265962041acc1fb56cca4")
RASBT = Repository("rasbt/LLMs-from-scratch", "28c65cdfbc3338e2e040016eea4b7fdf556e4d57")
RWKV = Repository("BlinkDL/RWKV-LM", "524481d5099b38d9bc8ef1e89209161b86c8011b")
RASBT_GDN = "ch05/16_qwen3.5/qwen3_5_transformers.py"
NVLABS_CHUNK = "lit_gpt/gated_delta_rule_ops/chunk.py"
MEGATRON_GDN = "megatron/core/ssm/gated_delta_net/gdn.py"
FLASHINFER_GDN = "tests/gdn/reference_delta_rule.py"


@case(NVLABS, NVLABS_CHUNK, "gated_delta_rule", only=("recurrent_gated_delta_rule_ref",))
def nvlabs_recurrent(m: Any) -> Program:
    return m.recurrent_gated_delta_rule_ref, (*bhtd(9), unit(B, H, 9), gates(B, H, 9))


@case(NVLABS, NVLABS_CHUNK, "gated_delta_rule", only=("chunk_gated_delta_rule_ref",))
def nvlabs_chunk(m: Any) -> Program:
    """It returns w and u as well, which it computes for the test of its kernels."""
    q, k, v = normal(B, H, 48, 32), keys(B, H, 48, 32), normal(B, H, 48, 32)
    return partial(m.chunk_gated_delta_rule_ref, BT=16), (q, k, v, unit(B, H, 48), gates(B, H, 48))


@case(MEGATRON, MEGATRON_GDN, "gated_delta_rule", only=("torch_chunk_gated_delta_rule",))
def megatron_chunk(m: Any) -> Program:
    fn = partial(m.torch_chunk_gated_delta_rule, chunk_size=16, output_final_state=True)
    return fn, (*bthd(40), gates(B, 40, H), unit(B, 40, H))


@case(
    MEGATRON,
    "tests/unit_tests/ssm/test_gdp_dynamic_inference.py",
    "gated_delta_rule",
    only=("_gated_delta_rule_ref",),
)
def megatron_loops(m: Any) -> Program:
    """A loop over requests, heads and tokens, each of which is a recurrence of one head."""
    q, k, v = normal(1, 5, 1, K), normal(1, 5, 1, K), normal(1, 5, 2, V)
    fn = partial(m._gated_delta_rule_ref, state_indices=None, use_qk_l2norm=True)
    return fn, (q, k, v, gates(1, 5, 2), unit(1, 5, 2), normal(1, 2, K, V))


@case(CULA, "tests/test_kda_decode.py", "kda", only=("torch_kda_decode_ref",))
def cula_kda_step(m: Any) -> Program:
    """A loop over requests and heads."""
    q, k, v = normal(1, 1, K), normal(1, 1, K), normal(1, 2, V)
    state = normal(1, 2, V, K)
    return partial(m.torch_kda_decode_ref, scale=K**-0.5), (
        q,
        k,
        v,
        normal(1, 2, K),
        normal(1, 2),
        normal(2),
        normal(2, K),
        state,
    )


@case(FLASHINFER, FLASHINFER_GDN, "gated_delta_rule")
def flashinfer_recurrent(m: Any) -> Program:
    q, k, v = normal(6, H, K), keys(6, H, K), normal(6, H, K)
    return lambda q, k, v, a, b: m.delta_rule(q, k, v, [6], alpha=a, beta=b), (q, k, v, unit(6, H), unit(6, H))


@case(FLASHINFER, FLASHINFER_GDN, "gated_delta_rule")
def flashinfer_step(m: Any) -> Program:
    q, k, v = normal(B, H, K), normal(B, H, K), normal(B, 2 * H, V)
    heads = 2 * H
    inputs = (q, k, v, normal(B, heads, K, V), normal(heads), normal(B, heads), normal(heads), normal(B, heads))
    return m.decode_delta_rule, inputs


@case(RASBT, RASBT_GDN, "gated_delta_rule", only=("torch_chunk_gated_delta_rule", "l2norm"))
def textbook_chunk(m: Any) -> Program:
    fn = partial(m.torch_chunk_gated_delta_rule, chunk_size=16, use_qk_l2norm_in_kernel=True)
    return fn, (*bthd(20), gates(B, 20, H), unit(B, 20, H))


@case(RASBT, RASBT_GDN, "gated_delta_rule", only=("torch_recurrent_gated_delta_rule", "l2norm"))
def textbook_step(m: Any) -> Program:
    fn = partial(m.torch_recurrent_gated_delta_rule, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return fn, (*bthd(1), gates(B, 1, H), unit(B, 1, H), normal(B, H, K, V))


@case(RWKV, "RWKV-v7/rwkv_v7_demo.py", "kda", only=("RWKV7_OP",))
def rwkv7_tied(m: Any) -> Program:
    """RWKV-7 with one key for erasing and writing."""
    m.HEAD_SIZE, m.DTYPE = K, torch.float32

    def tied(r: Any, w: Any, k: Any, v: Any, beta: Any) -> Any:
        key = F.normalize(k.view(B, 6, H, K), dim=-1)
        decay = torch.exp(-torch.exp(w.view(B, 6, H, K)))
        write = (key * beta[..., None]).view(B, 6, H * K)
        return m.RWKV7_OP(r, w, write, v, -(key * decay).view(B, 6, H * K), write)

    wide = (B, 6, H * K)
    return tied, (normal(*wide), normal(*wide), normal(*wide), normal(*wide), unit(B, 6, H))


@case(RWKV, "RWKV-v7/rwkv_v7_demo.py", only=("RWKV7_OP",))
def rwkv7(m: Any) -> Program:
    m.HEAD_SIZE, m.DTYPE = K, torch.float32
    wide = (B, 6, H * K)
    r, w, k, v = (normal(*wide) for _ in range(4))
    return m.RWKV7_OP, (r, w, k, v, -0.3 * keys(*wide), keys(*wide))
