"""Calls that the costs of ops were measured of, on a CPU (``lowering/cpu/attention_cost.py``, ``step_cost.py``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kdacompile import compat
from kdacompile.ops.dtensor import holds_dtensors
from kdacompile.patterns.engine.placement import Placement


def is_as_measured(inputs: Mapping[str, Placement]) -> bool:
    """Whether what takes these roles is of fixed sizes, in fp32 and on a CPU, and holds no DTensor."""
    examples = [compat.example_value(placement.value.node) for placement in inputs.values()]
    q = compat.example_value(inputs["q"].value.node)
    fixed = all(isinstance(size, int) for x in examples for size in x.shape)
    return fixed and q.dtype is torch.float32 and q.device.type == "cpu" and not holds_dtensors(examples)
