"""One program, eager and under this backend: are results, overwritten arguments, strides and gradients eager's?

In float64 the rewritten program differs from eager by rounding alone, so the bound is 1e-9, and what an edit adds is
seen from there on; in float32 the program in float64 says how far eager itself is off. A program that rounds to a
narrower dtype on its way may be computed without that. Where eager has no finite number the recurrence may have one.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kdacompile.report.collect import collecting
from tests.compare import copies, tensors
from tests.fuzz.recipes import Recipe, load

BOUND = {"float64": 1e-9, "float32": 5e-5}
ROUNDINGS = 8
UNKNOWN = -1.0
UNSTABLE = "float32 and float64 differ by more than a hundredth in eager mode"
SECONDS = 60
"""What one program may take."""

Program = Callable[..., Any]


@dataclass(frozen=True)
class Verdict:
    """``kind``: "matched", "declined" or "unseen" and right; "wrong"; "crashed"; "slow"; "relaid": right, and what a
    lifted function returns has other strides; "unstable": eager's own rounding decides its results; "torch" if plain
    torch.compile fails alike; "invalid" if eager does.
    """

    kind: str
    detail: str = ""
    patterns: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    seconds: float = 0.0
    call: int = -1  # at which it showed

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "crashed")


class Slow(BaseException):
    """Not caught by what is watched."""


@contextmanager
def _patience(seconds: int) -> Generator[None]:
    def ring(*_: object) -> None:
        raise Slow

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class _Outcome:
    """What a call left: results, arguments, gradients."""

    values: list[Tensor]
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return next((x.dtype for x in self.values if x.is_floating_point()), torch.float64)


class _Narrowest(TorchDispatchMode):
    """The largest rounding of any operator's floating-point result."""

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tensors(result):
            if x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return result


def _run(program: Program, arguments: Sequence[Tensor], gradients: bool) -> _Outcome:
    given = _copies(arguments)
    if not gradients:
        with torch.no_grad():
            results = tensors(program(*given))
        return _Outcome([*results, *given])
    leaves = [x.requires_grad_() for x in given]
    results = tensors(program(*leaves))
    rng = torch.Generator().manual_seed(7)
    losses = [
        (x * torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x.dtype)).sum()
        for x in results
        if x.requires_grad
    ]
    found = (
        torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True, materialize_grads=True)
        if losses
        else []
    )
    return _Outcome([x.detach() for x in results], list(found))


