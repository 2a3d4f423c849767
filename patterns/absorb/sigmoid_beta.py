"""Sigmoid of beta.

    beta = sigmoid(x)                                   absorbed: sigmoid_beta

``2 * sigmoid(x)`` (negative eigenvalues allowed) is not this function; its beta stays an input. A sigmoid of a
half-precision model rounds its result; the op's does not. That is as close to the function, but not to the model's own
numbers, so ``kda.precision="fp32"`` leaves it.
"""

from __future__ import annotations

from dataclasses import replace

from kdacompile.patterns.absorb.casts import climb
from kdacompile.patterns.absorb.scope import Scope
from kdacompile.patterns.match import Fused


def absorb_sigmoid_beta(fused: Fused, scope: Scope) -> Fused | None:
    beta = fused.inputs.get("beta")
    if beta is None or fused.sigmoid_beta:
        return None
    op = beta.value.op
    if op is None or op.name != "sigmoid" or not scope.lets_gradients_through([op], op.reads):
        return None
    if scope.keep_upcasts and not scope.computes(op):
        return None
    logit = climb(replace(beta, value=op.reads[0]), scope, fused.sizes)
    return None if logit is None else fused.taking("sigmoid_beta", {"beta": logit}, sigmoid_beta=True)
