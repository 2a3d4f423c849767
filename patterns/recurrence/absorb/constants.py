"""Numbers a graph holds: Python's own, and tensors of one element that no input reaches."""

from __future__ import annotations

import torch

from kdacompile.graph.ir import Value, ancestors
from kdacompile.patterns.engine.evaluate import EvaluationError, Region
from kdacompile.patterns.engine.lanes import LaneError


def number(item: object) -> float | None:
    """The number an operator's argument stands for, None if it is no constant number."""
    if isinstance(item, bool):
        return None
    if isinstance(item, (int, float)):
        return float(item)
    if not isinstance(item, Value) or not item.const or torch.Size(item.shape).numel() != 1:
        return None
    if item.payload is not None:
        return float(item.payload)
    try:
        return float(Region(list(ancestors([item], lambda _: False)), [], [item])([])[0])
    except (EvaluationError, LaneError):
        return None
