"""Process groups by their names, as operators of compiled graphs hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["gather_into", "group_of"]

# torch 2.13 renamed it, and warns at each call of the older name.
_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
gather_into: Callable[..., Any] = getattr(dist, _GATHER)


def group_of(name: str) -> ProcessGroup:
    """The process group of a ``ProcessGroup.group_name``; torch's own functional collectives look it up so."""
    return cast(Any, _resolve_process_group)(name)
