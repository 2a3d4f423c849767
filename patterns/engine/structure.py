"""What operators compute, as a text to remember it by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value, ancestors, map_values


def digest(ops: Iterable[Op], cut: Sequence[Value], outputs: Iterable[Value]) -> str:
    """The same for regions that differ only in which tensors of the model they read."""
    numbers: dict[Value, str] = {value: f"in{i}" for i, value in enumerate(cut)}
    found = hashlib.sha256()
    for value in cut:
        # A role may count on uniform dimensions, and a constant's dtype is part of what it is.
        found.update(f"{value.shape}{sorted(value.uniform)}{value.dtype}".encode())

    def name(value: Value) -> str:
        return _payload(value.payload) if value.payload is not None else numbers.get(value, f"?{value.index}")

    for op in sorted(ops, key=lambda item: item.outs[0].index):
        for index, value in enumerate(op.outs):
            numbers[value] = f"v{len(numbers)}.{index}"
        args = map_values(op.args, name)
        kwargs = {key: item for key, item in map_values(op.kwargs, name).items() if key != "device"}
        found.update(f"{op.target}{args}{kwargs}{[(out.shape, out.dtype) for out in op.outs]}".encode())
    found.update(" ".join(name(value) for value in outputs).encode())
    return found.hexdigest()


def digest_of_constant(value: Value) -> str:
    """The same for constants of the same numbers."""
    return digest(ancestors([value], lambda _: False), [], [value])


def _payload(data: Tensor) -> str:
    data = data.detach().cpu().contiguous()
    raw = data.flatten().view(torch.uint8).numpy().tobytes()
    return f"c{data.dtype}{tuple(data.shape)}{hashlib.sha256(raw).hexdigest()}"
