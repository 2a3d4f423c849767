"""MLA in repositories of lessons and of small trainings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.published.draw import B, normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

LEMON = Repository("LemonAttn/mini-deepseek", "c94b693a600aa98af6050eedd35784f10acc44ef")
STONE = Repository("stonehuang1024/mini-deepseek", "9ed143523f11ec51cfc78bcc3b5c62b2bf58f697")
MAYANK = Repository("Mayankpratapsingh022/DeepSeek-from-Scratch", "cd9a8d831e003a96f9e4a116078bcf636bb73247")
RAFIN = Repository("RaF-in/Build-deepseek-from-scratch", "7f642c84e12f25cd818216a9970be4689d9e4df3")
WIDTH, TOKENS, HEADS, ROPE = 24, 10, 4, 4


def _lemon(m: Any) -> tuple[Any, torch.Tensor]:
    sizes = {"dim": WIDTH, "n_head": HEADS, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6}
    caches = {"qk_rope_head_dim": ROPE, "v_head_dim": 10, "max_batch_size": B, "max_seq_len": 16}
    yarn = {"beta_fast": 32, "beta_slow": 1, "rope_theta": 10000.0, "rope_factor": 40}
    config = SimpleNamespace(**sizes, **caches, **yarn)
    return m.MLA(config).eval(), m.precompute_rope(config)


@case(LEMON, "model.py", "mla")
def lemon_prompt(m: Any) -> Program:
    """Masked by adding -1e8 to what comes later."""
    layer, angles = _lemon(m)
    return lambda x: layer(x, 0, angles[:TOKENS]), (normal(B, TOKENS, WIDTH),)


@case(LEMON, "model.py", "mla")
def lemon_cached_prompt(m: Any) -> Program:
    """Keys and values are stored expanded, and read back."""
    layer, angles = _lemon(m)
    return lambda x: layer(x, 0, angles[:TOKENS], True), (normal(B, TOKENS, WIDTH),)


@case(LEMON, "model.py")
def lemon_step(m: Any) -> Program:
    """Of earlier tokens expanded keys and values are all there is."""
    layer, angles = _lemon(m)
    return lambda x: layer(x, TOKENS, angles[TOKENS : TOKENS + 1], True), (normal(B, 1, WIDTH),)


@case(STONE, "deepseek/model/attention.py")
def stone_prompt(m: Any) -> Program:
    """Every head has a rotated key of its own."""
    layer = m.MultiHeadLatentAttention(WIDTH, HEADS, 8, 12, 6, ROPE, 10).eval()
    return layer, (normal(B, TOKENS, WIDTH),)


@case(MAYANK, "models/attention.py")
def mayank_prompt(m: Any) -> Program:
    """Every head has a rotated key of its own."""
    sizes = {"n_embd": WIDTH, "n_head": HEADS, "kv_lora_rank": 8, "q_lora_rank": 12, "rope_dim": ROPE}
    config = SimpleNamespace(**sizes, bias=False, dropout=0.0, block_size=16)
    return m.MultiHeadLatentAttention(config).eval(), (normal(B, TOKENS, WIDTH),)


def _rafin(m: Any) -> Any:
    sizes = {"n_embd": WIDTH, "n_head": HEADS, "q_lora_rank": 12, "kv_lora_rank": 8, "block_size": 16}
    config = SimpleNamespace(**sizes, qk_nope_rank=6, qk_rope_rank=ROPE, v_head_dim=10)
    return m.MLA(config, "cpu").eval()


@case(RAFIN, "MLA.py")
def rafin_prompt(m: Any) -> Program:
    """The layer that expands the latent has a bias; its mask is computed and thrown away."""
    return _rafin(m), (normal(B, TOKENS, WIDTH),)


@case(RAFIN, "MLA.py")
def rafin_step(m: Any) -> Program:
    return _rafin(m), (normal(B, 1, WIDTH), normal(B, TOKENS, 8 + ROPE), TOKENS)
