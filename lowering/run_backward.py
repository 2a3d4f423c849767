"""The entry point of the lowering for gradients: those of one row of the family on real tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kdacompile.containment import contain

from .calls import RECURRENT, Call
from .cpu import run_recurrence_backward, runs_backward
from .run import is_any_watched, run_linear_attention, run_linear_attention_step


def run_linear_attention_backward(
    grads: Sequence[Tensor | None], call: Call, wanted: Collection[str], *, step: bool = False
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` among q, k, v, g, beta and the initial state of a prepared call, as far as it has
    them, by name.

    ``grads`` are those of o and the final state, one of them may be None for zeros; ``step``: of
    :func:`run_linear_attention_step`. On a CPU this is the C kernel, if the machine can compile it; else the executor,
    differentiated by ``torch.func.vjp``.
    """
    found = None
    if call.q.numel() and not is_any_watched((*grads, *call.recurrent)):
        found = contain("computing gradients", lambda: _on_cpu(grads, call), lambda _: None)
    if found is None:
        return _through_executor(grads, call, wanted, step)
    named = zip(RECURRENT, found, strict=True)
    return {name: grad for name, grad in named if grad is not None and name in wanted}


def _on_cpu(grads: Sequence[Tensor | None], call: Call) -> Sequence[Tensor | None] | None:
    return run_recurrence_backward(grads, call) if runs_backward(call.q) else None


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
