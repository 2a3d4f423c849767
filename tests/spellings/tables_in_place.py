"""Decay tables made in the forward: a number to the power of whole positions, filled and reshaped in place."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.spellings.near_misses import near_miss
from tests.spellings.registry import spelling

FP32 = (torch.float32,)
"""A number of Python to the power of whole positions is float32, whatever q is."""
GAMMA = 0.9
GAMMAS = (0.875, 0.9375, 0.96875)


@spelling("retention", "q k v", scale=1.0, layout="bhtd", lengths=(7, 20), dtypes=FP32, constant_decay=(GAMMA,) * 3)
def retention_power_of_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, m = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(q.shape[2]).unsqueeze(0)
    mask = GAMMA ** (n - m) * (n >= m).float()
    mask[mask != mask] = 0
    return ((q @ k.mT) * mask) @ v


@spelling(
    "retention",
    "q k v state",
    scale=1.0,
    layout="bhtd",
    lengths=(6,),
    dtypes=FP32,
    constant_decay=(GAMMA,) * 3,
    returns_state=True,
)
def retention_chunk_of_a_number(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The mask's last row decays the keys as well: what fills it is read by both results."""
    length = q.shape[2]
    n, m = torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)
    mask = GAMMA ** (n - m) * (n >= m).float()
    mask[mask != mask] = 0
    left = k.mT @ (v * mask[-1].view(1, 1, length, 1)) + GAMMA**length * state
    decay = torch.zeros(length, 1)
    for t in range(length):
        decay[t] = GAMMA ** (t + 1)
    return ((q @ k.mT) * mask) @ v + (q @ state) * decay, left


@spelling("retention", "q k v", scale=1.0, layout="bhtd", lengths=(7, 20), constant_decay=GAMMAS)
def retention_positions_unsqueezed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(q.shape[2], dtype=q.dtype).unsqueeze_(-1)
    columns = torch.arange(q.shape[2], dtype=q.dtype).unsqueeze_(0)
    mask = torch.tensor(GAMMAS).view(-1, 1, 1) ** (rows - columns).abs()
    future = torch.ones_like(mask, dtype=torch.bool).triu_(1)
    return ((q @ k.mT) * mask.masked_fill_(future, 0)) @ v


@near_miss("retention", "q k v", scale=1.0, layout="bhtd", constant_decay=(GAMMA,) * 3)
def retention_of_rounded_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Positions are divided as whole numbers: the decay stands still for two tokens."""
    n, m = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(q.shape[2]).unsqueeze(0)
    mask = GAMMA ** ((n - m) // 2) * (n >= m).float()
    mask[mask != mask] = 0
    return ((q @ k.mT) * mask) @ v


@near_miss("retention", "q k v", scale=1.0, layout="bhtd", constant_decay=GAMMAS)
def retention_unsqueezed_along_the_other_way(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The distance is that to the future, of which the mask lets nothing but the token itself through."""
    rows = torch.arange(q.shape[2], dtype=q.dtype).unsqueeze_(0)
    columns = torch.arange(q.shape[2], dtype=q.dtype).unsqueeze_(-1)
    mask = torch.tensor(GAMMAS).view(-1, 1, 1) ** (rows - columns)
    return ((q @ k.mT) * mask.tril()) @ v
