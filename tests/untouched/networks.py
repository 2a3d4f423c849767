"""Whole networks without linear attention: a residual convolutional one, a plain transformer, transformers' Qwen2.

``NETWORKS[name](compile)`` runs the network compiled by ``compile`` and returns every tensor it gave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compare import cache_tensors

Compile = Callable[[Any], Callable[..., Any]]
DECODED = 4


class Block(nn.Module):
    """A residual block of two convolutions, the first one halving the image."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.shortcut = nn.Conv2d(inside, out, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """A small ResNet: stem, blocks, global average, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8, 16), Block(16, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Encoder(nn.Module):
    """An embedding, torch's own transformer layers under a causal mask, and a projection to the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


def residual_network(compile_: Compile) -> list[Tensor]:
    torch.manual_seed(0)
    model = ResidualNetwork().eval()
    with torch.no_grad():
        return [compile_(model)(torch.randn(2, 3, 16, 16))]


def residual_network_training(compile_: Compile) -> list[Tensor]:
    torch.manual_seed(0)
    model = ResidualNetwork().train()
    loss = F.cross_entropy(compile_(model)(torch.randn(4, 3, 16, 16)), torch.arange(4))
    loss.backward()
    return [loss.detach(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]


def encoder_training(compile_: Compile) -> list[Tensor]:
    torch.manual_seed(0)
    model = Encoder().train()
    tokens = torch.randint(50, (2, 12))
    loss = F.cross_entropy(compile_(model)(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def qwen2(compile_: Compile, attention: str = "sdpa") -> list[Tensor]:
    """Prefill and greedy cached decode: logits and cache after each, tokens at the end."""
    from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    config._attn_implementation = attention
    model = Qwen2ForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    run = compile_(model)
    token, results = torch.randint(64, (2, 11)), list[Tensor]()
    with torch.no_grad():
        for _ in range(1 + DECODED):
            logits = run(input_ids=token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1)
            results += [logits, token, *(x.clone() for x in cache_tensors(cache))]
    return results


def qwen2_eager_attention(compile_: Compile) -> list[Tensor]:
    return qwen2(compile_, "eager")


NETWORKS: dict[str, Callable[[Compile], list[Tensor]]] = {
    "residual_network": residual_network,
    "residual_network_training": residual_network_training,
    "encoder_training": encoder_training,
    "qwen2": qwen2,
    "qwen2_eager_attention": qwen2_eager_attention,
}
