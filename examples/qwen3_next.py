"""Qwen3-Next from transformers, random weights, real head sizes: prefill and cached greedy decode.

    python examples/qwen3_next.py [--quick] [--device cuda]

Gated DeltaNet layers with two value heads to a key head, between them gated full attention. Tokens must equal eager's.
Under torch 2.11 a CPU kernel that Inductor alone makes of this model ends the process; kda's table stands by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

if __package__:
    from examples import _common as common
    from examples import _generation as generation
else:
    import _common as common
    import _generation as generation


def config(key_heads: int, layer_types: list[str]) -> Qwen3NextConfig:
    """Linear heads of 128 channels, attention heads of 256: only fewer of everything, and no experts."""
    return Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=len(layer_types),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=2 * key_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=layer_types,
        mlp_only_layers=list(range(len(layer_types))),
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    torch.manual_seed(0)
    linear = 1 if args.quick else 3
    layer_types = ["linear_attention"] * linear + ["full_attention"]
    model = Qwen3NextForCausalLM(config(1 if args.quick else 4, layer_types))
    length = 70 if args.quick else 256
    return generation.compare(model, args, pattern="gated_delta_rule", layers=linear, length=length)


if __name__ == "__main__":
    raise SystemExit(main())
