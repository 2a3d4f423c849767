"""The seventeen transformers models with latent attention, small and random, with what a backend should find in them.

``CASES[name]`` knows how many of the tiny model's attentions are MLA, builds the model for an attention implementation,
and makes the arguments of a prefill or of a one-token step over a filled cache, dynamic or static.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.utils import logging as transformers_logging

from tests.models.zoo import random_model

transformers_logging.set_verbosity_error()

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DENSE = {"mlp_layer_types": ["dense", "dense"]}
LINEAR, FULL = "linear_attention", "full_attention"
# Everything is selected: rounding cannot flip the choice of tokens.
INDEXER: dict[str, Any] = {"index_topk": 512, "index_head_dim": 16, "index_n_heads": 2}


@dataclass(frozen=True)
class MlaModel:
    """A tiny model: ``attentions`` of its attentions are MLA; ``linear`` names the pattern of its other layer."""

    name: str
    config_class: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    attentions: int = 2
    linear: str = ""
    model_class: str | None = None  # None: AutoModelForCausalLM
    without: tuple[str, ...] = ()  # shared settings this config does not know
    eager_only: bool = False  # attention sinks rule the other implementations out
    static_cache: bool = True  # the model has a static cache
    breaks_by_itself: bool = False  # its indexer or its experts cut the graph under any backend

    def build(self, attention: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
        given = {k: v for k, v in (BASE | MLA | MOE | self.settings).items() if k not in self.without}
        config: PreTrainedConfig = getattr(transformers, self.config_class)(**given)
        model = random_model(config, self.model_class, attention, seed)
        _randomise(model)
        return model.to(dtype).eval()

    def implementations(self) -> tuple[str, ...]:
        return ("eager",) if self.eager_only else ("eager", "sdpa")

    def caches(self) -> tuple[str, ...]:
        return ("dynamic", "static") if self.static_cache else ("dynamic",)

    def new_cache(self, model: PreTrainedModel, kind: str, length: int = 48) -> Any:
        return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, length)

    def prefill(self, model: PreTrainedModel, length: int, cache: str, batch: int = 2) -> dict[str, Any]:
        return {
            "input_ids": tokens(length, batch),
            "past_key_values": self.new_cache(model, cache, max(48, length)),
            "use_cache": True,
        }

    def step(self, model: PreTrainedModel, cache: str, prompt: int = 9, batch: int = 2) -> dict[str, Any]:
        """A one-token forward over a cache that eager filled with ``prompt`` tokens."""
        kwargs = self.prefill(model, prompt, cache, batch)
        with torch.no_grad():
            model(**kwargs)
        return kwargs | {"input_ids": tokens(1, batch, seed=prompt), "position_ids": torch.full((batch, 1), prompt)}


def tokens(length: int, batch: int = 2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 127, (batch, length), generator=generator)


def _randomise(model: nn.Module) -> None:
    """Parameters that come out of initialisation empty are drawn."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if not bool(parameter.isfinite().all()):
                parameter.copy_(noise)


_ALL = (
    MlaModel("axk1", "AXK1Config"),
    MlaModel("axk2", "AXK2Config", DENSE | INDEXER | {"gated_norm_rank": 4, "head_dim": 8}),
    MlaModel("bailing_hybrid", "BailingHybridConfig", {"num_local_experts": 4, "num_mtp_layers": 0,
             "layer_types": [LINEAR, FULL]} | DENSE, attentions=1, linear="kda", static_cache=False,
             without=("q_lora_rank",)),
    MlaModel("deepseek_v2", "DeepseekV2Config", {"first_k_dense_replace": 2}),
    MlaModel("deepseek_v3", "DeepseekV3Config", DENSE),
    MlaModel("deepseek_v32", "DeepseekV32Config", DENSE | INDEXER | {"head_dim": 8}),
    MlaModel("dots3_note", "Dots3NoteTextConfig", DENSE | INDEXER),
    MlaModel("glm4_moe_lite", "Glm4MoeLiteConfig", DENSE),
    MlaModel("glm5_next", "Glm5NextTextConfig", DENSE | INDEXER | {"qk_rope_head_dim": 0, "index_kpool": 4,
             "linear_num_heads": 2, "linear_head_dim": 32, "hc_mult": 2, "hc_sinkhorn_iters": 2,
             "layer_types": [LINEAR, "indexed_attention"]}, attentions=1, linear="kda",
             model_class="Glm5NextTextModel", static_cache=False),
    MlaModel("glm_moe_dsa", "GlmMoeDsaConfig", DENSE | INDEXER),
    MlaModel("hy_v4", "HYV4Config", DENSE | INDEXER | {"hc_mult": 2, "head_dim": 20}, eager_only=True),
    MlaModel("kimi_linear", "KimiLinearConfig", DENSE | {"linear_num_heads": 2, "linear_head_dim": 32,
             "num_local_experts": 4, "layer_types": [LINEAR, FULL]}, attentions=1, linear="kda", static_cache=False),
    MlaModel("longcat_flash", "LongcatFlashConfig", {"num_layers": 1, "ffn_hidden_size": 64, "moe_topk": 2,
             "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "head_dim": 8},
             breaks_by_itself=True, without=("num_hidden_layers", "intermediate_size")),
    MlaModel("minicpm3", "MiniCPM3Config", without=tuple(MOE)),
    MlaModel("mistral4", "Mistral4Config", {"first_k_dense_replace": 2}, model_class="Mistral4ForCausalLM"),
    MlaModel("mistral_large4", "MistralLarge4TextConfig", DENSE | INDEXER | {"head_dim": 8},
             model_class="MistralLarge4TextModel", without=("q_lora_rank",)),
    MlaModel("youtu", "YoutuConfig", without=tuple(MOE)),
)  # fmt: skip
CASES: dict[str, MlaModel] = {case.name: case for case in _ALL}
