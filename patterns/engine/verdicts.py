"""Verdicts by structure: the layers of a model share one proof."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, Generic

import torch
from torch import Tensor

from kdacompile.graph.ir import Value, map_values
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.match import B, Candidate, Verdict


def structural_hash(candidate: Candidate[Any]) -> str:
    """The same for regions that differ only in which tensors of the model they read."""
    numbers: dict[Value, str] = {value: f"in{i}" for i, value in enumerate(candidate.cut)}
    digest = hashlib.sha256()
    for value in candidate.cut:
        # A role may count on uniform dimensions, and a constant's dtype is part of what it is.
        digest.update(f"{value.shape}{sorted(value.uniform)}{value.dtype}".encode())
    for op in sorted(candidate.ops, key=lambda item: item.outs[0].index):
        for index, value in enumerate(op.outs):
            numbers[value] = f"v{len(numbers)}.{index}"

        def name(value: Value) -> str:
            if value.payload is not None:
                data = value.payload.detach().cpu().contiguous()
                return f"c{data.dtype}{tuple(data.shape)}{hashlib.sha256(_bytes(data)).hexdigest()}"
            return numbers.get(value, f"?{value.index}")

        args = map_values(op.args, name)
        kwargs = {key: item for key, item in map_values(op.kwargs, name).items() if key != "device"}
        digest.update(f"{op.target}{args}{kwargs}{[(out.shape, out.dtype) for out in op.outs]}".encode())
    digest.update(" ".join(numbers.get(value, "?") for value in candidate.outputs).encode())
    return digest.hexdigest()


def _bytes(data: Tensor) -> bytes:
    return data.flatten().view(torch.uint8).numpy().tobytes()


class Verdicts(Generic[B]):
    """Verdicts of this process, by structure; ``check`` finds the binding that holds."""

    def __init__(self, check: Callable[..., Verdict[B]]) -> None:
        self.check = check
        self.known: dict[tuple[object, ...], tuple[Verdict[B], list[Value]]] = {}

    def __call__(self, candidate: Candidate[B], *, wide: bool = False) -> Verdict[B]:
        deadline.check()
        bindings = candidate.bindings  # those that are looked for when they are asked for follow from the structure
        forms = tuple(binding.text() for binding in bindings) if isinstance(bindings, list) else ()
        duplicates = tuple(map(candidate.cut.index, chain.from_iterable(candidate.duplicates.items())))
        key = structural_hash(candidate), forms, duplicates, wide
        values = [*candidate.cut, *candidate.outputs]
        if key in self.known:
            return _moved(*self.known[key], values)
        verdict = self.check(candidate, wide=wide)
        unbound = [Value(index, value.shape, value.dtype) for index, value in enumerate(values)]
        self.known[key] = _moved(verdict, values, unbound), unbound  # values keep their graph, and that the model
        return verdict


def _moved(verdict: Verdict[B], values: list[Value], others: list[Value]) -> Verdict[B]:
    """The verdict on a region like this one, between other values."""
    if verdict.binding is None:
        return verdict
    return replace(verdict, binding=verdict.binding.moved(dict(zip(values, others, strict=True))))
