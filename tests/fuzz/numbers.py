"""Inputs that reach what ordinary ones do not: gates near zero, strong ones, long keys, small and large values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOGS = frozenset({"g", "gk", "g2", "w", "log_gamma"})
KEYS = frozenset({"k", "b"})
READS = frozenset({"q", "c"})
VALUES = frozenset({"v", "x", "state"})
LATENT = frozenset({"x0", "x1", "x2"})

Change = Callable[[str, Tensor], Tensor]


def _times(names: frozenset[str], factor: float) -> Change:
    return lambda name, x: x * factor if name in names else x


def _weaker(share: Callable[[Tensor], float]) -> Change:
    """Log gates times ``share``, gates to that power."""

    def change(name: str, x: Tensor) -> Tensor:
        if name in LOGS:
            return x * share(x)
        return x ** share(x) if name in ("alpha", "gamma") else x

    return change


def _strong(name: str, x: Tensor) -> Tensor:
    """Every fifth gate shuts."""
    shut = (torch.arange(x.numel()) % 5 == 3).view(x.shape)
    if name in LOGS - {"log_gamma"}:
        return x.masked_fill(shut, 1000.0 if name == "w" else -1000.0)
    return x.masked_fill(shut, 0.0) if name == "alpha" else x


def _zeros(name: str, x: Tensor) -> Tensor:
    if name == "beta":
        return x.masked_fill((torch.arange(x.numel()) % 3 == 1).view(x.shape), 0.0)
    return x.masked_fill((torch.arange(x.shape[1]) % 4 == 2).view(-1, *[1] * (x.dim() - 2)), 0.0) if x.dim() > 2 else x


def _wide(name: str, x: Tensor) -> Tensor:
    """Values of many sizes."""
    return x * torch.logspace(-6, 6, x.shape[1], dtype=x.dtype).view(-1, *[1] * (x.dim() - 2)) if name in VALUES else x


NUMBERS: dict[str, Change] = {
    "ordinary": lambda name, x: x,
    "gates near zero": _weaker(lambda x: 1e-3),
    "gates 1/T": _weaker(lambda x: 1.0 / x.shape[1] if x.dim() > 1 else 0.01),
    "strong gates": _strong,
    "long keys": _times(KEYS, 1.25),
    "small": _times(VALUES | READS | {"x0"}, 1e-7),
    "large": _times(VALUES | {"x0"}, 1e5),
    "very large": _times(VALUES | READS | {"x0"}, 3e7),
    "zeros": _zeros,
    "wide": _wide,
    "negative": lambda name, x: -x if name in VALUES | KEYS | LATENT else x,
}

MILD = ("ordinary", "gates near zero", "gates 1/T", "strong gates", "zeros", "negative")
"""Of a size at which gradients are no differences of nearly equal numbers, as they are where a softmax saturates."""


def changed(numbers: str, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(NUMBERS[numbers](name, x) for name, x in zip(names, tensors, strict=True))


def laid_out(layout: str, names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same numbers in another layout; "aliased" gives arguments of one shape as one tensor: the log gates, if they
    are among them, since no other numbers are log gates (those of 1e7 grow beyond any dtype).
    """
    if layout == "strided":
        return tuple(x.transpose(0, -1).contiguous().transpose(0, -1) for x in tensors)
    if layout == "offset":
        return tuple(torch.cat([x, x])[x.shape[0] :] for x in tensors)
    if layout == "aliased":
        pairs = sorted(zip(names, tensors, strict=True), key=lambda pair: pair[0] in LOGS)
        first = {x.shape: x for _, x in [*reversed(pairs), *(pair for pair in pairs if pair[0] in LOGS)]}
        return tuple(first[x.shape] for x in tensors)
    return tensors
