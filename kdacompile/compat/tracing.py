"""What a function is run with to be written down: operators, dispatch modes, nested arguments and results."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_map_only"]
