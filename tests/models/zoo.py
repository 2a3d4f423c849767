"""Every transformers model with linear attention, small and random, with what a backend should find in it.

``CASES[name]`` knows how many linear-attention layers the tiny model has and which pattern each is, builds the model,
and makes the arguments of a prefill (without or with a cache) and of a one-token step over a filled cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.utils import logging as transformers_logging

transformers_logging.set_verbosity_error()

LINEAR, FULL = "linear_attention", "full_attention"
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
GDN: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
# Every expert is chosen: a router is not continuous, and a rounding that flips its choice would drown all other errors.
MOE: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "mlp_layer_types": ["dense", "dense"],
}
MAMBA: dict[str, Any] = {"mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 64}


def _but(shared: dict[str, Any], *without: str, **changes: Any) -> dict[str, Any]:
    """The shared settings without some and with others changed."""
    return {key: value for key, value in (shared | changes).items() if key not in without}


def _kimi_linear() -> PreTrainedConfig:
    return transformers.KimiLinearConfig(
        **BASE, **MLA, linear_num_heads=2, linear_head_dim=32, num_local_experts=4, layer_types=[LINEAR, FULL]
    )


def _glm5_next() -> PreTrainedConfig:
    return transformers.Glm5NextTextConfig(
        **BASE,
        **_but(MLA, q_lora_rank=32, qk_rope_head_dim=0),
        index_topk=4096,
        index_head_dim=32,
        index_n_heads=2,
        index_kpool=16,
        linear_num_heads=2,
        linear_head_dim=32,
        n_routed_experts=4,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        layer_types=[LINEAR, "indexed_attention"],
    )


def _bailing_hybrid() -> PreTrainedConfig:
    return transformers.BailingHybridConfig(
        **BASE,
        **_but(MLA, "q_lora_rank"),
        head_dim=32,
        num_local_experts=4,
        num_mtp_layers=0,
        layer_types=[LINEAR, FULL],
    )


def _qwen3_next() -> PreTrainedConfig:
    return transformers.Qwen3NextConfig(
        **BASE,
        **ATTENTION,
        **GDN,
        **MOE,
        head_dim=32,
        shared_expert_intermediate_size=32,
        layer_types=[LINEAR, FULL],
        mlp_only_layers=[0, 1],
    )


def _qwen3_5() -> PreTrainedConfig:
    return transformers.Qwen3_5TextConfig(**BASE, **ATTENTION, **GDN, head_dim=32, layer_types=[LINEAR, FULL])


def _qwen3_5_moe() -> PreTrainedConfig:
    base = _but(BASE, "intermediate_size")
    return transformers.Qwen3_5MoeTextConfig(
        **base, **ATTENTION, **GDN, **MOE, head_dim=32, shared_expert_intermediate_size=32, layer_types=[LINEAR, FULL]
    )


def _olmo_hybrid() -> PreTrainedConfig:
    return transformers.OlmoHybridConfig(
        **BASE,
        num_attention_heads=2,
        num_key_value_heads=2,
        **_but(GDN, linear_num_key_heads=4),
        layer_types=[LINEAR, FULL],
    )


def _qwen4_exp() -> PreTrainedConfig:
    base = _but(BASE, "intermediate_size")
    return transformers.Qwen4ExpTextConfig(
        **base,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=32,
        indexer_budget=4096,  # everything is selected: rounding cannot flip the choice of tokens
        indexer_compress_ratio=4,
        **ATTENTION,
        **GDN,
        **MOE,
        head_dim=32,
        shared_expert_intermediate_size=32,
        hc_count=2,
        hc_lowrank=16,
        layer_types=[LINEAR, "indexed_attention"],
    )


def _mamba2() -> PreTrainedConfig:
    return transformers.Mamba2Config(
        **_but(BASE, "intermediate_size", "max_position_embeddings"),
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=64,
        expand=2,
    )


def _bamba() -> PreTrainedConfig:
    return transformers.BambaConfig(
        **BASE, **ATTENTION, **MAMBA, mamba_n_heads=4, mamba_n_groups=2, attn_layer_indices=[1]
    )


def _falcon_h1() -> PreTrainedConfig:
    return transformers.FalconH1Config(**BASE, **ATTENTION, **MAMBA, mamba_d_ssm=128, mamba_n_heads=4, mamba_n_groups=1)


def _nemotron_h() -> PreTrainedConfig:
    base = _but(BASE, "num_hidden_layers")
    return transformers.NemotronHConfig(
        **base,
        **ATTENTION,
        head_dim=32,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=64,
    )


def _granitemoehybrid() -> PreTrainedConfig:
    return transformers.GraniteMoeHybridConfig(
        **BASE,
        **ATTENTION,
        **MAMBA,
        mamba_n_heads=4,
        mamba_n_groups=1,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=64,
        layer_types=["mamba", "attention"],
    )


def _zamba2() -> PreTrainedConfig:
    return transformers.Zamba2Config(
        **_but(BASE, num_hidden_layers=3),
        num_attention_heads=2,
        num_key_value_heads=2,
        mamba_d_state=16,
        mamba_ngroups=1,
        n_mamba_heads=4,
        chunk_size=64,
        num_mem_blocks=1,
        adapter_rank=8,
        layers_block_type=["mamba", "hybrid", "mamba"],
    )


def _minimax() -> PreTrainedConfig:
    return transformers.MiniMaxConfig(
        **BASE,
        **ATTENTION,
        head_dim=32,
        block_size=64,
        num_local_experts=2,
        num_experts_per_tok=2,  # as in MOE
        layer_types=[LINEAR, FULL],
    )


@dataclass(frozen=True)
class ModelCase:
    """A tiny model: ``layers`` of its layers are linear attention of ``pattern``."""

    name: str
    pattern: str
    layers: int
    config: Callable[[], PreTrainedConfig]
    model_class: str | None = None  # None: AutoModelForCausalLM
    cache_argument: str = "past_key_values"
    breaks_by_itself: bool = False  # its sparse indexer or its hyper-connections cut the graph under any backend

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
        """A random model in eval mode; parameters that models leave empty or constant are drawn too."""
        model = random_model(self.config(), self.model_class, attention, seed)
        _randomise(model)
        return model.to(dtype).eval()

    def prefill_inputs(self, model: PreTrainedModel, length: int, *, cache: bool, batch: int = 2) -> dict[str, Any]:
        """Keyword arguments of a forward over ``length`` random tokens."""
        kwargs: dict[str, Any] = {"input_ids": self.tokens(length, batch), "use_cache": cache}
        if cache:
            kwargs[self.cache_argument] = self.new_cache(model)
        return kwargs

    def step_inputs(self, model: PreTrainedModel, prompt: int = 9, batch: int = 2) -> dict[str, Any]:
        """Keyword arguments of a one-token forward over a cache that eager filled with ``prompt`` tokens."""
        kwargs = self.prefill_inputs(model, prompt, cache=True, batch=batch)
        with torch.no_grad():
            model(**kwargs)
        step = {"input_ids": self.tokens(1, batch, seed=prompt)}
        if self.name not in {"mamba2"}:
            # generate() passes positions too; models whose first layer has no keys cannot tell them from the cache.
            step["position_ids"] = torch.full((batch, 1), prompt)
        return kwargs | step

    def new_cache(self, model: PreTrainedModel) -> Any:
        if self.name == "minimax":
            return MiniMaxCache()
        return DynamicCache(config=model.config)

    @staticmethod
    def tokens(length: int, batch: int = 2, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 127, (batch, length), generator=generator)


def random_model(config: PreTrainedConfig, model_class: str | None, attention: str, seed: int) -> Any:
    """A model as transformers initialises it; without a class, AutoModelForCausalLM."""
    torch.manual_seed(seed)
    config._attn_implementation = attention
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model_class is None:
            model = transformers.AutoModelForCausalLM.from_config(config)
        else:
            model = getattr(transformers, model_class)(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default loops over nonzero(): a graph break
    return model


def _randomise(model: nn.Module) -> None:
    """Gate parameters come out of initialisation empty or all equal; give each head its own."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if leaf in {"A_log", "dt_bias"}:
                parameter.copy_(0.5 * noise)
            elif leaf == "D":
                parameter.copy_(1 + 0.3 * noise)
            elif not bool(parameter.isfinite().all()):
                parameter.copy_(0.1 * noise)


