"""Ports of MLA read for the first time on 2026-11-27."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.published.draw import B, normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

ERICSSON = Repository("LeonEricsson/omni", "2ab14510d8a387679ebbb9f9fd42ca8e2b977c5b", roots=("", "experiments/mla"))
FLASHDANCE = Repository("marcelo-earth/flashdance", "461f1470b2251c3f7c40f769a7f8d1464be18a1d")
COMPACT = Repository(
    "syedazeez337/deepseek-v3-compact-proxy", "f2cde63802c8aa1188359575e01fadf9999948e4", roots=("src",)
)
SHALLOW = Repository("zhang3lab/ShallowMLA", "b4a11001002013a39b0a526340395ba9274d695c")
KHUSHWANT = Repository("khushwant04/latent-attention", "1c20d1b87cb090930eefcf77d256b72a26df0558")
WIDTH, TOKENS, HEADS, ROPE, LATENT = 24, 10, 4, 4, 8


@case(ERICSSON, "experiments/mla/mla.py", "mla")
def ericsson_prompt(m: Any) -> Program:
    sizes = {"num_heads": HEADS, "head_dim": 6, "head_dim_decoupled_qk": ROPE, "d_ckv": LATENT, "d_cq": 12}
    layer = m.MLA(SimpleNamespace(d_model=WIDTH, attention_dropout=0.0, **sizes)).eval()
    angles = torch.outer(torch.arange(16.0), 0.1 ** torch.arange(ROPE // 2))
    pos = angles.cos(), angles.sin()
    return lambda x: layer(x, None, pos, None, 0), (normal(B, TOKENS, WIDTH),)


@case(FLASHDANCE, "mla.py", "mla")
def flashdance_without_rotation(m: Any) -> Program:
    return m.MultiHeadLatentAttention(WIDTH, HEADS, LATENT, d_rope=ROPE).eval(), (normal(B, TOKENS, WIDTH),)


@case(FLASHDANCE, "mla.py", "mla")
def flashdance_rotated(m: Any) -> Program:
    """The rotated part replaces the last channels of queries and keys, and is the same query for all heads."""
    layer = m.MultiHeadLatentAttention(WIDTH, HEADS, LATENT, d_rope=ROPE).eval()
    angles = torch.outer(torch.arange(float(TOKENS)), 0.1 ** torch.arange(ROPE // 2))
    return layer, (normal(B, TOKENS, WIDTH), angles.cos(), angles.sin())


def _compact(m: Any) -> Any:
    sizes = {"d_model": WIDTH, "n_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": LATENT, "qk_nope_head_dim": 6}
    config = m.CompactV3Config(**sizes, qk_rope_head_dim=ROPE, v_head_dim=10, context_length=16)
    return m.MultiHeadLatentAttention(config).eval()


_COMPACT = "src/compact_v3/mla.py"


@case(COMPACT, _COMPACT, "mla")
def compact_prompt(m: Any) -> Program:
    return _compact(m), (normal(B, TOKENS, WIDTH),)


@case(COMPACT, _COMPACT, "mla")
def compact_two_terms(m: Any) -> Program:
    """Scores of content and of position are added; weights are rounded back to their dtype."""
    return _compact(m).reference_manual, (normal(B, TOKENS, WIDTH),)


@case(COMPACT, _COMPACT, "mla")
def compact_cached_prompt(m: Any) -> Program:
    layer = _compact(m)

    def prefill(x: Tensor) -> Any:
        out, cache = layer.prefill(x)
        return out, cache.compressed_kv, cache.rope_keys

    return prefill, (normal(B, TOKENS, WIDTH),)


def _compact_step(m: Any, name: str) -> Program:
    layer = _compact(m)

    def step(x: Tensor, latent: Tensor, rotated: Tensor) -> Any:
        out, cache = getattr(layer, name)(x, m.MLACache(latent, rotated))
        return out, cache.compressed_kv, cache.rope_keys

    return step, (normal(B, 1, WIDTH), normal(B, TOKENS, LATENT), normal(B, TOKENS, ROPE))


@case(COMPACT, _COMPACT, "mla")
def compact_step(m: Any) -> Program:
    """Absorbed: the rotated keys are spread over the heads."""
    return _compact_step(m, "decode")


@case(COMPACT, _COMPACT, "mla")
def compact_step_expanded(m: Any) -> Program:
    return _compact_step(m, "decode_naive")


def _shallow(m: Any) -> tuple[Any, Tensor]:
    sizes = {"dim": WIDTH, "kv_latent_rank": LATENT, "q_latent_rank": 12, "num_heads": HEADS, "qk_nrope_head_dim": 6}
    layer = m.MLA(**sizes, v_head_dim=10, qk_rope_head_dim=ROPE, max_batch_size=B, max_seq_len=16, dtype=torch.float32)
    angles = m.precompute_freqs_cis(ROPE, 16, 32, 32, 1, 10000.0, 40.0, dtype=torch.float32)
    return layer.eval(), angles


_SHALLOW = ("precompute_freqs_cis", "apply_rotary_emb", "MLA")


@case(SHALLOW, "mla.py", "mla", only=_SHALLOW)
def shallow_prompt(m: Any) -> Program:
    """Absorbed, over a cache that the prompt is written to; the mask is added in place."""
    layer, angles = _shallow(m)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu_(1)
    return lambda x, angles, mask: layer(x, 0, angles, mask), (normal(B, TOKENS, WIDTH), angles[:TOKENS], mask)


@case(SHALLOW, "mla.py", "mla", only=_SHALLOW)
def shallow_step(m: Any) -> Program:
    layer, angles = _shallow(m)
    layer.kv_latent_cache.normal_()
    layer.k_rope_cache.normal_()
    return lambda x, angles: layer(x, 9, angles), (normal(B, 1, WIDTH), angles[9:10])


@case(KHUSHWANT, "multihead_latent_attention.py")
def khushwant_biased(m: Any) -> Program:
    """Keys and values are expanded with biases, other tokens ask, and the weights are returned."""
    layer = m.MultiheadLatentAttention(WIDTH, WIDTH, HEADS, LATENT).eval()
    return layer, (normal(B, 5, WIDTH), normal(B, TOKENS, WIDTH))
