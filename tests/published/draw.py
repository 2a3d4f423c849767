"""Random arguments of cases. Keys have about unit norm, so that the delta rule stays bounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

B, T, H, K, V = 2, 64, 3, 8, 12


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def keys(*shape: int) -> Tensor:
    return F.normalize(torch.randn(shape), dim=-1)


def unit(*shape: int) -> Tensor:
    """Numbers between 0 and 1: write gates, forget factors."""
    return torch.rand(shape)


def gates(*shape: int, strongest: float = -0.5) -> Tensor:
    """Logarithms of decay factors."""
    return torch.rand(shape) * strongest


def bthd(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the tokens in front of the heads."""
    return normal(B, tokens, H, K), keys(B, tokens, H, K), normal(B, tokens, H, V)


def bhtd(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with the heads in front of the tokens."""
    return normal(B, H, tokens, K), keys(B, H, tokens, K), normal(B, H, tokens, V)
