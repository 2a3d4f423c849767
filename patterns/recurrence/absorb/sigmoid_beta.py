"""Sigmoid of beta.

    beta = sigmoid(x)                                   absorbed: sigmoid_beta

in any spelling (``1 / (1 + exp(-x))``, ``(tanh(x / 2) + 1) / 2``). ``2 * sigmoid(x)`` (negative eigenvalues allowed) is
not this function; its beta stays an input. A sigmoid of a half-precision model rounds its result; the op's does not.
That is as close to the function, but not to the model's own numbers, so ``kda.precision="fp32"`` leaves it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kdacompile.patterns.recurrence.absorb.axes import POINTWISE, SAME_DATA
from kdacompile.patterns.recurrence.absorb.casts import climb
from kdacompile.patterns.recurrence.absorb.cone import Runner, agrees, cones
from kdacompile.patterns.recurrence.absorb.gate import holds_everywhere, logits
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.roles import RecurrenceMatch


def absorb_sigmoid_beta(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    beta = match.inputs.get("beta")
    if beta is None or match.binding.sigmoid_beta:
        return None
    op = beta.value.op
    if op is not None and op.name == "sigmoid":
        if not scope.lets_gradients_through([op], op.reads) or (scope.keep_upcasts and not scope.computes(op)):
            return None
        logit = climb(replace(beta, value=op.reads[0]), scope, match.sizes)
        return None if logit is None else match.taking("sigmoid_beta", {"beta": logit}, sigmoid_beta=True)
    for cone in cones(beta, scope, match.sizes, SAME_DATA | POINTWISE):
        if holds_everywhere(cone, "sigmoid", match.sizes, match.sizes["H"], _is_sigmoid):
            return match.taking("sigmoid_beta", {"beta": cone.sources[0]}, sigmoid_beta=True)
    return None


def _is_sigmoid(run: Runner, given: torch.Tensor) -> bool:
    return all(agrees(run(x), torch.sigmoid(x)) for x in logits(run, given))
