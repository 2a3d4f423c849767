"""Kimi Linear from transformers, random weights, real head sizes: prefill and cached greedy decode.

    python examples/kimi_linear.py [--quick] [--device cuda]

The model is untouched: ``torch.compile(model, backend="kda")``. Tokens must equal eager's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import KimiLinearConfig, KimiLinearForCausalLM

if __package__:
    from examples import _common as common
    from examples import _generation as generation
else:
    import _common as common
    import _generation as generation


def config(heads: int) -> KimiLinearConfig:
    """Heads of 128 channels, latent attention of rank 512 with 128 + 64 channels: only fewer of everything."""
    return KimiLinearConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_num_heads=heads,
        linear_head_dim=128,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
        num_local_experts=4,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    torch.manual_seed(0)
    model = KimiLinearForCausalLM(config(heads=2 if args.quick else 4))
    return generation.compare(model, args, pattern="kda", layers=1, length=70 if args.quick else 256)


if __name__ == "__main__":
    raise SystemExit(main())
