"""References of serving and kernel projects, and torchtitan's MLA: vllm-ascend, makora, mamba.py, AttentionEngine."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.published.draw import B, H, K, V, bthd, gates, keys, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

ASCEND = Repository("vllm-project/vllm-ascend", "182b75ea84ff13ece27b57391331ef8935410aea", roots=("",))
MAKORA = Repository("makora-ai/kernels", "aa977139f6e9813bf4260091d8188375a892da9a")
MAMBAPY = Repository("alxndrTL/mamba.py", "2cc168c78b2494557f45072c4b8daa9d6f5608c7")
ENGINE = Repository("smallscientist1/AttentionEngineFork", "b7088e28f5ba083b81d641861c4c1ef703616e21")
TITAN = Repository("pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a")
NIGHTLY = "tests/e2e/nightly/single_node/ops/singlecard_ops"
CHUNKED = "vllm_ascend/_310p/ops/fla/chunk_gated_delta_rule.py"
RECURRENT = "vllm_ascend/_310p/ops/fla/fused_recurrent_gated_delta_rule.py"
LIGHTNING = "_naive_triton_lightning_attention"
WIDTH = 24


@case(ASCEND, f"{NIGHTLY}/triton/test_chunk_kda_npu.py", "kda", only=("naive_recurrent_kda",))
def ascend_kda(m: Any) -> Program:
    inputs = (*bthd(7), gates(B, 7, H, K), unit(B, 7, H))
    return lambda q, k, v, g, b, s: m.naive_recurrent_kda(q, k, v, g, b, None, s, True), (*inputs, normal(B, H, K, V))


TILES = ("BLOCK_SIZE", "DIAG_BLOCK_SIZE", "KV_BLOCK_SIZE", "_round_like_kernel_store", LIGHTNING)


@case(ASCEND, f"{NIGHTLY}/triton/test_lightning_attn.py", only=TILES)
def ascend_lightning(m: Any) -> Program:
    """Between blocks it decays by one token less than within them, as its comment on the kernel says."""
    m.DIAG_BLOCK_SIZE, m.KV_BLOCK_SIZE = 8, 8
    q, k, v = normal(B, H, 32, K), normal(B, H, 32, K), normal(B, H, 32, V)
    return partial(getattr(m, LIGHTNING), block_size=16), (q, k, v, unit(1, H, 1, 1), normal(B, H, K, V))


@case(
    ASCEND,
    f"{NIGHTLY}/test_recurrent_gated_delta_rule.py",
    "gated_delta_rule",
    only=("golden_recurrent_gated_delta_rule",),
)
def ascend_heads(m: Any) -> Program:
    """One request after the other, and its heads one by one; after each token the state goes to the pool."""
    q, k, v = normal(4, 1, K), keys(4, 1, K), normal(4, 2, V)
    state, slots = normal(3, 2, V, K), [0, 0, 2, 2]
    return lambda q, k, v, s, b, g: m.golden_recurrent_gated_delta_rule(q, k, v, s, b, None, [2, 2], slots, g, None), (
        q,
        k,
        v,
        state,
        unit(4, 2),
        gates(4, 2),
    )


CHUNK_NAMES = (
    "CHUNK_SIZE",
    "_torch_chunk_gated_delta_rule_chunked",
)


@case(ASCEND, CHUNKED, "gated_delta_rule", only=CHUNK_NAMES)
def ascend_chunk(m: Any) -> Program:
    """The state lies as values times keys."""
    fn = partial(m._torch_chunk_gated_delta_rule_chunked, chunk_size=16, output_final_state=True)
    return lambda q, k, v, g, b, s: fn(q, k, v, g, b, initial_state=s), (
        *bthd(40),
        gates(B, 40, H),
        unit(B, 40, H),
        normal(B, H, V, K),
    )


RECURRENT_NAMES = ("_run_recurrent_gated_delta_rule", "_maybe_l2norm", "_expand_to_hv", "_state_index")


@case(ASCEND, RECURRENT, "gated_delta_rule", only=RECURRENT_NAMES)
def ascend_requests(m: Any) -> Program:
    """One request after the other; after each token the state goes to the pool."""
    q, k, v = normal(1, 5, 1, K), keys(1, 5, 1, K), normal(1, 5, 2, V)

    def run(q: Any, k: Any, v: Any, g: Any, beta: Any, states: Any) -> Any:
        return m._run_recurrent_gated_delta_rule(
            q, k, v, g, beta, states, K**-0.5, None, None, None, use_initial_state=True, use_qk_l2norm_in_kernel=False
        )

    return run, (q, k, v, gates(1, 5, 2), unit(1, 5, 2), normal(1, 2, V, K))


@case(MAKORA, "NVIDIA_H100/kda_kernels/kda_reference_baseline.py", "kda", only=("Model",))
def makora_kda(m: Any) -> Program:
    return m.Model(), (*bthd(8), gates(B, 8, H, K), unit(B, 8, H))


@case(MAMBAPY, "mambapy/mamba2.py", "simple_gla")
def mambapy_step(m: Any) -> Program:
    """Caches are overwritten; its convolution and gated norm are of packages, and stand here as what they compute."""

    class Norm(nn.Module):
        def __init__(self, width: int, eps: float, norm_before_gate: bool, **_: Any) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(width, eps=eps)

        def forward(self, x: Any, z: Any) -> Any:
            return self.norm(x * nn.functional.silu(z))

    m.RMSNormGated = Norm
    m.causal_conv1d_fn = m.selective_state_update = None

    def convolved(x: Any, state: Any, weight: Any, bias: Any, _: str) -> Any:
        state.copy_(torch.cat([state[:, :, 1:], x[:, :, None]], -1))
        return nn.functional.silu((state * weight).sum(-1) + bias)

    m.causal_conv1d_update = convolved
    config = m.Mamba2Config(d_model=32, n_layers=1, d_head=8, d_state=6)
    block = m.Mamba2Block(config).eval()
    caches = normal(B, 8, 8, 6), normal(B, 64 + 12, 4)
    return lambda u, h, c: block.step(u, (h, c)), (normal(B, 1, 32), *caches)


@case(ENGINE, "attention_engine/core/template/tl_template/attn/mla_decode_tl.py", "mla", only=("ref_program",))
def engine_mla_step(m: Any) -> Program:
    q, rotated = normal(B, 4, 16), normal(B, 4, 8)
    return lambda q, p, kv, kp: m.ref_program(q, p, kv, kp, None, None), (
        q,
        rotated,
        normal(B, 12, 1, 16),
        normal(B, 12, 1, 8),
    )


@case(TITAN, "torchtitan/models/deepseek_v3/model.py", "mla", only=("Attention",))
def torchtitan_packed(m: Any) -> Program:
    """Tokens of a batch lie in one row ``[T, D]``; the inner attention gets a batch of one."""
    m.spmd = SimpleNamespace(local=contextlib.nullcontext, is_type_checking=lambda: False)
    heads, nope, rope, rank = 3, 6, 4, 16
    angles = torch.arange(9.0)[:, None, None] * torch.tensor([1.0, 0.1])

    def turned(x: Any) -> Any:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1)

    def inner(q: Any, k: Any, v: Any, attention_masks: Any, scale: float) -> Any:
        found = nn.functional.scaled_dot_product_attention(
            *(x[None].transpose(1, 2) for x in (q, k, v)), scale=scale, is_causal=True
        )
        return found.transpose(1, 2)[0]

    itself: Any = nn.Module()
    itself.wq_a, itself.q_norm, itself.wq_b = (
        nn.Linear(WIDTH, 12, bias=False),
        nn.RMSNorm(12),
        nn.Linear(12, heads * (nope + rope), bias=False),
    )
    itself.wkv_a, itself.kv_norm = nn.Linear(WIDTH, rank + rope, bias=False), nn.RMSNorm(rank)
    itself.wkv_b, itself.wo = nn.Linear(rank, heads * 16, bias=False), nn.Linear(heads * 10, WIDTH, bias=False)
    sizes = {"q_lora_rank": 12, "kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope}
    sizes |= {"qk_head_dim": nope + rope, "v_head_dim": 10, "softmax_scale": (nope + rope) ** -0.5}
    for name, size in sizes.items():
        setattr(itself, name, size)
    itself.rope, itself.inner_attention = lambda q, k, positions: (turned(q), turned(k)), inner
    return partial(m.Attention.forward, itself), (normal(9, WIDTH), None, torch.arange(9))
