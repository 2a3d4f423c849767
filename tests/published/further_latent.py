"""Latent attention of small models: no rotary part, up-projections of their own, keys that are normalised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.published.draw import B, normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

VARIANTS = Repository("4nath0s/gpt2-attention-variants", "3b865607a5036884e24c9766cba97ce8807dc84b")
HANDWRITTEN = Repository("cyyueyang/handwritten-llm", "95fbe25db4b91bdca75516002baa7f65a61fb541")
SANTUCCI = Repository("asantucci/deepseek", "dbd6033f1e75df59fa0f4ef6bf6d3e8af239d4cc")
COMPACT = Repository("syedazeez337/deepseek-v3-compact-proxy", "f2cde63802c8aa1188359575e01fadf9999948e4", ("src",))
KAINOMOS = Repository("AwakeningOS/KaiNomos-747M", "4b5a3b36b528ef2ad93fbe71be3715fa2e6f9df8", roots=("architecture",))
FUSION = Repository("atandra2000/FusionLLM", "a06c4b8a099407cbc4f56146671602394c065826")
RESEARCH = Repository("vukrosic/linear-attention-research", "ff48fcae0d4911c131d3629bc3fd7b7f207f1e11")
EXPLORING = Repository(
    "luigi617/Exploring-Multi-Head-Latent-Attention-in-DeepSeek-V3", "459ff4325708ff590bc5e26939c8feccbe09306e"
)

TOKENS, WIDTH, HEADS = 20, 32, 2


@case(VARIANTS, "mla.py", "mla")
def variants_prompt(m: Any) -> Program:
    return m.MultiHeadLatentAttention(WIDTH, WIDTH, 64, 0.0, HEADS, 8).eval(), (normal(B, TOKENS, WIDTH),)


@case(VARIANTS, "mla.py", "mla")
def variants_window(m: Any) -> Program:
    """A token reads the five before it."""
    return m.MultiHeadLatentAttention(WIDTH, WIDTH, 64, 0.0, HEADS, 8, window_size=5).eval(), (
        normal(B, TOKENS, WIDTH),
    )


@case(VARIANTS, "mla.py", "mla")
def variants_decode(m: Any) -> Program:
    layer = m.MultiHeadLatentAttention(WIDTH, WIDTH, 64, 0.0, HEADS, 8).eval()

    def run(x: Any, latents: Any) -> Any:
        layer.cache_ckv = latents
        return layer(x, use_cache=True)[0]

    return run, (normal(B, 1, WIDTH), normal(B, TOKENS, 8))


@case(SANTUCCI, "mla.py", "mla")
def santucci_prompt(m: Any) -> Program:
    scaling = {"type": "yarn", "scaling_factor": 2.0, "alpha": 1, "beta": 32, "attn_factor": 1.0}
    rope = {"head_dim": 8, "base": 10000, "scaling": {**scaling, "training_context_length": 32}}
    sizes = {"d_model": WIDTH, "nheads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 16, "nope_head_dim": 8}
    config = SimpleNamespace(**sizes, v_head_dim=12, rope=rope, dropout=0.0, max_position_embeddings=64)
    whole = m.YarnRotaryEmbedding.__init__
    m.YarnRotaryEmbedding.__init__ = lambda self, *given, **named: whole(self, *given, **{"device": "cpu", **named})
    layer = m.MultiHeadLatentAttention(config, 0).eval()
    m.YarnRotaryEmbedding.__init__ = whole
    return layer, (normal(B, TOKENS, WIDTH),)


def _compact(m: Any) -> Any:
    sizes = {"d_model": WIDTH, "n_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
    return m.MultiHeadLatentAttention(
        m.CompactV3Config(**sizes, qk_rope_head_dim=8, v_head_dim=12, context_length=64)
    ).eval()


@case(COMPACT, "src/compact_v3/mla.py", "mla")
def compact_reference(m: Any) -> Program:
    return _compact(m).reference, (normal(B, TOKENS, WIDTH),)


@case(COMPACT, "src/compact_v3/mla.py", "mla")
def compact_manual(m: Any) -> Program:
    """Two products of scores, a softmax in fp32."""
    return _compact(m).reference_manual, (normal(B, TOKENS, WIDTH),)


@case(COMPACT, "src/compact_v3/mla.py", "mla")
def compact_decode(m: Any) -> Program:
    layer = _compact(m)
    return lambda x, latents, rotated: layer.decode_naive(x, m.MLACache(latents, rotated))[0], (
        normal(B, 1, WIDTH),
        normal(B, TOKENS, 16),
        normal(B, TOKENS, 8),
    )


@case(KAINOMOS, "architecture/mla.py")
def kainomos_normalised(m: Any) -> Program:
    """Each head's keys are normalised after they are expanded: no latent can stand for them."""
    mla = {"num_heads": HEADS, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 12}
    config = SimpleNamespace(hidden_size=WIDTH, rms_norm_eps=1e-6, mla=SimpleNamespace(**mla, q_head_dim=8))
    return m.GatedMLA(config).eval(), (normal(B, TOKENS, WIDTH),)


@case(FUSION, "models/mla.py")
def fusion_normalised(m: Any) -> Program:
    """Latent and rotated part are normalised together as keys, the values are of the latent alone."""
    m.flash_attn_func = None
    sizes = {"dim": WIDTH, "n_heads": HEADS, "n_kv_groups": HEADS, "q_lora_rank": 12, "kv_lora_rank": 16}
    layer = m.MultiHeadLatentAttention(
        {**sizes, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "max_seq_len": 64}
    ).eval()
    return layer, (normal(B, TOKENS, WIDTH),)


@case(RESEARCH, "models/layers.py")
def research_heads(m: Any) -> Program:
    """Its dimensions of tokens and heads are the wrong way round: every token's heads attend to each other."""
    m.RotaryPositionalEmbeddings = lambda **sizes: nn.Identity()
    return m.MultiHeadLatentAttention(WIDTH, HEADS, 8, 8, 16, 12, 64).eval(), (normal(B, TOKENS, WIDTH),)


@case(EXPLORING, "attentions/mla.py")
def exploring_latents(m: Any) -> Program:
    """Latents that are learnt read the tokens, and the tokens read them: another mechanism of the same name."""
    config = SimpleNamespace(hidden_size=WIDTH, num_attention_heads=HEADS)
    return m.MultiHeadLatentAttention(config, num_latents=6).eval(), (normal(B, TOKENS, WIDTH),)


@case(HANDWRITTEN, "mla.py")
def handwritten_scores(m: Any) -> Program:
    """Scores are multiplied by values before the softmax, whose result nobody reads: infinite where masked."""
    torch.manual_seed(3)
    return m.MultiLatentAttention(WIDTH, 12, 16, HEADS, 8, 8, 12, 64).eval(), (normal(B, TOKENS, WIDTH),)
