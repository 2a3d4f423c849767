"""Comparing what two runs of the same function left behind: results, and arguments they may have overwritten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor in nested results, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected; infinite where shapes or non-finite values disagree."""
    if actual.shape != expected.shape:
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    if not torch.equal(actual[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        return float("inf")
    if not bool(actual[finite].isfinite().all()):
        return float("inf")
    difference, size = (actual - expected)[finite].norm(), expected[finite].norm()
    if float(difference) == 0.0:
        return 0.0
    return float(difference / size) if float(size) else float("inf")


def worst_error(actual: Any, expected: Any) -> float:
    """The largest relative error over all tensors of two results of the same structure."""
    left, right = tensors(actual), tensors(expected)
    if len(left) != len(right):
        return float("inf")
    return max((relative_error(x, y) for x, y in zip(left, right, strict=True)), default=0.0)


def copies(arguments: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Fresh leaves with the same values, strides and gradients wanted."""
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in arguments)


def cache_tensors(cache: Any) -> list[Tensor]:
    """All states a transformers cache holds, whatever its layers are."""
    held: list[Tensor] = tensors(getattr(cache, "linear_cache", []))
    for layer in cache.layers:
        for attribute in ("keys", "values", "conv_states", "recurrent_states"):
            held += tensors(getattr(layer, attribute, None))
    return held
