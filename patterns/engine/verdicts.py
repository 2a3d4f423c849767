"""Verdicts by structure: the layers of a model share one proof."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from kdacompile.graph.ir import Value, map_values
from kdacompile.patterns.mla.definition import MlaCandidate
from kdacompile.patterns.recurrence.candidates import Candidate
from kdacompile.patterns.recurrence.proof import Verdict, prove
from kdacompile.patterns.recurrence.roles import Placement


def structural_hash(candidate: Candidate | MlaCandidate) -> str:
    """The same for regions that differ only in which tensors of the model they read."""
    numbers: dict[Value, str] = {value: f"in{i}" for i, value in enumerate(candidate.cut)}
    digest = hashlib.sha256()
    for value in candidate.cut:
        # A role may count on uniform dimensions, and a mask of booleans is drawn as one.
        digest.update(f"{value.shape}{sorted(value.uniform)}{value.dtype is torch.bool}".encode())
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
        digest.update(f"{op.target}{args}{kwargs}{[(out.shape) for out in op.outs]}".encode())
    digest.update(" ".join(numbers.get(value, "?") for value in candidate.outputs).encode())
    return digest.hexdigest()


def _bytes(data: Tensor) -> bytes:
    return data.flatten().view(torch.uint8).numpy().tobytes()


class Verdicts:
    """Verdicts of this process, by structure: the layers of a model share one."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, bool], tuple[Verdict, list[Value]]] = {}

    def __call__(self, candidate: Candidate, *, wide: bool = False) -> Verdict:
        key = structural_hash(candidate), wide
        values = [*candidate.cut, *candidate.outputs]
        if key not in self.known:
            self.known[key] = prove(candidate, wide=wide), values
        verdict, theirs = self.known[key]
        if verdict.hypothesis is None or theirs is values:
            return verdict
        swap = dict(zip(theirs, values, strict=True))
        hypothesis = verdict.hypothesis

        def move(placement: Placement) -> Placement:
            return replace(placement, value=swap[placement.value])

        moved = hypothesis.with_(
            inputs=tuple(move(p) for p in hypothesis.inputs),
            output=move(hypothesis.output),
            final_state=move(hypothesis.final_state) if hypothesis.final_state else None,
        )
        return Verdict(moved, verdict.max_error, verdict.reason, verdict.probes)
