"""Softplus gate.

    g = -exp(A_log) * softplus(x)                       absorbed: gate_fn="softplus", A_log (x may still hold dt_bias)

``F.softplus``, its text ``where(x > 20, x, log(1 + exp(x)))`` and the like; A_log is one number per head and may be
absent. Source: Mamba-2 (arXiv 2405.21060), Gated DeltaNet (2412.06464), Kimi Linear (2510.26692).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kdacompile.patterns.recurrence.absorb.gate import Activation, absorb_activation
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch


def _definition(x: Tensor, rate: Tensor | None) -> Tensor:
    return -F.softplus(x) if rate is None else -rate * F.softplus(x)


SOFTPLUS = Activation(
    gate_fn="softplus",
    shape=_definition,
    needs=tuple(
        frozenset(names.split()) for names in ("softplus", "exp log", "exp log1p", "logaddexp", "log_sigmoid_forward")
    ),
    takes_rate=True,
    sign=0,
)


def absorb_softplus_gate(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    return absorb_activation(match, scope, SOFTPLUS)
