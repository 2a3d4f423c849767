"""Calls that the costs of ops were measured of, on a CPU (``lowering/cpu/attention_cost.py``, ``recurrence_cost.py``,
``step_cost.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from kdacompile import compat
from kdacompile.graph.ir import Op
from kdacompile.ops.dtensor import holds_dtensors
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, DATA_MOVEMENT, MAKERS, SOLVES

DTYPES = (torch.float32, torch.bfloat16)


def is_as_measured(inputs: Mapping[str, Placement], *, free: str) -> bool:
    """Whether what takes these roles is of fixed sizes (but for these axes), in fp32 or bf16 and on a CPU, and holds no
    DTensor.
    """
    examples = [compat.example_value(placement.value.node) for placement in inputs.values()]
    q = compat.example_value(inputs["q"].value.node)
    still_open = compat.free_symbols(examples) - compat.free_symbols([size_of(inputs, axis) for axis in free])
    return not still_open and q.dtype in DTYPES and q.device.type == "cpu" and not holds_dtensors(examples)


def is_half(inputs: Mapping[str, Placement]) -> bool:
    """Whether queries are in bf16, of the dtypes that were measured."""
    return compat.example_value(inputs["q"].value.node).dtype is not torch.float32


def size_of(inputs: Mapping[str, Placement], axis: str) -> Any:
    """Of queries: a number where it is fixed, and 1 where they have no such axis."""
    q = inputs["q"]
    shape = compat.example_value(q.value.node).shape
    return shape[q.axes.index(axis)] if axis in q.axes else 1


LONGEST = 1 << 16
"""Tokens of a sequence up to which it is looked where an op takes less."""


def takes_longer(inputs: Mapping[str, Placement], ratio: Callable[[int, int], float | None], *, train: bool) -> str:
    """Why a sequence is left to Inductor, "" if it is not. ``ratio``: how many times as long an op takes, with so many
    requests and tokens; None where it takes less.

    Where the number of tokens is open, the answer is for all up to the first that an op takes less for, which is
    guarded: beyond, the graph is captured once more. An open number of requests must not matter.
    """
    batch, length = (size_of(inputs, axis) for axis in "BT")
    now, tokens = map(compat.size_hint, (batch, length))
    batches = (now,) if isinstance(batch, int) else (1, now, 16 * now)

    def loses(tokens: int) -> bool:
        return all(ratio(requests, tokens) is not None for requests in batches)

    if not loses(tokens):
        return ""
    what = f"training on {tokens} tokens" if train else f"a prompt of {tokens} tokens"
    what = f"as an op, {what} on a CPU is estimated to take {ratio(now, tokens):.1f} times as long as by Inductor"
    if isinstance(length, int):
        return what
    limit = tokens + 1
    while limit < LONGEST and loses(limit):
        limit += 1 + limit // 16
    return f"{what}, and so are fewer than {limit}" if compat.stays_below(length, limit) else ""


class Work(NamedTuple):
    """What operators do: how many compute something, products of matrices among them, multiplications in these and in
    triangular solves, and numbers that the others read or make.
    """

    operators: int
    products: int
    multiplied: int
    solved: int
    numbers: int


def work_of(ops: Iterable[Op], grown: Mapping[int, int]) -> Work:
    """``grown``: what sizes are taken for."""

    def prod(shape: Iterable[int]) -> int:
        return math.prod(grown.get(size, size) for size in shape)

    operators = products = multiplied = solved = numbers = 0
    for op in ops:
        if op.out.const or op.name in DATA_MOVEMENT | MAKERS:
            continue
        operators += 1
        if op.name in CONTRACTIONS:
            products += 1
            multiplied += prod((*op.out.shape, op.reads[-2].shape[-1]))
        elif op.name in SOLVES:
            solved += prod((*op.out.shape, op.reads[0].shape[-1]))
        else:
            numbers += max(prod(value.shape) for value in (*op.reads, *op.outs))
    return Work(operators, products, multiplied, solved, numbers)
