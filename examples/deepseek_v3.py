"""DeepSeek-V3 from transformers, random weights, real head sizes: prefill and cached greedy decode, both caches.

    python examples/deepseek_v3.py [--quick] [--device cuda]

The model is untouched: ``torch.compile(model, backend="kda")``. What transformers caches is the latent, which it
expands through ``kv_b_proj`` as a whole at every step; the backend absorbs the weights instead. Tokens must equal
eager's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, StaticCache
from transformers.utils import logging as transformers_logging

from kdacompile.report.collect import collecting

if __package__:
    from examples import _common as common
else:
    import _common as common

transformers_logging.set_verbosity_error()


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


def generate(forward: Callable[..., Any], cache: Any, prompt: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy decode: the prefill's logits and the new tokens."""
    logits = forward(input_ids=prompt, past_key_values=cache, use_cache=True).logits
    tokens = [logits[:, -1:].argmax(-1)]
    for step in range(steps):
        position = torch.full_like(tokens[-1], prompt.shape[1] + step)
        out = forward(input_ids=tokens[-1], past_key_values=cache, position_ids=position, use_cache=True)
        tokens.append(out.logits[:, -1:].argmax(-1))
    return logits, torch.cat(tokens, dim=1)


def check(kind: str, model: DeepseekV3ForCausalLM, args: argparse.Namespace, prompt: Tensor, steps: int) -> list[str]:
    """Generate with one kind of cache under eager and kda; what differs."""
    room = prompt.shape[1] + steps + 1

    def cache() -> Any:
        return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, room)

    torch.compiler.reset()
    compiled = common.compiled(model, args)
    want, seconds = common.timed(lambda: generate(model, cache(), prompt, steps), prompt.device)
    with collecting() as report:
        generate(compiled, cache(), prompt, steps)
    have, fast = common.timed(lambda: generate(compiled, cache(), prompt, steps), prompt.device)
    error = common.relative_error(have[0], want[0])
    print(f"{kind} cache: eager {seconds:.2f} s, kda {fast:.2f} s, error of the prefill's logits {error:.1e}")
    common.print_matches(report)
    layers = model.config.num_hidden_layers
    found: list[str] = []
    for mode in ("sequence", "step"):
        matched = sum((match.pattern, match.mode) == ("mla", mode) for match in report.matches)
        if matched < layers:
            found.append(f"{kind} cache: {matched} of {layers} layers matched as mla ({mode})")
    if error > 1e-5:
        found.append(f"{kind} cache: logits differ from eager's by {error:.1e}")
    if not torch.equal(have[1], want[1]):
        found.append(f"{kind} cache: the generated tokens differ from eager's")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config(heads=2 if args.quick else 16)).to(args.device).eval()
    length, steps = (24, 3) if args.quick else (256, 32)
    prompt = torch.randint(3, model.config.vocab_size, (1, length), device=args.device)
    with torch.no_grad():
        found = [problem for kind in ("dynamic", "static") for problem in check(kind, model, args, prompt, steps)]
    return common.verdict(found)


if __name__ == "__main__":
    raise SystemExit(main())
