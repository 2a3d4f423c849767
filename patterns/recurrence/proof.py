"""The proof: a region is believed to be the recurrence only if it computes the recurrence's numbers.

Most bindings are refuted by the first tokens of a run in float64 on random inputs, which many of them share. What is
left is run on ordinary numbers, which show that the region is finite, and compared with the token recurrence over a
prime field, exactly (``exact``). Where that cannot be done, because an operator has no meaning over a field, the region
is compared in float64 on ``probes`` of every kind: strong gates, gates of 0 and -inf, zero keys, closed and open write
gates. Numbers of a probe at which the region alone is not finite (a spelling that overflows) are not compared. No value
of the user's model is ever used. Operators with a threshold on data, which probes could miss, are part of no region.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.evaluate import PRECISE, TOLERANCE, one_thread, token_error
from kdacompile.patterns.engine.field import Silent
from kdacompile.patterns.engine.match import Verdict
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.reduced import CannotReduce, EvaluationError
from kdacompile.patterns.recurrence import exact
from kdacompile.patterns.recurrence.first_tokens import (
    Drawn,
    FirstRun,
    Runner,
    check_sizes,
    first_run,
    first_token_error,
    fit,
    recurrence,
)
from kdacompile.patterns.recurrence.probes import KINDS, probes
from kdacompile.patterns.recurrence.roles import AXES, Recurrence, RecurrenceCandidate, rows

ALIKE = 1e-2
"""Relative error of the first token up to which a binding is looked at further: what it lacks may be a decay."""


def prove(candidate: RecurrenceCandidate, *, wide: bool = False) -> Verdict[Recurrence]:
    """The first binding that survives, fully probed."""
    runner = Runner(candidate)
    if candidate.likely is not None:
        with one_thread():
            found = _at_once(candidate.likely, runner, wide=wide)
        if found is not None:
            return found
    refuted, bindings = _Refuted(), candidate.bindings
    while True:
        with one_thread():
            found, unseen, error = _first_that_holds(candidate, bindings, runner, refuted, wide=wide)
        if found is not None:
            return found
        if error is None:
            return refuted.verdict(runner.region.misled())
        if not runner.go_whole():
            large = "batch rows or heads are treated differently and the region is large ({})"
            reason = large if isinstance(error, CannotReduce) else "the region does not run on probes: {}"
            return Verdict(None, 0.0, reason.format(error))
        bindings = unseen  # what was refuted on few rows and heads is no more right on all of them


@dataclass
class _Refuted:
    """What came nearest of the bindings that do not hold."""

    best: float = float("inf")
    closest: str = ""
    differs: Verdict[Recurrence] | None = None

    def add(self, binding: Recurrence, verdict: Verdict[Recurrence]) -> None:
        if verdict.code == "field":
            self.differs = verdict
        if verdict.max_error < self.best or verdict.reason:
            reason = verdict.reason and f": {verdict.reason}"
            self.best, self.closest = verdict.max_error, _describe(binding) + reason

    def verdict(self, misled: list[Value]) -> Verdict[Recurrence]:
        """``misled``: constants that rounding makes other numbers of."""
        near = f"closest: {self.closest}, relative error {self.best:.1e}"
        dtypes = {str(value.dtype).removeprefix("torch.") for value in misled if value.dtype.itemsize < 4}
        why = f": what rounding to {min(dtypes)} makes of a constant are other numbers" if dtypes else ""
        return self.differs or Verdict(None, self.best, f"the region does not compute the recurrence{why} ({near})")


def _first_that_holds(
    candidate: RecurrenceCandidate,
    bindings: Iterable[Recurrence],
    runner: Runner,
    refuted: _Refuted,
    *,
    wide: bool,
) -> tuple[Verdict[Recurrence] | None, list[Recurrence], EvaluationError | None]:
    """The verdict on the first binding that holds, if one does; else those for which the region did not run, and why:
    a wrong reading cuts down what is no batch and no head.
    """
    drawn: Drawn = {}
    unseen: list[Recurrence] = []
    first: EvaluationError | None = None
    for binding in bindings:
        deadline.check()
        try:
            verdict = _judge(candidate, binding, runner, drawn, wide=wide)
        except EvaluationError as error:
            first = first or error
            unseen.append(binding)
            continue
        if verdict.binding is not None:
            return verdict, [], None
        refuted.add(binding, verdict)
    return None, unseen, first


def _judge(
    candidate: RecurrenceCandidate, binding: Recurrence, runner: Runner, drawn: Drawn, *, wide: bool
) -> Verdict[Recurrence]:
    """The verdict on one binding; one that the first run refutes has no reason."""
    first = first_run(candidate, binding, runner, drawn)
    least = float("inf")
    several = binding.writes > 1
    turns = (binding, binding.backwards()) if binding.sizes["T"] > 1 and not several else (binding,)
    for ordered in (ordered for turned in turns for ordered in turned.in_other_orders()):
        start = first_token_error(ordered, first)
        fitted, error = fit(ordered, first) if start < ALIKE else (None, start)
        least = min(least, error)
        constant = ordered.gate == "none" and "u" not in ordered.inputs and not several
        if fitted is None and constant and start < ALIKE:
            fitted, runner = _with_constant_decay(ordered, runner)
        if fitted is not None:
            return _probe_fully(fitted, runner, wide=wide)
    return Verdict(None, least)


def _at_once(binding: Recurrence, runner: Runner, *, wide: bool) -> Verdict[Recurrence] | None:
    """The verdict on a binding that holds, fully probed: the first tokens are read off the first of the probes."""
    sizes = _sizes(binding, runner)
    inputs = next(probes(binding, sizes, KINDS))
    try:
        results = runner(inputs)
        fitted, _ = fit(binding, FirstRun(inputs, results))
        verdict = None if fitted is None else _probe_fully(fitted, runner, wide=wide, first=results)
    except EvaluationError:
        return None
    return verdict if verdict is not None and verdict.binding is not None else None


def _describe(binding: Recurrence) -> str:
    return f"gate {binding.gate}, delta term {'on' if binding.delta else 'off'}"


# -- constant decays --------------------------------------------------------------------------------------------------


def _with_constant_decay(binding: Recurrence, runner: Runner) -> tuple[Recurrence | None, Runner]:
    """The binding with a decay per head that the graph makes from constants, and the runner it holds for: the
    constants may be decay tables, rounded to the dtype they are kept in.
    """
    response = _response(binding, runner)
    if response is None:
        return None, runner
    fitted = _with_decay(binding, response[0], runner)
    if fitted is None and (runner.tables() or runner.region.misled()) and bool((response[0] > 0).all()):
        logs = _log_decay(response)
        ideal = runner.with_exact_tables(logs) if torch.isfinite(logs).all() else None
        if ideal is not None:
            return _with_decay(binding.with_(rounded=True), logs.exp(), ideal), ideal
    return fitted, runner


def _response(binding: Recurrence, runner: Runner) -> Tensor | None:
    """What is left of the first token's write (one-token steps: of the given state) one, two, .. tokens later, per
    head: ``[tokens, H]``.
    """
    sizes = runner.sizes(binding, heads=True)
    impulse = {p: _impulse(p, sizes) for p in binding.inputs.values()}
    key = frozenset((p.value, *p.run_shape(sizes), *kind) for p, kind in impulse.items())
    if key not in runner.responses:
        drawn = {p.value: p.from_canonical(_drawn(p, kind[0], sizes)) for p, kind in impulse.items()}
        runner.responses[key] = runner(drawn)
    results = runner.responses[key]
    if sizes["T"] > 1:
        output = binding.output.to_canonical(results[0])[0, int(binding.reads != "after") :, :, 0]
        return output[1:] / output[:1] if len(output) > 1 else None
    if binding.final_state is not None and "initial_state" in binding.inputs:
        return binding.final_state.to_canonical(results[1])[:1, :, 0, 0]
    return None


def _impulse(placement: Placement, sizes: dict[str, int]) -> tuple[str, int, bool]:
    """What a role gets: "ones", "zeros", or ones for the first token alone, which is at one end of a dimension."""
    role, several = placement.role, sizes["T"] > 1
    if role in ("k", "v") and several and "T" in placement.axes:
        return "first", placement.axes.index("T"), placement.backwards
    nothing = role == "initial_state" if several else role in ("k", "v")
    return "zeros" if nothing else "ones", 0, False


def _drawn(placement: Placement, kind: str, sizes: dict[str, int]) -> Tensor:
    ones = torch.ones([sizes[axis] for axis in AXES[placement.role]], dtype=torch.float64)
    return _only_first(ones) if kind == "first" else ones * (kind == "ones")


def _log_decay(response: Tensor) -> Tensor:
    """Log decay per head from all of a response, later tokens weighing more: their rounding errs less per token."""
    tokens = torch.arange(1, len(response) + 1, dtype=torch.float64)[:, None]
    clear = (response > 1e-3).cummin(dim=0).values  # a NaN ends what can be read
    clear[0] = True
    weight = tokens.square() * clear
    return (response.clamp_min(1e-30).log() / tokens * weight).where(clear, 0.0).sum(0) / weight.sum(0)


def _with_decay(binding: Recurrence, decay: Tensor, runner: Runner) -> Recurrence | None:
    """The binding with this decay per head, if the first tokens agree with it."""
    in_range = bool(torch.isfinite(decay).all()) and bool((decay >= 0).all()) and bool((decay <= 1 + 1e-9).all())
    if not in_range or (decay - 1).abs().max() < 1e-12 or not decay.any():
        return None  # nothing decays, or each token stands alone
    decaying = binding.with_(gate="head", decay=tuple(decay.tolist()))
    probe = next(probes(decaying, runner.sizes(binding, heads=True), KINDS))
    fitted, _ = fit(decaying, FirstRun(probe, runner(probe)))
    return fitted


def _only_first(tensor: Tensor) -> Tensor:
    out = torch.zeros_like(tensor)
    out[:, 0] = tensor[:, 0]
    return out


# -- full probing -----------------------------------------------------------------------------------------------------


def _sizes(binding: Recurrence, runner: Runner) -> dict[str, int]:
    """Of the probes."""
    return dict(binding.sizes) if runner.affordable(binding) else runner.sizes(binding, heads=bool(binding.decay))


def _probe_fully(
    binding: Recurrence, runner: Runner, *, wide: bool, first: list[Tensor] | None = None
) -> Verdict[Recurrence]:
    """Compare over a prime field, exactly; where that cannot be done, on probes of every kind. ``first``: what the
    region yields on the first of them, where it has been run.
    """
    worst, count, silent = 0.0, 0, ""
    sizes = _sizes(binding, runner)
    kinds = KINDS * (4 if wide else 1)
    for count, (kind, inputs) in enumerate(zip(kinds, probes(binding, sizes, kinds), strict=True), 1):
        results = first if first is not None and count == 1 else runner(inputs)
        given = {p.role: rows(p, inputs[p.value]) for p in binding.inputs.values()}
        want, state = recurrence(binding, given)
        have = binding.output.to_canonical(results[0])
        check_sizes(have, want)
        if count == 1 and not torch.isfinite(have).all():
            return Verdict(None, float("inf"), "not finite on ordinary inputs")
        if kind == "later":
            have, want = have[:, : binding.tokens // 2], want[:, : binding.tokens // 2]
        errors = [token_error(have, want)] if torch.isfinite(have).any() else [0.0]
        if binding.final_state is not None and kind != "later":
            last = binding.final_state.to_canonical(results[1])
            check_sizes(last, state)
            if torch.isfinite(last).any():
                errors.append(token_error(last.flatten(2), state.flatten(2)))
        worst = max(worst, *errors)
        least = TOLERANCE if not silent else PRECISE * (100 if kind == "strong" else 1)
        if max(errors) > least:
            return Verdict(None, worst, f"probe {count} ({kind}) differs")
        if count == 1:
            found = _analysed(binding, runner, sizes, _Compared(inputs, want, worst), wide=wide)
            if isinstance(found, Verdict):
                return found
            silent = found
    return Verdict(binding, worst, silent=silent)


@dataclass(frozen=True)
class _Compared:
    """A run on ordinary inputs, the output of the recurrence, and how far the region's is from that."""

    inputs: dict[Value, Tensor]
    want: Tensor
    error: float


