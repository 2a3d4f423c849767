"""MLA in textbooks, training libraries and references of kernels: rasbt, litgpt, tilelang, flashinfer and others."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.published.draw import B, H, normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

RASBT = Repository("rasbt/LLMs-from-scratch", "28c65cdfbc3338e2e040016eea4b7fdf556e4d57")
LITGPT = Repository("Lightning-AI/litgpt", "26857050fe3ff627cd714fe92f5838f51a3d5efa")
TILELANG = Repository("tile-ai/tilelang", "a35008a42531c62b976ae4cec3855d4383db0f3c")
FLASHINFER = Repository("flashinfer-ai/flashinfer", "fb28d7242b3506a2348265962041acc1fb56cca4")
MLA_EXPERIMENTS = Repository("ambisinister/mla-experiments", "88f178893979a8233d981b80061be85b9dbfcca8")
JOEY = Repository("joey00072/Multi-Head-Latent-Attention-MLA-", "e324f2e6d932c0c744db94f3d38851c12d0e78c8")
RASBT_MLA = "ch04/05_mla/gpt_with_kv_mla.py"
EXPERIMENTS_MLA = "modeling/attention/mla.py"
TILELANG_PAGED = "examples/deepseek_mla/example_mla_decode_paged.py"
FLASHINFER_MLA = "tests/attention/test_deepseek_mla.py"
PROMPT, CACHED, CHUNK = 9, 12, 4
WIDTH, RANK, NOPE, ROPE = 24, 16, 12, 8


@case(RASBT, RASBT_MLA, "mla")
def textbook_prompt(m: Any) -> Program:
    return m.MultiHeadLatentAttention(WIDTH, WIDTH, 0.0, H, latent_dim=RANK).eval(), (normal(B, PROMPT, WIDTH),)


def _textbook_cached(m: Any, tokens: int) -> Program:
    layer = m.MultiHeadLatentAttention(WIDTH, WIDTH, 0.0, H, latent_dim=RANK).eval()
    layer.cache_c_kv, layer.ptr_current_pos = normal(B, CACHED, RANK), CACHED
    return partial(layer, use_cache=True), (normal(B, tokens, WIDTH),)


@case(RASBT, RASBT_MLA, "mla")
def textbook_chunk(m: Any) -> Program:
    return _textbook_cached(m, CHUNK)


@case(RASBT, RASBT_MLA, "mla")
def textbook_step(m: Any) -> Program:
    return _textbook_cached(m, 1)


@case(
    LITGPT, "litgpt/model.py", "mla", only=("MultiheadLatentAttention", "RMSNorm", "apply_rope", "batched_index_copy_")
)
def litgpt_prompt(m: Any) -> Program:
    sizes = {"n_embd": WIDTH, "n_head": H, "n_query_groups": H, "q_lora_rank": 20, "kv_lora_rank": RANK}
    sizes |= {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "qk_head_dim": NOPE + ROPE, "v_head_dim": 10}
    options = {"attn_bias": False, "bias": False, "norm_eps": 1e-5, "rope_adjustments": None, "rope_interleave": False}
    options |= {"attention_scores_scalar": None, "attention_logit_softcapping": None}
    layer = m.MultiheadLatentAttention(SimpleNamespace(**sizes, **options), 0)
    angles = normal(1, PROMPT, ROPE)
    return layer, (normal(B, PROMPT, WIDTH), angles.cos(), angles.sin())


@case(TILELANG, "examples/deepseek_mla/example_mla_decode.py", "mla", only=("ref_program",))
def tilelang_step(m: Any) -> Program:
    return m.ref_program, (
        normal(B, H, RANK),
        normal(B, H, ROPE),
        normal(B, CACHED, 1, RANK),
        normal(B, CACHED, 1, ROPE),
    )


@case(TILELANG, TILELANG_PAGED, "mla", "mla", only=("run_torch_mla", "scaled_dot_product_attention"))
def tilelang_requests(m: Any) -> Program:
    """A loop over requests, each with its own part of the pool."""

    def decode(q: Any, pool: Any) -> Any:
        return m.run_torch_mla.__wrapped__(
            q, None, pool, CACHED, 4, B, 1, [9, 11], H, 1, RANK + ROPE, RANK, True, torch.float32
        )

    return decode, (normal(B, 1, H, RANK + ROPE), normal(B * CACHED // 4, 4, 1, RANK + ROPE))


@case(
    FLASHINFER,
    "tests/attention/test_mla_decode_kernel.py",
    "mla",
    only=("DeepseekV2AttentionMatAbsorbDecode", "DeepseekV2RMSNorm"),
)
def flashinfer_absorbed(m: Any) -> Program:
    """With W_UK in the weight of the queries and W_UV in that of the output; rotations left out."""
    linear = {"q_a_proj": (WIDTH, 20), "q_b_proj": (20, H * (NOPE + ROPE)), "kv_b_proj": (RANK, 2 * H * NOPE)}
    layers = {name: nn.Linear(*sizes, bias=False) for name, sizes in (linear | {"o_proj": (H * NOPE, WIDTH)}).items()}
    sizes = {"hidden_size": WIDTH, "num_heads": H, "q_lora_rank": 20, "kv_lora_rank": RANK, "v_head_dim": NOPE}
    sizes |= {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "q_head_dim": NOPE + ROPE, "rope_theta": 10000}
    m.precompute_freqs_cis = lambda *_, **__: torch.ones(1)
    m.apply_rotary_emb = lambda q, k, _: (q, k)
    model = m.DeepseekV2AttentionMatAbsorbDecode(
        SimpleNamespace(**sizes, **layers, softmax_scale=(NOPE + ROPE) ** -0.5)
    )

    def decode(hidden: Any, latent: Any, rotated: Any) -> Any:
        return model.run_proof_of_concept(hidden, latent, rotated, False, False, B, CACHED, 4, 0)

    return decode, (normal(B, WIDTH), normal(B, CACHED, RANK), normal(B, CACHED, ROPE))


@case(FLASHINFER, FLASHINFER_MLA, "mla", only=("attention_ref", "generate_kv_from_cache"))
def flashinfer_chunk_with_lse(m: Any) -> Program:
    """Some tokens over a longer cache; the logarithm of the weights' sum is returned beside the result."""

    def chunk(q: Any, ckv: Any, kpe: Any) -> Any:
        k, v = m.generate_kv_from_cache(ckv, kpe, CACHED, B, H)
        return m.attention_ref(B, q, k, v, True, (RANK + ROPE) ** -0.5)

    return chunk, (normal(B * CHUNK, H, RANK + ROPE), normal(B * 3, 4, RANK), normal(B * 3, 4, ROPE))