_ALL = (
    ModelCase("kimi_linear", "kda", 1, _kimi_linear),
    ModelCase("glm5_next", "kda", 1, _glm5_next, model_class="Glm5NextTextModel", breaks_by_itself=True),
    ModelCase("bailing_hybrid", "kda", 1, _bailing_hybrid),
    ModelCase("qwen3_next", "gated_delta_rule", 1, _qwen3_next),
    ModelCase("qwen3_5", "gated_delta_rule", 1, _qwen3_5),
    ModelCase("qwen3_5_moe", "gated_delta_rule", 1, _qwen3_5_moe),
    ModelCase("olmo_hybrid", "gated_delta_rule", 1, _olmo_hybrid),
    ModelCase("qwen4_exp", "gated_delta_rule", 1, _qwen4_exp, breaks_by_itself=True),
    ModelCase("mamba2", "simple_gla", 2, _mamba2, cache_argument="cache_params"),
    ModelCase("bamba", "simple_gla", 1, _bamba),
    ModelCase("falcon_h1", "simple_gla", 2, _falcon_h1),
    ModelCase("nemotron_h", "simple_gla", 2, _nemotron_h),
    ModelCase("granitemoehybrid", "simple_gla", 1, _granitemoehybrid),
    ModelCase("zamba2", "simple_gla", 3, _zamba2),
    ModelCase("minimax", "retention", 1, _minimax),
)
CASES: dict[str, ModelCase] = {case.name: case for case in _ALL}
