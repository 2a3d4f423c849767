"""Bounded gate.

    g = c * sigmoid(exp(A_log) * x),  c <= 0            absorbed: gate_fn="sigmoid", gate_scale=c, A_log

c is the lower bound of the log gate; A_log is one number per head and may be absent, x may still hold dt_bias.
Source: the bounded gate of Kimi Linear's successors (GLM, Ling) in transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.patterns.recurrence.absorb.gate import Activation, absorb_activation
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch


def _definition(x: Tensor, rate: Tensor | None) -> Tensor:
    return torch.sigmoid(x if rate is None else rate * x)


SIGMOID = Activation(
    gate_fn="sigmoid",
    shape=_definition,
    needs=tuple(frozenset(names.split()) for names in ("sigmoid", "tanh", "exp reciprocal", "exp div", "exp pow")),
    takes_rate=True,
    sign=-1,
)


def absorb_sigmoid_gate(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    return absorb_activation(match, scope, SIGMOID)
