"""Process groups by their names, as operators of compiled graphs hold them; PyTorch's region of context parallelism."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["gather_into", "group_of", "order_of_region", "scatter_sum_into"]

# torch 2.13 renamed them, and warns at each call of the older names.
_NEW = hasattr(dist, "all_gather_single")
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single" if _NEW else "all_gather_into_tensor")
scatter_sum_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single" if _NEW else "reduce_scatter_tensor")


def group_of(name: str) -> ProcessGroup:
    """The process group of a ``ProcessGroup.group_name``; torch's own functional collectives look it up so."""
    return cast(Any, _resolve_process_group)(name)


def order_of_region() -> str | None:
    """How the ``context_parallel`` of torch.distributed.tensor.experimental that we are in has cut its buffers.

    "zigzag" or "contiguous"; None outside of one. It puts a function of its own in the place of SDPA.
    """
    region: Any = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if region is None or F.scaled_dot_product_attention not in region._replaced_functions:
        return None
    return "zigzag" if region._cp_options.enable_load_balance else "contiguous"