@case(MLA_EXPERIMENTS, EXPERIMENTS_MLA, "mla")
def experiments_prompt_without_positions(m: Any) -> Program:
    layer = m.RopelessMLA(WIDTH, H)
    return lambda x: layer(x), (normal(B, PROMPT, WIDTH),)


@case(MLA_EXPERIMENTS, EXPERIMENTS_MLA, "mla")
def experiments_prompt(m: Any) -> Program:
    layer = m.MLA(WIDTH, H, max_len=32)
    return lambda x: layer(x), (normal(B, PROMPT, WIDTH),)


@case(MLA_EXPERIMENTS, EXPERIMENTS_MLA, "mla")
def experiments_chunk(m: Any) -> Program:
    layer = m.MLA(WIDTH, H, max_len=32)
    cache = normal(B, CACHED, layer.kv_proj_dim + layer.qk_rope_dim)
    return lambda x, cache: layer(x, cache, CACHED), (normal(B, CHUNK, WIDTH), cache)


@case(JOEY, "mla.py", "mla", only=("MultiHeadLatentAttention",))
def joey_prompt(m: Any) -> Program:
    """With torch's norm and half a rotation in the place of the author's library."""
    m.RMSNorm = lambda dim: nn.RMSNorm(dim)
    m.apply_rope = lambda q, k, cis: (q * cis + q.flip(-1), k * cis + k.flip(-1))
    sizes = {"d_model": WIDTH, "num_heads": H, "v_head_dim": 10, "nope_head_dim": NOPE, "rope_head_dim": ROPE}
    layer = m.MultiHeadLatentAttention(SimpleNamespace(**sizes, q_lora_rank=20, kv_lora_rank=RANK, dropout=0.0)).eval()
    return layer, (normal(B, PROMPT, WIDTH), None, normal(PROMPT, ROPE))
