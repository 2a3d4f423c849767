"""One operator of the functional graph made ready to run on the CPU, in float64 or in the model's dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdacompile import compat
from kdacompile.graph.ir import Op, Value, map_values
from kdacompile.patterns.engine.reduced import SIZED, EvaluationError
from kdacompile.patterns.engine.rounded import float64
from kdacompile.patterns.engine.vocabulary import ELEMENTWISE

Step = Callable[[list[Tensor]], list[Tensor]]
"""One operator made ready for operands of known sizes."""

_FILLERS = {"zeros": 0.0, "ones": 1.0, "zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0}


def call(op: Op, *, own: bool = False) -> Step:
    """The operator itself; devices are the CPU and floating dtypes float64, or with ``own`` the model's."""
    if op.name in _FILLERS or op.name in ("full", "full_like", "new_full", "empty", "empty_like", "new_empty"):
        filled = _filled(op, op.out.dtype if own else float64(op.out.dtype))
        return lambda _: [filled]
    kwargs = {
        name: item
        for name, item in op.kwargs.items()
        if name not in ("device", "layout", "pin_memory", "memory_format")
    }
    if own:
        pass
    elif isinstance(kwargs.get("dtype"), torch.dtype):
        kwargs["dtype"] = float64(kwargs["dtype"])
    elif op.name in ("arange", "eye", "linspace", "scalar_tensor") and op.out.dtype.is_floating_point:
        kwargs["dtype"] = torch.float64
    if op.name in SIZED:
        sizes = op.args[1]
        return lambda tensors: [tensors[0].reshape(sizes)]

    # Of whole numbers torch makes what the default dtype holds (0.9 ** n), unless they come as float64.
    counted = (
        not own and "dtype" not in kwargs and op.out.dtype.is_floating_point and op.name in ELEMENTWISE - {"where"}
    )
    counted = counted and not any(value.dtype.is_floating_point for value in op.reads)

    # The softmax's third argument asks for a dtype that float64 is not rounded to.
    given = (*op.args[:2], False) if op.name == "_softmax" and not own else op.args
    if op.name == "pow" and isinstance(op.args[0], float) and op.out.dtype in (torch.float16, torch.bfloat16):
        given = (torch.tensor(op.args[0], dtype=op.out.dtype).item(), *op.args[1:])  # torch rounds the base first

    def run(tensors: list[Tensor]) -> list[Tensor]:
        queue = iter([tensor.double() for tensor in tensors] if counted else tensors)
        args = [next(queue) if isinstance(x, Value) else map_values(x, lambda _: next(queue)) for x in given]
        named = map_values(kwargs, lambda _: next(queue)) if kwargs else kwargs
        try:
            result = op.target(*args, **named)
        except compat.RUN_ERRORS as error:
            raise EvaluationError(f"{op.name}: {error}") from error
        return [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]

    return run


def _filled(op: Op, dtype: torch.dtype) -> Tensor:
    """A constant tensor without its memory: one element, expanded. ``empty`` is NaN, so that a read of it shows."""
    if op.name in _FILLERS:
        fill: Any = _FILLERS[op.name]
    elif op.name.endswith("empty") or op.name == "empty_like":
        fill = math.nan if dtype.is_floating_point else 0
    else:
        fill = op.args[1] if op.name != "new_full" else op.args[2]
        if isinstance(fill, Value):
            raise EvaluationError("a tensor filled with a computed value")
    return torch.full((), fill, dtype=dtype).expand(op.out.shape)
