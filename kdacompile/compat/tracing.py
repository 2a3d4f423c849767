"""What a function is run with to be written down: operators, dispatch modes, nested arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

__all__ = ["TorchDispatchMode", "map_tensors", "tensors_in", "tree_flatten", "tree_leaves", "tree_map_only"]


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Arguments with each tensor replaced; what is called for every operator, so no pytree, and a shape is a list."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, fn) for item in tree]
        return tuple(items) if isinstance(tree, tuple) and not isinstance(tree, torch.Size) else items
    return {key: map_tensors(item, fn) for key, item in tree.items()} if isinstance(tree, dict) else tree


def tensors_in(tree: Any) -> list[Any]:
    """The tensors among arguments."""
    found: list[Any] = []
    map_tensors(tree, found.append)
    return found
