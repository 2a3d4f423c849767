"""Log-sigmoid gate.

    g = c * logsigmoid(x),  c > 0                       absorbed: gate_fn="logsigmoid", gate_scale=c

GLA divides by a temperature of 16. A gate that multiplies by ``sigmoid(x)`` directly is the same with c = 1.
Source: GLA, arXiv 2312.06635, section 4.4.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kdacompile.patterns.recurrence.absorb.gate import Activation, absorb_activation
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch


def _definition(x: Tensor, rate: Tensor | None) -> Tensor:
    return F.logsigmoid(x)


LOGSIGMOID = Activation(
    gate_fn="logsigmoid",
    shape=_definition,
    needs=tuple(
        frozenset(names.split())
        for names in ("log_sigmoid_forward", "softplus", "sigmoid", "exp log", "exp log1p", "logaddexp")
    ),
    takes_rate=False,
    sign=1,
)


def absorb_logsigmoid_gate(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    return absorb_activation(match, scope, LOGSIGMOID)