def _analysed(
    binding: Recurrence, runner: Runner, sizes: dict[str, int], run: _Compared, *, wide: bool
) -> Verdict[Recurrence] | str:
    """The verdict of the field, and of types where constants are rounded; what stood in the way where the field is
    silent and nothing speaks against the binding.
    """
    found = _exactly(binding, runner, sizes, wide=wide)
    holds = Verdict(binding, run.error)
    if found is False:
        return Verdict(None, run.error, DIFFERS, code="field")
    unit = runner.region.rounding()
    if unit and not _withstands(binding, runner, run, unit):
        return Verdict(None, run.error, "its constants, as the model rounds them, make another function of it")
    if found is True and not unit:
        return holds
    if found is not True and run.error > PRECISE:
        return Verdict(None, run.error, "numbers differ by more than rounding")
    untyped = exact.Check(binding, runner.region, sizes).untyped()
    if untyped:
        return Verdict(None, run.error, untyped)
    return holds if found is True else found


def _withstands(binding: Recurrence, runner: Runner, run: _Compared, unit: float) -> bool:
    """Whether the output stays what it is with constants as they are rounded, to ``unit``: none is all that is left
    when one is subtracted from another.
    """
    have = binding.output.to_canonical(runner.with_rounded_constants()(run.inputs)[0])
    return token_error(have, run.want) <= max(1e-3, 32 * unit)


DIFFERS = "the region and the recurrence are different functions: over a prime field their numbers differ"


def _exactly(binding: Recurrence, runner: Runner, sizes: dict[str, int], *, wide: bool) -> bool | str:
    """Whether the region is the recurrence, exactly; what stood in the way where that cannot be told."""
    for seed in range(3 if wide else 1):
        check = exact.Check(binding, runner.region, sizes, seed)
        try:
            if not check():
                return check.excuse or False
        except Silent as error:
            return str(error)
    return True
