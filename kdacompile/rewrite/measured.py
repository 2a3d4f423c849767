"""Calls that the costs of ops were measured of, on a CPU (``lowering/cpu/attention_cost.py``, ``recurrence_cost.py``,
``step_cost.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from kdacompile import compat
from kdacompile.graph.ir import Op
from kdacompile.ops.dtensor import holds_dtensors
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, DATA_MOVEMENT, MAKERS, SOLVES

DTYPES = (torch.float32, torch.bfloat16)


def is_as_measured(inputs: Mapping[str, Placement], *, batch: bool = False) -> bool:
    """Whether what takes these roles is of fixed sizes (``batch``: but for that), in fp32 or bf16 and on a CPU, and
    holds no DTensor.
    """
    examples = [compat.example_value(placement.value.node) for placement in inputs.values()]
    q = compat.example_value(inputs["q"].value.node)
    still_open = compat.free_symbols(examples) - (compat.free_symbols(open_batch(inputs)) if batch else set())
    return not still_open and q.dtype in DTYPES and q.device.type == "cpu" and not holds_dtensors(examples)


def is_half(inputs: Mapping[str, Placement]) -> bool:
    """Whether queries are in bf16, of the dtypes that were measured."""
    return compat.example_value(inputs["q"].value.node).dtype is not torch.float32


def takes_longer(tokens: int, ratio: float, *, train: bool) -> str:
    """Why a sequence of so many tokens is left to Inductor."""
    what = f"training on {tokens} tokens" if train else f"a prompt of {tokens} tokens"
    return f"as an op, {what} on a CPU is estimated to take {ratio:.1f} times as long as by Inductor"


def open_batch(inputs: Mapping[str, Placement]) -> Any:
    """The number of requests, a number where it is fixed."""
    q = inputs["q"]
    shape = compat.example_value(q.value.node).shape
    return shape[q.axes.index("B")] if "B" in q.axes else 1


class Work(NamedTuple):
    """What operators do: how many compute something, products of matrices among them, multiplications in these and in
    triangular solves, and numbers that the others read or make.
    """

    operators: int
    products: int
    multiplied: int
    solved: int
    numbers: int


def work_of(ops: Iterable[Op]) -> Work:
    operators = products = multiplied = solved = numbers = 0
    for op in ops:
        if op.out.const or op.name in DATA_MOVEMENT | MAKERS:
            continue
        operators += 1
        if op.name in CONTRACTIONS:
            products += 1
            multiplied += math.prod(op.out.shape) * op.reads[-2].shape[-1]
        elif op.name in SOLVES:
            solved += math.prod(op.out.shape) * op.reads[0].shape[-1]
        else:
            numbers += max(math.prod(value.shape) for value in (*op.reads, *op.outs))
    return Work(operators, products, multiplied, solved, numbers)
