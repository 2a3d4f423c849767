"""The replacement against the function itself, run eagerly at many lengths.

The region inside was proven at the captured lengths. What could still differ elsewhere is the Python around it: how it
pads, how it counts chunks, a branch on the length or the batch. So both are run wherever the code mentions a number at
which something could begin or end, at the edges of several chunks, and wherever a comparison it makes would turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdacompile import compat
from kdacompile.capture import autocast
from kdacompile.capture.branches import FARTHEST, to_visit
from kdacompile.capture.calls import Call
from kdacompile.capture.concolic import Concolic, Point
from kdacompile.capture.draft import bound
from kdacompile.capture.errors import NeverRuns, Unliftable
from kdacompile.capture.probes import make
from kdacompile.compat.operators import tree_flatten, tree_leaves
from kdacompile.patterns.engine import deadline

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Relative error (RMS) by the coarsest floating dtype among the arguments, autocast's among them: rounding, for any
order of summation."""

GRADIENT_SLACK = 5.0
LARGEST_CHUNK = 256
MOST_LENGTHS = 40
BATCHES = (2, 3, 7)
MOST_RUNS = 400

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


@dataclass(frozen=True)
class Agreement:
    """How two functions compared: the largest relative error, the lengths tried, and those that the first one takes."""

    error: float
    tried: list[int]
    taken: list[int]


def compare_everywhere(
    concolic: Concolic,
    other: Function,
    call: Call,
    roles: dict[int, str],
    wanted: list[int],
    captured: Iterable[Point],
) -> Agreement:
    """Compare the function with ``other`` at the lengths ``wanted``, at several batches, where it was ``captured``, and
    wherever it would do otherwise than there (``branches``).

    Raises ``Unliftable`` unless the two agree, ``NeverRuns`` if the function takes none of the lengths, and what says
    that memory has run out: that is no trait of the function.
    """
    fn, errors = bound(concolic.fn, call), dict[Point, "float | None"]()

    def visit(points: Iterable[Point]) -> None:
        with concolic.ends:
            for batch, length in points:
                if (batch, length) in errors:
                    continue
                deadline.check()
                errors[batch, length] = compare(fn, other, call, roles, length, batch, concolic)

    visit([*((BATCHES[0], length) for length in wanted), *captured])
    taken = [length for (_, length), error in errors.items() if error is not None]
    if not taken:
        raise NeverRuns("it runs at no length")
    if any("B" in tensor.dims for _, tensor in call.tensors()):
        visit((batch, min(taken)) for batch in BATCHES[1:])
    while new := _points(concolic, min(taken)) - set(errors):
        if len(errors) + len(new) > MOST_RUNS:
            raise Unliftable("it decides at too many sizes to try them all")
        visit(sorted(new))
    if any(error is None for (batch, _), error in errors.items() if batch != BATCHES[0]):
        raise Unliftable("it does not take every batch")
    lengths = {length: error for (batch, length), error in sorted(errors.items()) if batch == BATCHES[0]}
    largest = max(error for error in errors.values() if error is not None)
    return Agreement(largest, list(lengths), [length for length, error in lengths.items() if error is not None])


def _points(concolic: Concolic, length: int) -> set[Point]:
    """What has to be visited, given what has been."""
    numbers = {number for run in concolic.runs for number in run.numbers}
    return to_visit(concolic.runs, BATCHES[0], length) | {(BATCHES[0], size) for size in lengths(numbers)}


