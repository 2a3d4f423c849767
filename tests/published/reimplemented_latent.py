"""MLA written anew by single authors."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.published.draw import B, H, normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

DEV_X = Repository("Dev-X25874/Kimi-Linear-Attention", "518d0ea390a8496440bc10d687e6aeedc00fdaca")
OPEN_KIMI = Repository("kyegomez/Open-Kimi", "f17939c8fb1708a508f38ec4c8b60ff3cc59caa2")
SHREYANSH = Repository("shreyansh26/multihead-latent-attention", "ef8eac6125011c047a72585e93e9a344743863ab")
NEMESIS = Repository("Nemesis-12/multihead-latent-attention", "5ef54ccf9bab10fd2056b7afd0fc7aef2f45eb52", ("mla",))
WIDTH, RANK, NOPE, ROPE, PROMPT, CACHED = 24, 16, 12, 8, 9, 12


def _causal(tokens: int) -> torch.Tensor:
    return torch.full((tokens, tokens), -torch.inf).triu(1)


@case(DEV_X, "kimi_linear/mla.py", "mla")
def dev_x_prompt(m: Any) -> Program:
    layer = m.MultiHeadLatentAttention(WIDTH, H, RANK, 20)
    return layer, (normal(B, PROMPT, WIDTH), _causal(PROMPT))


@case(DEV_X, "kimi_linear/mla.py", "mla")
def dev_x_cached_step(m: Any) -> Program:
    layer = m.MultiHeadLatentAttention(WIDTH, H, RANK, 0)
    return lambda x, past: layer(x, None, True, (past,)), (normal(B, 1, WIDTH), normal(B, CACHED, RANK))


def _open_kimi(m: Any) -> Any:
    sizes = {"q_lora_rank": 20, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
    layer = m.MLA(WIDTH, H, **sizes, v_head_dim=10, max_seq_len=32, max_batch_size=B)
    layer.kv_cache.normal_()
    layer.pe_cache.normal_()
    return layer


@case(OPEN_KIMI, "open_kimi/mla.py", "mla")
def open_kimi_prompt(m: Any) -> Program:
    return _open_kimi(m), (normal(B, PROMPT, WIDTH), 0, _causal(PROMPT))


@case(OPEN_KIMI, "open_kimi/mla.py", "mla")
def open_kimi_step(m: Any) -> Program:
    return _open_kimi(m), (normal(B, 1, WIDTH), CACHED)


def _shreyansh(m: Any, name: str) -> tuple[Any, Any]:
    sizes = {"dim": WIDTH, "q_lora_rank": 20, "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE}
    sizes |= {"v_head_dim": 10, "num_key_value_heads": H, "num_attention_heads": H, "max_seq_len": 32}
    config = SimpleNamespace(**sizes)
    return getattr(m, name)(config, dtype=torch.float32), config


@case(SHREYANSH, "mla.py", "mla")
def shreyansh_prompt(m: Any) -> Program:
    return partial(_shreyansh(m, "MLA")[0], is_causal=True), (normal(B, PROMPT, WIDTH),)


@case(SHREYANSH, "mla.py", "mla")
def shreyansh_fused_prompt(m: Any) -> Program:
    return partial(_shreyansh(m, "MLAFused")[0], is_causal=True), (normal(B, PROMPT, WIDTH),)


@case(SHREYANSH, "mla.py", "mla")
def shreyansh_absorbed_prompt(m: Any) -> Program:
    """Both products of weights are parameters of their own: one head of keys and values, the latent."""
    return partial(_shreyansh(m, "MLAFusedAbsorbed")[0], is_causal=True), (normal(B, PROMPT, WIDTH),)


class _Rows:
    """A cache that is handed the new rows and returns all of them."""

    def __init__(self, held: torch.Tensor, dim: int) -> None:
        self.held, self.dim = held, dim

    def update(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.held, rows], self.dim)


@case(SHREYANSH, "mla.py", "mla")
def shreyansh_step(m: Any) -> Program:
    layer, _ = _shreyansh(m, "MLA")

    def step(x: Any, latent: Any, rotated: Any) -> Any:
        return layer(x, SimpleNamespace(compressed_kv=_Rows(latent, 1), k_rope=_Rows(rotated, 2)))

    return step, (normal(B, 1, WIDTH), normal(B, CACHED, RANK), normal(B, 1, CACHED, ROPE))


@case(NEMESIS, "mla/attention.py")
def nemesis_rotated_keys(m: Any) -> Program:
    """Rotates the keys of every head, which are then no function of the latent alone."""
    return m.MultiHeadLatentAttention(WIDTH, WIDTH, H, 32, latent_dim=RANK).eval(), (normal(B, PROMPT, WIDTH),)
