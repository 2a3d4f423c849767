"""Inputs of the family as the Ascend kernels take them, and one way to run and judge them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kdacompile.lowering.ascend.launch import Launcher, run_chunks
from kdacompile.lowering.calls import Call
from tests.lowering.verify import Case, make_inputs, oracle, relative_error

CORES = 3
SIZES: Mapping[str, int] = {
    "H": 2, "HV": 4, "C": 64, "K": 128, "BK": 64, "V": 128, "BV": 128, "R": 16, "LEVELS": 2, "INITIAL": 1, "TOKENS": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """Relative RMS errors of o and of the final state against the fp64 recurrence on the same 16-bit inputs."""

    output: float
    state: float

    @property
    def worst(self) -> float:
        """NaN if either is."""
        return self.output + self.state if not (self.output >= 0 and self.state >= 0) else max(self.output, self.state)


def ascend_case(gate: str, delta: bool, lengths: Sequence[int] = (70, 1), **options: Any) -> Case:
    """Grouped heads, packed sequences, an initial state and K = V = 128 unless ``options`` say otherwise."""
    defaults: dict[str, Any] = {"heads": 1, "value_heads": 2, "key_width": 128, "value_width": 128, "scale": 128**-0.5}
    return Case(gate, delta, lengths=tuple(lengths), **{**defaults, **options})


def rounded_inputs(case: Case, dtype: torch.dtype) -> Call:
    """The case's inputs with q, k and v rounded to ``dtype``, and held in fp32."""
    inputs = make_inputs(case)
    return replace(inputs, **{name: getattr(inputs, name).to(dtype).float() for name in ("q", "k", "v")})


def run(inputs: Call, launch: Launcher, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    options = {"cores": CORES, **options}
    return run_chunks(narrowed(inputs, dtype), launch=launch, **options)


def narrowed(inputs: Call, dtype: torch.dtype) -> Call:
    """The call with q, k and v in ``dtype``."""
    return replace(inputs, **{name: getattr(inputs, name).to(dtype) for name in ("q", "k", "v")})


def judge(case: Case, inputs: Call, found: tuple[Tensor, Tensor]) -> Verdict:
    expected = oracle(case, inputs)
    return Verdict(*(relative_error(x.float(), y) for x, y in zip(found, expected, strict=True)))