def _copies(arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies with the strides and the aliases of the originals."""
    made: dict[int, Tensor] = {}
    for x in arguments:
        if id(x) not in made:
            (made[id(x)],) = copies([x])
            if x.storage_offset():
                made[id(x)] = torch.cat([x, x])[x.shape[0] :].detach()
    return tuple(made[id(x)] for x in arguments)


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error over the whole and over each slice of a dimension, where eager is finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    ours, theirs = actual.detach().double(), expected.detach().double()
    finite = theirs.isfinite()
    if not bool(ours[finite].isfinite().all()):
        return float("inf")
    gap, theirs = ((ours - theirs).masked_fill(~finite, 0.0), theirs.masked_fill(~finite, 0.0))
    largest = float(theirs.abs().max()) if theirs.numel() else 0.0
    if float(gap.abs().max() if gap.numel() else 0.0) <= 1e-300 + 1e-30 * largest:
        return 0.0
    scale = max(largest, 1e-300)
    gap, theirs = gap / scale, theirs / scale
    small = 1e-7 if expected.dtype == torch.float64 else 1.0
    worst = float(gap.norm() / theirs.norm().clamp(min=1e-300))
    for dim in range(gap.dim()):
        others = [d for d in range(gap.dim()) if d != dim]
        part, whole = (
            (torch.linalg.vector_norm(x, dim=others) for x in (gap, theirs)) if others else (gap.abs(), theirs.abs())
        )
        worst = max(worst, float((part / (whole + small * theirs.norm())).max()))
    return worst


def _apart(ours: list[Tensor], plain: list[Tensor]) -> float:
    if len(ours) != len(plain):
        return float("inf")
    return max((difference(x, y) for x, y in zip(ours, plain, strict=True)), default=0.0)


def _strides(ours: _Outcome, plain: _Outcome) -> str:
    for index, (x, y) in enumerate(zip(ours.values, plain.values, strict=True)):
        pairs = zip(x.shape, x.stride(), y.stride(), strict=True)
        if x.numel() and any(size > 1 and one != other for size, one, other in pairs):
            return f"result {index} of {tuple(x.shape)} has strides {x.stride()}, not {y.stride()}"
    return ""


class Judge:
    """Programs, one after the other, in one process."""

    def __init__(self, folder: Path | None = None) -> None:
        self._kept = tempfile.TemporaryDirectory() if folder is None else None
        self.folder = Path(self._kept.name) if self._kept is not None else folder or Path()

    def __call__(self, recipe: Recipe, seconds: int = SECONDS) -> Verdict:
        started = time.monotonic()
        try:
            with _patience(seconds):
                found = self._judged(recipe)
        except Slow:
            found = Verdict("slow", f"longer than {seconds} s")
        torch._dynamo.reset()
        return Verdict(found.kind, found.detail, found.patterns, found.codes, time.monotonic() - started, found.call)

    def _judged(self, recipe: Recipe) -> Verdict:
        try:
            program = load(recipe.text, recipe.dtype, self.folder)
            with _Narrowest() as seen:
                plain = [_run(program, recipe.arguments(call), recipe.gradients) for call in recipe.calls]
        except Exception as error:  # noqa: BLE001 - whatever an edited text does
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        if not any(bool(x.isfinite().any()) for x in plain[0].values[:1]):
            return Verdict("invalid", "not finite")
        bound = max(BOUND[recipe.dtype], ROUNDINGS * seen.eps if seen.eps > torch.finfo(plain[0].dtype).eps else 0.0)
        options: dict[str, Any] = {"kda.inner": recipe.inner}
        with collecting() as report:
            ours, error = self._compiled(recipe, program, "kda", options)
        patterns = tuple(match.pattern for match in report.matches)
        codes = tuple(sorted({rejection.code for rejection in report.rejections}))
        kind = "matched" if patterns else "declined" if codes else "unseen"
        for index, (one, other) in enumerate(zip(ours, plain, strict=False)):
            if problem := self._problem(recipe, index, one, other, bound):
                blame = self._blame(recipe, program, index, problem, other, bound)
                return Verdict(blame, problem, patterns, codes, call=index)
        if error:
            _, alike = self._compiled(recipe, program, recipe.inner, {})
            return Verdict("torch" if alike else "crashed", error, patterns, codes, call=len(ours))
        return Verdict(kind, "", patterns, codes)

    def _blame(self, recipe: Recipe, program: Program, index: int, problem: str, plain: _Outcome, bound: float) -> str:
        """The kind of a program with a problem."""
        if problem == UNSTABLE:
            return "unstable"
        theirs, _ = self._compiled(recipe, program, recipe.inner, {})
        if len(theirs) > index and self._problem(recipe, index, theirs[index], plain, bound):
            return "torch"
        if "strides" in problem:
            unlifted, _ = self._compiled(recipe, program, "kda", {"kda.inner": recipe.inner, "kda.lift": False})
            if len(unlifted) > index and not _strides(unlifted[index], plain):
                return "relaid"
        return "wrong"

    def _compiled(
        self, recipe: Recipe, program: Program, backend: str, options: dict[str, Any]
    ) -> tuple[list[_Outcome], str]:
        """What each call left, and the error that came instead of the next."""
        torch._dynamo.reset()
        found: list[_Outcome] = []
        compiled = torch.compile(program, backend=backend, options=options or None, dynamic=recipe.dynamic)
        try:
            for call in recipe.calls:
                found.append(_run(compiled, recipe.arguments(call), recipe.gradients))
        except Exception as error:  # noqa: BLE001 - whatever reaches the user is the finding
            return found, f"{type(error).__name__}: {str(error)[:400]}"
        return found, ""

    def _problem(self, recipe: Recipe, index: int, ours: _Outcome, plain: _Outcome, bound: float) -> str:
        for what, one, other in (
            ("results", ours.values, plain.values),
            ("gradients", ours.gradients, plain.gradients),
        ):
            error = _apart(one, other)
            if error <= bound or error <= (allowed := self._allowed(recipe, index, other, what)):
                continue
            if allowed == UNKNOWN:
                return UNSTABLE
            return f"call {index}: {what} differ by {error:.1e} (allowed {max(bound, allowed):.1e})"
        return _strides(ours, plain)

    def _allowed(self, recipe: Recipe, index: int, plain: list[Tensor], what: str) -> float:
        """What rounding may do: eager in the other precision says how much of it there is."""
        other = "float32" if recipe.dtype == "float64" else "float64"
        try:
            program = load(recipe.text, other, self.folder)
            run = _run(program, recipe.arguments(recipe.calls[index], getattr(torch, other)), recipe.gradients)
        except Exception:  # noqa: BLE001 - a text for one dtype only
            return 0.0
        values = run.values if what == "results" else run.gradients
        double, single = (plain, values) if recipe.dtype == "float64" else (values, plain)
        apart = _apart([x.double() for x in single], [x.double() for x in double])
        if apart > 1e-2:
            return UNKNOWN
        return apart * (2e-7 if recipe.dtype == "float64" else 10)
