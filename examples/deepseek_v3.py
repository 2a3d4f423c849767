"""DeepSeek-V3 from transformers, random weights, real head sizes: prefill and cached greedy decode, both caches.

    python examples/deepseek_v3.py [--quick] [--device cuda]

The model is untouched: ``torch.compile(model, backend="kda")``. What transformers caches is the latent, which it
expands through ``kv_b_proj`` as a whole at every step; the backend absorbs the weights instead. Tokens must equal
eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, StaticCache

if __package__:
    from examples import _common as common
    from examples import _generation as generation
else:
    import _common as common
    import _generation as generation


def config(heads: int) -> DeepseekV3Config:
    """A latent of 512 channels, heads of 128 + 64 and 128: only fewer of everything."""
    extra: dict[str, Any] = {"mlp_layer_types": ["dense", "dense"], "attn_implementation": "sdpa"}
    return DeepseekV3Config(
        **extra,
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config(heads=2 if args.quick else 16))
    layers, length = model.config.num_hidden_layers, 24 if args.quick else 256
    room = length + generation.steps_of(args) + 1
    caches: dict[str, Callable[[], Any]] = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(model.config, room),
    }
    status = 0
    for kind, make_cache in caches.items():
        common.say(f"with a {kind} cache")
        status |= generation.compare(model, args, "mla", layers, length, make_cache)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
