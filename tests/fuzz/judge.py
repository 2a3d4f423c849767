"""One program, eager and under this backend: are results, overwritten arguments, strides and gradients eager's?

In float64 the rewritten program differs from eager by rounding alone, so the bound is 1e-9, and what an edit adds is
seen from there on; in float32 the program in float64 says how far eager itself is off. Where that is not enough, eager
is run with other roundings: a program whose results they move is compared by so much. A program that rounds to a
narrower dtype on its way may be computed with other roundings: it is compared with the program without them, from which
it may be a few times as far as eager is. Where eager has no finite number the recurrence may have one.
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

from kdacompile.report.collect import collecting
from tests.compare import copies, tensors
from tests.fuzz.recipes import Recipe, forget, load
from tests.fuzz.yardstick import Narrowest, Shaken, apart, from_exact, unrounded

BOUND = {"float64": 1e-9, "float32": 5e-5}
SLOPES = 1e-5
"""The share of the whole below which a slice of gradients is not compared by itself: those that cancel, as a softmax's
do where one key is seen, are rounding alone.
"""
FARTHER = 4.0
"""Times eager's own distance from the program without its roundings."""
SHAKES = 3
"""Times that eager is run with other roundings."""
HOPELESS = 0.1
"""That far from it, eager's numbers say nothing."""
SINGLE = torch.finfo(torch.float32).eps
SINGLES = 10.0
"""Times what roundings to float32 do to eager; of a program in float64, up to 1e-4."""
ROUNDINGS, HARDLY = 80, 0.02
"""Up to so many roundings, and so much, constants are what they stand for: ``0.9 ** n`` in float32 is that power."""
UNKNOWN = -1.0
DECIDED = 1e-2
"""Rounding that moves eager's results so far decides them."""
UNSTABLE = "rounding moves eager's results by more than a hundredth"
SECONDS = 60
"""What one program may take."""

Program = Callable[..., Any]


@dataclass(frozen=True)
class Verdict:
    """``kind``: "matched", "declined" or "unseen" and right; "wrong"; "crashed"; "slow"; "unstable": eager's own
    rounding decides its results; "torch" if plain torch.compile fails alike; "invalid" if eager does.
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
class Outcome:
    """What a call left: results, arguments, gradients."""

    values: list[Tensor]
    gradients: list[Tensor] = field(default_factory=list)


def _run(program: Program, given: Sequence[Tensor], gradients: bool) -> Outcome:
    if gradients:
        return _trained(program, given)
    with torch.no_grad():
        results = tensors(program(*given))
    return Outcome([*results, *given])


def _trained(program: Program, given: Sequence[Tensor]) -> Outcome:
    leaves = [x.requires_grad_() for x in given]
    results = tensors(program(*leaves))
    rng = torch.Generator().manual_seed(7)
    losses = [
        (x * (torch.randint(-128, 129, x.shape, generator=rng).to(x.dtype) / 64)).sum()  # in every dtype the same
        for x in results
        if x.requires_grad
    ]
    found = (
        torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True, materialize_grads=True)
        if losses
        else []
    )
    return Outcome([x.detach() for x in results], list(found))


def _copies(arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies with the strides and the aliases of the originals."""
    made: dict[int, Tensor] = {}
    for x in arguments:
        if id(x) not in made:
            (made[id(x)],) = copies([x])
            if x.storage_offset():
                made[id(x)] = torch.cat([x, x])[x.shape[0] :].detach()
    return tuple(made[id(x)] for x in arguments)


def gradients_beside(ours: Outcome, plain: Outcome) -> list[Tensor]:
    """Our gradients; where eager's results are not all finite, and one of its gradients is not, without what is not
    finite of ours in that one. The loss is lost then, and the op, which treats tokens by chunks, loses gradients of
    tokens too that eager's loop keeps (docs/soundness.md). What is finite in both is compared.
    """
    if all(bool(x.isfinite().all()) for x in plain.values):
        return ours.gradients
    if [x.shape for x in ours.gradients] != [x.shape for x in plain.gradients]:
        return ours.gradients
    return [
        x if bool(y.isfinite().all()) else torch.where(x.isfinite(), x, y)
        for x, y in zip(ours.gradients, plain.gradients, strict=True)
    ]


