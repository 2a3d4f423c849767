"""The entry point of the lowering for gradients: those of one row of the family on real tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .calls import RECURRENT, Call
from .cpu import run_recurrence_backward, runs_backward
from .run import is_any_watched, l2norm, run_linear_attention, run_linear_attention_step


def run_linear_attention_backward(
    grads: Sequence[Tensor | None], call: Call, wanted: Collection[str], *, step: bool = False
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` among q, k, v, g, beta and the initial state of a prepared call, as far as it has
    them, by name.

    ``grads`` are those of o and the final state, one of them may be None for zeros; ``step``: of
    :func:`run_linear_attention_step`. On a CPU this is the C kernel, if the machine can compile it; else the executor,
    differentiated by ``torch.func.vjp``.
    """
    if call.q.numel() and not is_any_watched((*grads, *call.recurrent)) and runs_backward(call.q):
        eps = call.qk_l2norm_eps
        normed = replace(call, q=l2norm(call.q, eps), k=l2norm(call.k, eps)) if eps else call
        dq, dk, *others = run_recurrence_backward(grads, normed)
        every = (_through_norm(dq, call.q, eps), _through_norm(dk, call.k, eps), *others)
        found = zip(RECURRENT, every, strict=True)
        return {name: grad for name, grad in found if grad is not None and name in wanted}
    return _through_executor(grads, call, wanted, step)


def _through_norm(grad: Tensor, x: Tensor, eps: float) -> Tensor:
    """The gradient of x from that of ``y = r x``, ``r = 1 / sqrt(sum(x * x) + eps)``: ``r (dy - y (y . dy))``."""
    if not eps:
        return grad
    factor = torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
    y = x * factor
    return factor * (grad - y * (y * grad).sum(-1, keepdim=True))


def _through_executor(
    grads: Sequence[Tensor | None], call: Call, wanted: Collection[str], step: bool
) -> dict[str, Tensor]:
    """``torch.func.vjp``, not ``autograd.grad``: an op's kernel may be called under functorch's transforms."""
    forward = run_linear_attention_step if step else run_linear_attention
    given = {name: x for name, x in zip(RECURRENT, call.recurrent, strict=True) if x is not None and name in wanted}

    def results(*values: Tensor) -> tuple[Tensor, ...]:
        outputs = forward(replace(call, **dict(zip(given, values, strict=True))))
        return tuple(out for out, grad in zip(outputs, grads, strict=True) if grad is not None)

    outputs, pull_back, *_ = torch.func.vjp(results, *given.values())
    present = [grad for grad in grads if grad is not None]
    with torch.no_grad():
        found = pull_back(tuple(grad.to(out.dtype) for grad, out in zip(present, outputs, strict=True)))
    return dict(zip(given, found, strict=True))
