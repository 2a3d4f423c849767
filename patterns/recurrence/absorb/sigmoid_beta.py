"""Sigmoid of beta.

    beta = sigmoid(x)                                   absorbed: sigmoid_beta

in any spelling (``1 / (1 + exp(-x))``, ``(tanh(x / 2) + 1) / 2``). ``2 * sigmoid(x)`` (negative eigenvalues allowed) is
not this function; its beta stays an input. A sigmoid of a half-precision model rounds its result; the op's does not.
That is as close to the function, but not to the model's own numbers, so ``kda.precision="fp32"`` leaves it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from kdacompile.patterns.recurrence.absorb.axes import POINTWISE, SAME_DATA
from kdacompile.patterns.recurrence.absorb.casts import climb
from kdacompile.patterns.recurrence.absorb.cone import Cone, Runner, agrees, cones, holds_for
from kdacompile.patterns.recurrence.absorb.gate import ENOUGH, is_flat, may_compute
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.absorb.turning_points import points
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
        if may_compute(cone, "sigmoid") and _is_sigmoid(cone, match.sizes):
            return match.taking("sigmoid_beta", {"beta": cone.sources[0]}, sigmoid_beta=True)
    return None


def _is_sigmoid(cone: Cone, sizes: dict[str, int]) -> bool:
    if not all(is_flat(read) for op in cone.ops for read in op.reads if read.const):
        return False
    given = points(cone)
    if given is None:
        return False
    tokens = -(-ENOUGH // sizes["H"])
    runner = Runner(cone, sizes, at_most={"B": -(-tokens // sizes["T"]), "T": tokens})
    return holds_for(runner, partial(_agrees_everywhere, given=given))


def _agrees_everywhere(run: Runner, given: torch.Tensor) -> bool:
    count = math.prod(run.shape(0))
    for start in range(0, len(given), count):
        x = given[(torch.arange(count) + start) % len(given)].reshape(run.shape(0))
        if not agrees(run(x), torch.sigmoid(x)):
            return False
    return True
