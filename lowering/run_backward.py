"""The entry point of the lowering for gradients: those of one row of the family on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .cpu import run_recurrence_backward, runs_backward
from .run import is_watched, l2norm, run_linear_attention, run_linear_attention_step

OptionalTensors = Sequence[Tensor | None]


def run_linear_attention_backward(
    grads: OptionalTensors,
    tensors: OptionalTensors,
    wanted: Sequence[bool],
    *,
    norm_eps: float = 0.0,
    chunk_size: int = 0,
    cu_seqlens: Tensor | None = None,
    step: bool = False,
    **options: Any,
) -> list[Tensor | None]:
    """Gradients of q, k, v, g, beta and the initial state, None for what is not ``wanted``.

    ``grads`` are those of o and the final state, one of them may be None for zeros; ``tensors`` and the options are the
    arguments of :func:`run_linear_attention`, or of :func:`run_linear_attention_step` with ``step``. On a CPU this is
    the C kernel, if the machine can compile it; else the executor, differentiated by ``torch.func.vjp``.
    """
    q, k = tensors[:2]
    assert q is not None and k is not None
    if q.numel() and not any(x is not None and is_watched(x) for x in (*grads, *tensors)) and runs_backward(q):
        normed = (l2norm(q, norm_eps), l2norm(k, norm_eps), *tensors[2:])
        dq, dk, *others = run_recurrence_backward(grads, normed, cu_seqlens=cu_seqlens, **options)
        found = [_through_norm(dq, q, norm_eps), _through_norm(dk, k, norm_eps), *others]
        return [grad if want else None for grad, want in zip(found, wanted, strict=True)]
    more = {"norm_eps": norm_eps, **options}
    if not step:
        more |= {"chunk_size": chunk_size, "cu_seqlens": cu_seqlens}
    return _through_executor(run_linear_attention_step if step else run_linear_attention, grads, tensors, wanted, more)


def _through_norm(grad: Tensor, x: Tensor, eps: float) -> Tensor:
    """The gradient of x from that of ``y = r x``, ``r = 1 / sqrt(sum(x * x) + eps)``: ``r (dy - y (y . dy))``."""
    if not eps:
        return grad
    factor = torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
    y = x * factor
    return factor * (grad - y * (y * grad).sum(-1, keepdim=True))


def _through_executor(
    forward: Callable[..., tuple[Tensor, Tensor]],
    grads: OptionalTensors,
    tensors: OptionalTensors,
    wanted: Sequence[bool],
    options: dict[str, Any],
) -> list[Tensor | None]:
    """``torch.func.vjp``, not ``autograd.grad``: an op's kernel may be called under functorch's transforms."""
    places = [i for i, (x, want) in enumerate(zip(tensors, wanted, strict=True)) if want and x is not None]

    def results(*values: Tensor) -> tuple[Tensor, ...]:
        arguments = list(tensors)
        for place, value in zip(places, values, strict=True):
            arguments[place] = value
        return tuple(out for out, grad in zip(forward(*arguments, **options), grads, strict=True) if grad is not None)

    outputs, pull_back, *_ = torch.func.vjp(results, *(tensors[place] for place in places))
    present = [grad for grad in grads if grad is not None]
    with torch.no_grad():
        found = pull_back(tuple(grad.to(out.dtype) for grad, out in zip(present, outputs, strict=True)))
    by_place = dict(zip(places, found, strict=True))
    return [by_place.get(place) for place in range(len(tensors))]
