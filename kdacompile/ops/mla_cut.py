"""``kdacompile::mla_schedule``: how the caches of requests are cut among programs, once for all layers of a step.

The cut depends on the lengths, on the rows of a request (queries times heads) and on the device, not on the layer. An
``mla`` that is given none makes its own. Where the kernels of a device make no use of one it has no entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.lowering.hopper import decode_schedule, schedule_entries, why_not_hopper
from kdacompile.lowering.recorded import Memory

NAME = "mla_schedule"
SCHEMA = "(Tensor lengths, *, SymInt rows, SymInt width) -> Tensor"
MOST = 4096
"""Requests: one program cuts them all."""

_memory = Memory()


def composite(lengths: Tensor, *, rows: int, width: int) -> Tensor:
    """No entries: what runs elsewhere reads the lengths."""
    return lengths.new_empty(0, dtype=torch.int32)


def fused(lengths: Tensor, *, rows: int, width: int) -> Tensor:
    """On CUDA devices."""
    if not _entries(lengths, rows):
        return composite(lengths, rows=rows, width=width)
    (table,) = _memory.run(
        (rows, width), (lengths,), lambda scratch: (decode_schedule(lengths, rows, width, scratch),)
    )  # fmt: skip
    return table


def fake(lengths: Tensor, *, rows: int, width: int) -> Tensor:
    return lengths.new_empty(_entries(lengths, rows), dtype=torch.int32)


def _entries(lengths: Tensor, rows: int) -> int:
    requests = lengths.shape[0]
    if why_not_hopper(lengths) or requests < 2 or requests > MOST:
        return 0
    return schedule_entries(requests, rows, lengths.device)
