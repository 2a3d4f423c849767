"""Process groups by their names, as operators of compiled graphs hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["gather_into", "group_of", "scatter_sum_into"]

# torch 2.13 renamed them, and warns at each call of the older names.
_NEW = hasattr(dist, "all_gather_single")
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single" if _NEW else "all_gather_into_tensor")
scatter_sum_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single" if _NEW else "reduce_scatter_tensor")


def group_of(name: str) -> ProcessGroup:
    """The process group of a ``ProcessGroup.group_name``; torch's own functional collectives look it up so."""
    return cast(Any, _resolve_process_group)(name)
