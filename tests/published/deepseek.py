"""DeepSeek's own inference code: V3 with expanded and latent caches, V3.2 with its indexer's mask; whole models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.published.draw import normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

V3 = Repository("deepseek-ai/DeepSeek-V3", "9b4e9788e4a3a731f7567338ed15d3ec549ce03b", roots=("inference",))
V32 = Repository("deepseek-ai/DeepSeek-V3.2-Exp", "3b99a5350d260b7c2a357e82362305509e2d0724", roots=("inference",))
PATH = "inference/model.py"
BATCH, PROMPT = 2, 7
SMALL: dict[str, Any] = {
    "max_batch_size": BATCH,
    "max_seq_len": 32,
    "vocab_size": 64,
    "dim": 32,
    "inter_dim": 48,
    "moe_inter_dim": 16,
    "n_layers": 2,
    "n_dense_layers": 2,
    "n_heads": 4,
    "n_routed_experts": 4,
    "n_activated_experts": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


class Chosen(nn.Module):
    """In the place of V3.2's indexer, whose kernels take a GPU: any scores, of which the best are chosen."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(args.dim, args.max_seq_len))

    def forward(self, x: Tensor, qr: Tensor, start: int, freqs: Tensor, mask: Tensor | None) -> Tensor:
        end = start + x.shape[1]
        scores = x @ self.weight[:, :end]
        return (scores if mask is None else scores + mask).topk(min(4, end), dim=-1)[1]


def draw(model: nn.Module) -> nn.Module:
    """Parameters are left empty, and caches zero."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "freqs" not in name:
                tensor.copy_(torch.randn_like(tensor) * 0.2 + (1.0 if "norm" in name else 0.0))
    return model


def layer(m: Any, tokens: int, start: int, how: str = "absorb", **changes: Any) -> Program:
    """One attention layer at a position of its caches."""
    m.Linear.dtype, m.attn_impl = torch.float32, how
    args = m.ModelArgs(**SMALL, **changes)
    attention = draw(m.MLA(args))
    freqs = m.precompute_freqs_cis(args)[start : start + tokens]
    mask = torch.full((tokens, tokens), float("-inf")).triu_(1) if tokens > 1 else None
    return lambda x: attention(x, start, freqs, mask), (normal(BATCH, tokens, args.dim),)


def whole(m: Any, tokens: int, start: int, how: str = "absorb") -> Program:
    m.attn_impl = how
    dtype = torch.get_default_dtype()
    model = draw(m.Transformer(m.ModelArgs(**SMALL))).float()
    torch.set_default_dtype(dtype)
    return lambda ids: model(ids, start), (torch.randint(0, 64, (BATCH, tokens)),)


@case(V3, PATH, "mla")
def latent_prompt(m: Any) -> Program:
    return layer(m, PROMPT, 0)


@case(V3, PATH, "mla")
def latent_step(m: Any) -> Program:
    return layer(m, 1, PROMPT)


@case(V3, PATH, "mla")
def expanded_prompt(m: Any) -> Program:
    return layer(m, PROMPT, 0, "naive")


@case(V3, PATH)
def expanded_step(m: Any) -> Program:
    """Keys and values of every head are kept: nothing is left of the latent but one token."""
    return layer(m, 1, PROMPT, "naive")


@case(V3, PATH, "mla", "mla")
def model_prompt(m: Any) -> Program:
    return whole(m, PROMPT, 0)


@case(V3, PATH, "mla", "mla")
def model_step(m: Any) -> Program:
    return whole(m, 1, PROMPT)


@case(V3, PATH, "mla", "mla")
def model_prompt_expanded(m: Any) -> Program:
    return whole(m, PROMPT, 0, "naive")


@case(V32, PATH, "mla")
def indexed_prompt(m: Any) -> Program:
    m.Indexer = Chosen
    return layer(m, PROMPT, 0)


@case(V32, PATH, "mla")
def indexed_step(m: Any) -> Program:
    m.Indexer = Chosen
    return layer(m, 1, PROMPT)


@case(V32, PATH, "mla", "mla")
def indexed_model_prompt(m: Any) -> Program:
    m.Indexer = Chosen
    return whole(m, PROMPT, 0)


@case(V32, PATH, "mla", "mla")
def indexed_model_step(m: Any) -> Program:
    m.Indexer = Chosen
    return whole(m, 1, PROMPT)
