"""Gate functions: what ``g`` is turned into the log decay d of the recurrence by. One entry each, for every target.

A formula is text in ``x`` (g with dt_bias added), ``rate`` (exp(A_log)) and ``gate_scale``, and in the functions
``log``, ``sigmoid``, ``softplus`` and ``logsigmoid``, which torch and the Triton kernels each have. It is compiled for
torch here, emitted for Triton by ``triton/gates.py`` and for C by ``cpu/gates.py``; ``hopper/gates.py`` emits another,
in powers of two. Ascend's kernels apply the formula too; gradients in C and on Ascend take the log decay itself, which
torch computes before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = {"none": "[]", "head": "[HV]", "token": "[B, T, HV]", "channel": "[B, T, HV, K]"}
"""The kinds of gate, and what g is of each."""

FORMS = ("log", "factor")
"""The gate functions that the executor and the gradients in C apply themselves: a factor of 0 is exact that way."""


@dataclass(frozen=True)
class GateFunction:
    """``d = formula``; ``slope`` is d's derivative by x, ``rate_slope`` that by A_log.

    ``log2``: ``d / ln 2`` for Hopper's kernels, which count in powers of two: in ``LOG2E``, ``log2``, ``softplus2``,
    ``logsigmoid2`` (those divided by ln 2) and ``sigmoid2``, which takes x / ln 2.

    ``parametric``: whether it reads A_log and dt_bias. ``scale``: what gate_scale is, "lower bound" (of d, at most 0,
    required), "factor" (at least 0, 1 by default), or "" where it is not read. ``models``: who writes gates like this.
    """

    name: str
    formula: str
    log2: str
    slope: str
    rate_slope: str = "0.0"
    parametric: bool = False
    scale: str = ""
    models: str = ""

    def lower_bound(self, gate_scale: float) -> float:
        """No log decay is below this."""
        return gate_scale if self.scale == "lower bound" else -math.inf


_FUNCTIONS = (
    GateFunction("log", "x", "x * LOG2E", "1.0", models="RetNet, Mamba-2, GLA with a log gate"),
    GateFunction("factor", "log(x)", "log2(x)", "1.0 / x", models="models that multiply by alpha"),
    GateFunction(
        "softplus",
        "-rate * softplus(x)",
        "-rate * softplus2(x)",
        "-rate * sigmoid(x)",
        "-rate * softplus(x)",
        parametric=True,
        models="Gated DeltaNet, KDA, Mamba-2",
    ),
    GateFunction(
        "sigmoid",
        "gate_scale * sigmoid(rate * x)",
        "(gate_scale * LOG2E) * sigmoid2(x * (rate * LOG2E))",
        "gate_scale * rate * sigmoid(rate * x) * sigmoid(-rate * x)",
        "gate_scale * rate * x * sigmoid(rate * x) * sigmoid(-rate * x)",
        parametric=True,
        scale="lower bound",
        models="KDA with a lower bound on the decay",
    ),
    GateFunction(
        "logsigmoid",
        "gate_scale * logsigmoid(x)",
        "gate_scale * logsigmoid2(x)",
        "gate_scale * sigmoid(-x)",
        scale="factor",
        models="GLA",
    ),
)
GATE_FUNCTIONS = {function.name: function for function in _FUNCTIONS}
"""By name, as the op's option ``gate_fn`` has it."""

_TORCH = {"log": torch.log, "sigmoid": torch.sigmoid, "softplus": F.softplus, "logsigmoid": F.logsigmoid}


def log_decay(x: Tensor, rate: Tensor | float, gate_fn: str, gate_scale: float) -> Tensor:
    """The log decays that gates stand for, dt_bias added to them, in x's dtype; ``rate`` broadcasts to x."""
    return _compiled(GATE_FUNCTIONS[gate_fn].formula)(x, rate, gate_scale)


def slopes(x: Tensor, rate: Tensor | float, gate_fn: str, gate_scale: float) -> tuple[Tensor, Tensor]:
    """The derivatives of :func:`log_decay` by x and by A_log, where A_log is the same for all of x."""
    function = GATE_FUNCTIONS[gate_fn]
    by_x, by_rate = (_compiled(text)(x, rate, gate_scale) for text in (function.slope, function.rate_slope))
    zero = torch.zeros_like(x)  # a derivative may be a number
    return zero + by_x, zero + by_rate


@cache
def _compiled(formula: str) -> Callable[[Tensor, Tensor | float, float], Any]:
    return eval(f"lambda x, rate, gate_scale: {formula}", dict(_TORCH))