def _strides(ours: Outcome, plain: Outcome) -> str:
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
        forget()
        return Verdict(found.kind, found.detail, found.patterns, found.codes, time.monotonic() - started, found.call)

    def _judged(self, recipe: Recipe) -> Verdict:
        try:
            program = load(recipe.text, recipe.dtype, self.folder)
            with Narrowest() as seen:
                plain = [_run(program, _copies(recipe.arguments(call)), recipe.gradients) for call in recipe.calls]
        except Exception as error:  # noqa: BLE001 - whatever an edited text does
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        if not any(bool(x.isfinite().any()) for x in plain[0].values[:1]):
            return Verdict("invalid", "not finite")
        options: dict[str, Any] = {"kda.inner": recipe.inner}
        with collecting() as report:
            ours, error = self._compiled(recipe, program, "kda", options)
        patterns = tuple(match.pattern for match in report.matches)
        codes = tuple(sorted({rejection.code for rejection in report.rejections}))
        kind = "matched" if patterns else "declined" if codes else "unseen"
        for index, (one, other) in enumerate(zip(ours, plain, strict=False)):
            if problem := self._problem(recipe, index, one, other, seen.eps):
                blame = self._blame(recipe, program, index, problem, (one, other), seen.eps)
                return Verdict(blame, problem, patterns, codes, call=index)
        if error:
            _, alike = self._compiled(recipe, program, recipe.inner, {})
            return Verdict("torch" if alike else "crashed", error, patterns, codes, call=len(ours))
        return Verdict(kind, "", patterns, codes)

    def _blame(
        self, recipe: Recipe, program: Program, index: int, problem: str, found: tuple[Outcome, Outcome], eps: float
    ) -> str:
        """The kind of a program with a problem. Where strides alone differ, as where padding by an open number turns
        out to be none (docs/soundness.md), it is torch's own if Inductor alone, called as this backend was, gives ours.
        """
        if problem == UNSTABLE:
            return "unstable"
        ours, plain = found
        theirs, _ = self._compiled(recipe, program, recipe.inner, {})
        alike = len(theirs) > index and self._problem(recipe, index, theirs[index], plain, eps)
        if not alike and problem == _strides(ours, plain) and recipe.inner != "inductor":
            theirs, _ = self._compiled(recipe, program, "inductor", {})
            alike = len(theirs) > index and not self._problem(recipe, index, ours, theirs[index], eps)
        return "torch" if alike else "wrong"

    def _compiled(
        self, recipe: Recipe, program: Program, backend: str, options: dict[str, Any]
    ) -> tuple[list[Outcome], str]:
        """What each call left, and the error that came instead of the next."""
        torch._dynamo.reset()
        found: list[Outcome] = []
        compiled = torch.compile(program, backend=backend, options=options or None, dynamic=recipe.dynamic)
        try:
            for call in recipe.calls:
                found.append(_run(compiled, _copies(recipe.arguments(call)), recipe.gradients))
        except Exception as error:  # noqa: BLE001 - whatever reaches the user is the finding
            return found, f"{type(error).__name__}: {str(error)[:400]}"
        return found, ""

    def _problem(self, recipe: Recipe, index: int, ours: Outcome, plain: Outcome, eps: float) -> str:
        for what in ("values", "gradients"):
            one = ours.values if what == "values" else gradients_beside(ours, plain)
            other = getattr(plain, what)
            wide = what == "gradients" and recipe.dtype == "float64"
            error, bound = apart(one, other, SLOPES if wide else None), BOUND[recipe.dtype]
            if error <= bound or error <= (allowed := self._allowed(recipe, index, other, what)):
                continue
            narrow = eps > torch.finfo(getattr(torch, recipe.dtype)).eps
            alike = self._rounded_alike(recipe, index, what, one, other, eps) if narrow else None
            if alike:
                continue
            if alike is False or allowed == UNKNOWN:
                return UNSTABLE
            moved = self._moved(recipe, index, what, other, getattr(torch, recipe.dtype))
            if moved > DECIDED:
                return UNSTABLE
            if error <= FARTHER * moved:
                continue
            if eps == SINGLE and error <= min(SINGLES * self._moved(recipe, index, what, other, torch.float32), 1e-4):
                continue
            return f"call {index}: {what} differ by {error:.1e} (allowed {max(bound, allowed):.1e})"
        return _strides(ours, plain)

    def _rounded_alike(
        self, recipe: Recipe, index: int, what: str, ours: list[Tensor], plain: list[Tensor], eps: float
    ) -> bool | None:
        """Whether ours is about as near to the program without its roundings as eager is; None if nothing says so.

        With constants in their own dtypes, or, where those hardly count, without their roundings too. False where
        eager's roundings leave nothing to compare with.
        """
        for constants, farthest in ((False, HOPELESS), (True, min(ROUNDINGS * eps, HARDLY))):
            exact = self._unrounded(recipe, index, constants=constants)
            if exact is None:
                continue
            own, eagers = (from_exact(found, getattr(exact, what), plain) for found in (ours, plain))
            if eagers <= farthest and own <= max(BOUND[recipe.dtype], FARTHER * eagers):
                return True
            if eagers > farthest and not constants:
                return False
        return None

    def _allowed(self, recipe: Recipe, index: int, plain: list[Tensor], what: str) -> float:
        """What rounding may do: eager in the other precision says how much of it there is."""
        other = "float32" if recipe.dtype == "float64" else "float64"
        try:
            program = load(recipe.text, other, self.folder)
            given = _copies(recipe.arguments(recipe.calls[index], getattr(torch, other)))
            run = _run(program, given, recipe.gradients)
        except Exception:  # noqa: BLE001 - a text for one dtype only
            return 0.0
        double, single = (plain, getattr(run, what)) if recipe.dtype == "float64" else (getattr(run, what), plain)
        between = apart([x.double() for x in single], [x.double() for x in double])
        if between > DECIDED:
            return UNKNOWN
        return between * (2e-7 if recipe.dtype == "float64" else SINGLES)

    def _moved(self, recipe: Recipe, index: int, what: str, plain: list[Tensor], dtype: torch.dtype) -> float:
        """How far other roundings to a dtype move a call of eager's."""
        program, farthest = load(recipe.text, recipe.dtype, self.folder), 0.0
        for seed in range(SHAKES):
            with Shaken(dtype, seed):
                run = _run(program, _copies(recipe.arguments(recipe.calls[index])), recipe.gradients)
            farthest = max(farthest, apart(getattr(run, what), plain, SLOPES if what == "gradients" else None))
        return farthest

    def _unrounded(self, recipe: Recipe, index: int, *, constants: bool) -> Outcome | None:
        """A call in float64 throughout; None where it does not run so."""
        given = _copies(recipe.arguments(recipe.calls[index], torch.float64))
        try:
            program = load(recipe.text, "float64", self.folder)
            with unrounded(given, constants=constants):
                return _run(program, given, recipe.gradients)
        except Exception:  # noqa: BLE001 - a text that asks for a dtype
            return None
