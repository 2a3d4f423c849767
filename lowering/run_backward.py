"""The entry point of the lowering for gradients: those of one row of the family on real tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kdacompile.containment import contain

from .calls import RECURRENT, Call
from .cpu import run_recurrence_backward, runs_backward
from .run import (
    is_any_watched,
    part_of,
    parts_of,
    run_linear_attention,
    run_linear_attention_step,
    run_tokens,
)


def run_linear_attention_backward(
    grads: Sequence[Tensor | None], call: Call, wanted: Collection[str], *, step: bool = False
) -> dict[str, Tensor]:
    """Gradients of the ``wanted`` among q, k, v, g, beta and the initial state of a prepared call, as far as it has
    them, by name.

    ``grads`` are those of o and the final state, one of them may be None for zeros; ``step``: of
    :func:`run_linear_attention_step`. On a CPU this is the C kernel, if the machine can compile it; else the executor,
    differentiated by ``torch.func.vjp``. Where those are not finite, they are the recurrence's, token by token.
    """
    found, alone = None, bool(call.q.numel()) and not is_any_watched((*grads, *call.recurrent))
    if alone:
        found = contain("computing gradients", lambda: _on_cpu(grads, call), lambda _: None)
    if found is None:
        named = _through_executor(grads, call, wanted, step)
        on_cpu = alone and call.q.device.type == "cpu"
        finite = not on_cpu or all(bool(grad.sum().isfinite()) for grad in named.values())
    else:
        gradients, finite = found
        every = zip(RECURRENT, gradients, strict=True)
        named = {name: grad for name, grad in every if grad is not None and name in wanted}
    return named if finite else _through_tokens(grads, call, named)


def _on_cpu(grads: Sequence[Tensor | None], call: Call) -> tuple[Sequence[Tensor | None], bool] | None:
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


def _through_tokens(grads: Sequence[Tensor | None], call: Call, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the recurrence itself, from the last tokens to the first; ``like``: which gradients, with their shapes. In a
    chunk, what has no numbers (the gradient of one output) leaves none in gradients that do not follow from it.
    """
    found = {name: torch.zeros_like(grad) for name, grad in like.items()}
    per_token = [name for name, grad in like.items() if name != "initial_state" and grad.dim() > 1]
    parts, initial = parts_of(call)
    outs, after = grads
    slopes = [torch.zeros_like(state) for state in initial] if after is None else after.split(len(initial[0]))
    firsts = list[Tensor]()
    for some, state, slope in zip(parts, initial, slopes, strict=True):
        pieces = list[Call]()
        for part in some:
            pieces.append(part_of(call, part, state))
            state = run_tokens(pieces[-1])[1]
        for part, piece in zip(reversed(some), reversed(pieces), strict=True):
            given = {name: getattr(piece, name) for name in {*like, "initial_state"}}
            results, pull_back, *_ = torch.func.vjp(partial(_tokens_of, piece, list(given)), *given.values())
            o = torch.zeros_like(results[0]) if outs is None else outs[:, part].to(call.v.dtype)
            pulled = dict(zip(given, pull_back((o, slope.to(call.v.dtype))), strict=True))
            slope = pulled.pop("initial_state")
            for name, grad in pulled.items():
                (found[name][:, part] if name in per_token else found[name]).add_(grad)
        firsts.append(slope)
    return found | ({"initial_state": torch.cat(firsts)} if "initial_state" in like else {})


def _tokens_of(call: Call, names: Sequence[str], *values: Tensor) -> tuple[Tensor, Tensor]:
    return run_tokens(replace(call, **dict(zip(names, values, strict=True))))
