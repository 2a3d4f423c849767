"""The replacement against the function itself, run eagerly at many lengths.

The region inside was proven at the captured lengths. What could still differ elsewhere is the Python around it: how it
pads, how it counts chunks, a branch on the length. So both are run wherever the code mentions a number at which
something could begin or end, and at the edges of several chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from kdacompile.lift.calls import Call
from kdacompile.lift.capture import RUN_ERRORS
from kdacompile.lift.errors import Unliftable
from kdacompile.lift.probes import make

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Relative error (RMS) by the coarsest floating dtype among the arguments: rounding, for any order of summation."""

GRADIENT_SLACK = 5.0
LARGEST_CHUNK = 256
FARTHEST = 4200
MOST_LENGTHS = 40

Function = Callable[..., Any]


def lengths(numbers: Iterable[int]) -> list[int]:
    """Where to compare; raises ``Unliftable`` if the code mentions too much to try."""
    wanted = {2, 3, 5, 17}
    for number in numbers:
        if 3 <= number <= LARGEST_CHUNK:
            wanted |= {number - 1, number, number + 1, 2 * number, 2 * number + 3}
            wanted |= {3 * number + 1} if number > 8 else set()
        elif LARGEST_CHUNK < number <= FARTHEST:
            wanted |= {number - 1, number, number + 1}
        elif FARTHEST < number < 1 << 40:
            raise Unliftable(f"its code mentions {number}, more tokens than can be tried")
    wanted = {length for length in wanted if length >= 2}
    if len(wanted) > MOST_LENGTHS:
        raise Unliftable("its code mentions too many numbers to try them all")
    return sorted(wanted)


def compare(fn: Function, other: Function, call: Call, roles: dict[int, str], length: int, batch: int) -> float | None:
    """Largest relative error of the outputs, None if the function does not take this length."""
    inputs = make(call, roles, {"B": batch, "T": length}, seed=length)
    before = [tensor.clone() for tensor in inputs]
    try:
        with torch.no_grad():
            want = fn(*inputs)
    except RUN_ERRORS:
        return None
    if not all(map(_same_bits, inputs, before)):
        raise Unliftable("it writes its arguments")
    with torch.no_grad():
        have = other(*inputs)
    return _difference(have, want, _tolerance(call))


def compare_gradients(
    fn: Function, other: Function, call: Call, roles: dict[int, str], length: int, batch: int
) -> None:
    """Raises ``Unliftable`` unless the gradients agree too, wherever the function has any."""
    results: list[list[Tensor | None]] = []
    for run in (fn, other):
        inputs = make(call, roles, {"B": batch, "T": length}, seed=length)
        leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
        try:
            outputs = [out for out in tree_leaves(run(*inputs)) if isinstance(out, Tensor) and out.requires_grad]
            seeds = [torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out) for out in outputs]
            results.append(list(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)))
        except RUN_ERRORS as error:
            if run is fn and not isinstance(error, torch.OutOfMemoryError):
                return  # it has no gradients, so nobody trains through it
            raise
    for want, have in zip(*results, strict=True):
        if want is None or have is None:
            if (want is None) != (have is None) and bool((want if have is None else have).any()):  # type: ignore[union-attr]
                raise Unliftable("a gradient differs from the op's")
        elif not _error(have, want) <= GRADIENT_SLACK * _tolerance(call):
            raise Unliftable("a gradient differs from the op's")


def _tolerance(call: Call) -> float:
    dtypes = [tensor.dtype for _, tensor in call.tensors() if tensor.dtype.is_floating_point]
    return max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def _difference(have: Any, want: Any, tolerance: float) -> float:
    have_leaves, have_spec = tree_flatten(have)
    want_leaves, want_spec = tree_flatten(want)
    if have_spec != want_spec:
        raise Unliftable("what it returns differs with the length")
    worst = 0.0
    for a, b in zip(have_leaves, want_leaves, strict=True):
        if not isinstance(b, Tensor):
            if a != b:
                raise Unliftable("it returns a number that differs with the length")
            continue
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            raise Unliftable("the shape or dtype of a result differs with the length")
        worst = max(worst, _error(a, b))
    if not worst <= tolerance:
        raise Unliftable(f"its results differ from the op's by {worst:.1e}")
    return worst


def _error(have: Tensor, want: Tensor) -> float:
    have, want = have.double(), want.double()
    size = want.square().mean().sqrt()
    return float((have - want).square().mean().sqrt() / size.clamp_min(1e-12)) if want.numel() else 0.0


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) if a.numel() else True