def compare(
    fn: Function,
    other: Function,
    call: Call,
    roles: dict[int, str],
    length: int,
    batch: int,
    concolic: Concolic | None = None,
) -> float | None:
    """Largest relative error of the outputs, None if the function does not take this length.

    A length that only the concolic run does not take raises ``Unliftable``: nothing is known about it.
    """
    inputs = make(call, roles, {"B": batch, "T": length}, seed=length)
    before = [tensor.clone() for tensor in inputs]
    try:
        with torch.no_grad(), autocast.widening(call.autocast):  # below the modes of a concolic run
            want = fn(*inputs) if concolic is None else concolic.run(fn, inputs, batch, length)
    except torch.OutOfMemoryError:  # which says nothing about the length
        raise
    except compat.RUN_ERRORS as error:
        if concolic is not None and _runs(bound(concolic.itself, call), call, before):
            raise Unliftable(f"it cannot be followed at {length} tokens: {type(error).__name__}: {error}") from error
        return None
    if not all(map(torch.equal, inputs, before)):
        raise Unliftable("it writes its arguments")
    try:
        with torch.no_grad():
            have = other(*inputs)
    except torch.OutOfMemoryError:
        raise
    except compat.RUN_ERRORS as error:
        raise Unliftable(f"what it was captured as does not run at {length} tokens: {error}") from error
    if concolic is not None:  # a library's function may lay states out as its kernels like it
        _check_strides(have, want)
    return _difference(have, want, _tolerance(call))


def _runs(fn: Function, call: Call, inputs: list[Tensor]) -> bool:
    try:
        with torch.no_grad(), autocast.widening(call.autocast):
            fn(*inputs)
    except torch.OutOfMemoryError:
        raise
    except compat.RUN_ERRORS:
        return False
    return True


def _check_strides(have: Any, want: Any) -> None:
    """Raises ``Unliftable`` if results of the same shape lie in memory otherwise."""
    for a, b in zip(tree_leaves(have), tree_leaves(want), strict=False):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
            continue  # something else than the strides is wrong
        if any(size > 1 and one != other for size, one, other in zip(a.shape, a.stride(), b.stride(), strict=True)):
            raise Unliftable("a result lies in memory otherwise than the op's")


@torch.inference_mode(False)
@torch.enable_grad()
def compare_gradients(
    fn: Function, other: Function, call: Call, roles: dict[int, str], length: int, batch: int
) -> None:
    """Raises ``Unliftable`` unless the gradients agree too.

    In inference as well: whoever trains later finds the same verdict.
    """
    results: list[list[Tensor | None]] = []
    for run in (fn, other):
        inputs = make(call, roles, {"B": batch, "T": length}, seed=length)
        leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
        try:
            with autocast.widening(call.autocast):
                found = run(*inputs)
        except compat.RUN_ERRORS as error:
            _without_gradients(error, own=run is fn)
            return
        outputs = [out for out in tree_leaves(found) if isinstance(out, Tensor) and out.requires_grad]
        if run is fn and not outputs:
            raise Unliftable("it cuts gradients")
        seeds = [torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out) for out in outputs]
        try:
            results.append(list(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)))
        except compat.RUN_ERRORS as error:
            _without_gradients(error, own=run is fn)
            return
    for want, have in zip(*results, strict=True):
        if want is None or have is None:
            if (want is None) != (have is None) and bool((want if have is None else have).any()):  # type: ignore[union-attr]
                raise Unliftable("a gradient differs from the op's")
        elif not _error(have, want) <= GRADIENT_SLACK * _tolerance(call):
            raise Unliftable("a gradient differs from the op's")


def _without_gradients(error: Exception, *, own: bool) -> None:
    """Raises, but for the function's ``own`` error: it has no gradients, so nobody trains through it."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if not own:
        raise Unliftable(f"what it was captured as has no gradients: {error}") from error


def dtypes_of_results(fn: Function, call: Call, roles: dict[int, str], length: int) -> list[torch.dtype | None]:
    """What dtypes the function's results have at this length, None for what is no tensor."""
    with torch.no_grad():
        results = fn(*make(call, roles, {"B": BATCHES[0], "T": length}, seed=length))
    return [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in tree_leaves(results)]


def _tolerance(call: Call) -> float:
    dtypes = [tensor.dtype for _, tensor in call.tensors() if tensor.dtype.is_floating_point]
    rounded = [dtype for _, dtype in autocast.ambient(tensor.device for _, tensor in call.tensors())]
    return max(TOLERANCE.get(dtype, 0.0) for dtype in (*dtypes, *rounded))


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
