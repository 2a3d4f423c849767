"""The proof: a region is believed to be the recurrence only if it computes the recurrence's numbers.

The region is run in float64 on random inputs and compared, token by token, with the token recurrence. Inputs cover
mild and strong gates, gates of 0 and -inf, zero keys, and closed and open write gates; no value of the user's model is
ever used. Where the region itself is not finite (a spelling that overflows) there is nothing to compare: the
recurrence is. Operators that random inputs could miss (thresholds, tiny constants) never reach this file: ``patterns``
turns them away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.evaluate import PRECISE, TOLERANCE, EvaluationError, Region, one_thread, token_error
from kdacompile.patterns.engine.field import Silent
from kdacompile.patterns.engine.match import Verdict
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.reduced import CannotReduce
from kdacompile.patterns.engine.vocabulary import LAYOUT
from kdacompile.patterns.recurrence import exact, tables
from kdacompile.patterns.recurrence.definition import token_recurrence
from kdacompile.patterns.recurrence.probes import KINDS, probes
from kdacompile.patterns.recurrence.roles import AXES, READ, Recurrence, RecurrenceCandidate, rows

ALIKE = 1e-2
"""Relative error of the first token up to which a binding is looked at further: what it lacks may be a decay."""

AFFORDABLE = 1 << 22
"""Numbers a region may compute for batch and heads to be left as they are."""

WHOLE_LIMIT = 1 << 26
"""Largest tensor (elements) for which a region whose heads cannot be cut down is still run whole."""


class _Runner:
    """Runs a candidate's region, on few batch rows and heads if it allows that, else whole."""

    def __init__(self, candidate: RecurrenceCandidate) -> None:
        self.candidate = candidate
        self.region = Region(list(candidate.ops), candidate.cut, candidate.outputs)
        self.whole = False
        self.responses: dict[frozenset[tuple[object, ...]], list[Tensor]] = {}
        """Results for the first token's write alone, by what each input was: readings of equal sizes share them."""

    def tables(self) -> list[Value]:
        """Constants of the region that come with data: literals, and what a module owns."""
        return list({read: None for op in self.region.ops for read in op.reads if read.payload is not None})

    def with_exact_tables(self, logs: Tensor) -> _Runner | None:
        """The same region with decay tables as they were before rounding (``logs``: log decay per head); None if some
        constant of the region is none of these.
        """
        instead: dict[Value, Tensor] = {}
        for value in self.tables():
            assert value.payload is not None
            found = tables.ideal(value.payload.detach().cpu(), logs)
            if found is None:
                return None
            instead[value] = found
        other = _Runner(self.candidate)
        other.region = Region(list(self.candidate.ops), self.candidate.cut, self.candidate.outputs, instead)
        other.whole = self.whole
        return other

    def sizes(self, binding: Recurrence, *, heads: bool = False) -> dict[str, int]:
        sizes = dict(binding.sizes)
        if not self.whole:
            sizes["B"] = min(sizes["B"], 2)
            groups = sizes["H"] // sizes["G"]
            sizes["G"] = sizes["G"] if heads else min(sizes["G"], 2)
            sizes["H"] = sizes["G"] * groups
        return sizes

    def __call__(self, tensors: dict[Value, Tensor]) -> list[Tensor]:
        return self.region([tensors[value] for value in self.candidate.cut])

    def affordable(self, binding: Recurrence) -> bool:
        """Whether batch and heads need not be cut down: what the region computes is small as it is."""
        numbers = sum(math.prod(out.shape) for op in self.candidate.ops if op.name not in LAYOUT for out in op.outs)
        return numbers + math.prod(binding.sizes[axis] for axis in "BTHKV") <= AFFORDABLE

    def go_whole(self) -> bool:
        """Give up on cutting down; False if the region is too large to run as it is."""
        largest = max(math.prod(out.shape) for op in self.candidate.ops for out in op.outs)
        if self.whole or largest > WHOLE_LIMIT:
            return False
        self.whole = True
        return True


def prove(candidate: RecurrenceCandidate, *, wide: bool = False) -> Verdict[Recurrence]:
    """The first binding that survives, fully probed."""
    runner = _Runner(candidate)
    while True:
        try:
            with one_thread():
                return _prove(candidate, runner, wide=wide)
        except CannotReduce as error:
            if not runner.go_whole():
                return Verdict(
                    None, 0.0, f"batch rows or heads are treated differently and the region is large ({error})"
                )
        except EvaluationError as error:
            if not runner.go_whole():
                return Verdict(None, 0.0, f"the region does not run on probes: {error}")


def _prove(candidate: RecurrenceCandidate, runner: _Runner, *, wide: bool) -> Verdict[Recurrence]:
    best, closest = float("inf"), ""
    drawn: _Drawn = {}
    refused: EvaluationError | None = None
    differs: Verdict[Recurrence] | None = None
    for binding in candidate.bindings:
        deadline.check()
        try:
            verdict = _judge(candidate, binding, runner, drawn, wide=wide)
        except EvaluationError as error:
            refused = refused or error  # a wrong reading cuts down what is no batch and no head
            continue
        if verdict.binding is not None:
            return verdict
        if verdict.code == "field":
            differs = verdict
        if verdict.max_error < best or verdict.reason:
            best, closest = verdict.max_error, _describe(binding) + (verdict.reason and f": {verdict.reason}")
    if refused is not None:
        raise refused
    return differs or Verdict(
        None, best, f"the region does not compute the recurrence (closest: {closest}, relative error {best:.1e})"
    )


def _judge(
    candidate: RecurrenceCandidate, binding: Recurrence, runner: _Runner, drawn: _Drawn, *, wide: bool
) -> Verdict[Recurrence]:
    """One binding: most are refuted by a first run that many share; without a reason, if they are."""
    first = _first_run(candidate, binding, runner, drawn)
    inputs, results = first.inputs, first.results
    least = float("inf")
    several = binding.writes > 1
    for turned in (binding, binding.backwards()) if binding.sizes["T"] > 1 and not several else (binding,):
        start = _first_token_error(turned, first)
        fitted, error = _fit(turned, inputs, results) if start < ALIKE else (None, start)
        least = min(least, error)
        constant = turned.gate == "none" and "u" not in turned.inputs and not several
        if fitted is None and constant and start < ALIKE:
            fitted, runner = _with_constant_decay(turned, runner)
        if fitted is not None:
            return _probe_fully(fitted, runner, wide=wide)
    return Verdict(None, least)


def _describe(binding: Recurrence) -> str:
    return f"gate {binding.gate}, delta term {'on' if binding.delta else 'off'}"


# -- the first, role-free run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FirstRun:
    inputs: dict[Value, Tensor]
    results: list[Tensor]
    errors: dict[tuple[frozenset[Placement], Placement, bool], float] = field(default_factory=dict)
    """Of the first token, by what it depends on."""


_Shapes = tuple[tuple[int, ...], ...]
_Drawn = dict[_Shapes, _FirstRun | EvaluationError]


def _first_run(candidate: RecurrenceCandidate, binding: Recurrence, runner: _Runner, drawn: _Drawn) -> _FirstRun:
    """Region outputs on inputs that suit any role, shared by the bindings that agree on batch and heads."""
    sizes = runner.sizes(binding)
    shapes = {placement.value: tuple(placement.run_shape(sizes)) for placement in binding.inputs.values()}
    full = {
        p.value: [
            p.value.shape[i] if c == "=" else s for i, (c, s) in enumerate(zip(p.axes, shapes[p.value], strict=True))
        ]
        for p in binding.inputs.values()
    }
    key = tuple(shapes[value] for value in candidate.cut)
    if key not in drawn:
        generator = torch.Generator().manual_seed(len(drawn))
        gate = binding.inputs.get("g") if binding.gate_fn == "log" else None
        inputs: dict[Value, Tensor] = {}
        for value in candidate.cut:
            noise = torch.randn(shapes[value], generator=generator, dtype=torch.float64)
            log_gate = -0.3 / binding.gate_rate * noise.abs()
            inputs[value] = (log_gate if gate and value is gate.value else 0.4 * noise).expand(full[value])
        try:
            drawn[key] = _FirstRun(inputs, runner(inputs))
        except EvaluationError as error:
            drawn[key] = error
    found = drawn[key]
    if isinstance(found, Exception):
        raise found
    return found


def _recurrence(binding: Recurrence, given: dict[str, Tensor], steps: int | None = None) -> tuple[Tensor, Tensor]:
    return token_recurrence(
        given["q"],
        given["k"],
        given["v"],
        _decay(binding, given),
        given.get("beta"),
        given.get("initial_state"),
        bonus=given.get("u"),
        writes=binding.writes,
        delta=binding.delta,
        scale=binding.scale,
        steps=steps,
    )


def _decay(binding: Recurrence, given: dict[str, Tensor]) -> Tensor | None:
    """The decay factor per token, head and channel (broadcast where the gate is)."""
    if binding.decay:
        heads = given["v"].shape[2]
        return torch.tensor(binding.decay, dtype=torch.float64)[:heads].reshape(1, 1, -1, 1)
    g = given.get("g")
    if g is None:
        return None
    if "rate" in given:
        g = g * given["rate"][:, None]
    return (g * binding.gate_rate).exp() if binding.gate_fn == "log" else g


def _first_token_error(binding: Recurrence, first: _FirstRun) -> float:
    """How far the first token, which no decay has touched yet, is from what the binding has it be, up to a scale.

    This alone refutes most, and is worked out once for bindings that differ in what the first token does not read. A
    state that is given decays before the first token: by a factor per head, which is fitted, where there is no gate
    among the inputs; 0 with one.
    """
    state = binding.inputs.get("initial_state")
    if state is not None and binding.gate != "none":
        return 0.0
    read = {role: placement for role, placement in binding.inputs.items() if role not in ("g", "rate")}
    key = frozenset(read.values()), binding.output, binding.delta and state is not None
    if key not in first.errors:
        own = binding.with_(inputs=read)
        want, have = _corner(own, first.inputs, first.results, 1)
        if state is None:
            want = want * (have * want).sum() / (want * want).sum()
        else:
            empty = {**first.inputs, state.value: torch.zeros_like(first.inputs[state.value])}
            written, _ = _corner(own, empty, first.results, 1)
            want = _fitted_per_head(have, written, want - written)
        first.errors[key] = token_error(have, want)
    return first.errors[key]


def _fitted_per_head(have: Tensor, *parts: Tensor) -> Tensor:
    """The multiples of the parts that come nearest, of all ``[B, 1, H, V]``: one number for each part and head."""
    columns = torch.stack([part.movedim(2, 0).flatten(1) for part in parts], dim=-1)
    wanted = have.movedim(2, 0).flatten(1)[..., None]
    if not (columns.isfinite().all() and wanted.isfinite().all()):
        return have  # nothing can be fitted, so nothing is refuted here
    near = columns @ torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
    heads = have.movedim(2, 0)
    return near.reshape(heads.shape).movedim(0, 2)


def _fit(binding: Recurrence, inputs: dict[Value, Tensor], results: list[Tensor]) -> tuple[Recurrence | None, float]:
    """The binding with its scale, if the first tokens agree with it."""
    error = float("inf")
    for steps in (3, 80):
        want, have = _corner(binding, inputs, results, steps)
        power = (want * want).sum()
        scale = float((have * want).sum() / power) if power > 0 else 1.0
        if not torch.isfinite(torch.tensor(scale)) or scale == 0.0:
            return None, error
        error = token_error(have, want * scale)
        if error > TOLERANCE:
            return None, error
    return binding.with_(scale=_tidy(binding.scale * scale, binding.sizes["K"])), error


def _corner(
    binding: Recurrence, inputs: dict[Value, Tensor], results: list[Tensor], tokens: int
) -> tuple[Tensor, Tensor]:
    """The first tokens of the first and the last request, in the first and the last head and in four columns: as the
    recurrence and the region have them.

    A wrong binding of a model's real sizes can make the state very large; this is all of it that most need.
    """
    whole = {p.role: rows(replace(p, backwards=False), inputs[p.value]) for p in binding.inputs.values()}
    have = replace(binding.output, backwards=False).to_canonical(results[0])
    _check_sizes(have, whole["v"][:, : binding.tokens].expand(*whole["q"].shape[:2], -1, -1))

    def cut(data: Tensor, role: str) -> Tensor:
        order, steps = AXES[role], tokens if role in READ else tokens * binding.writes
        for axis in "BGH":  # the last value head reads the last key head
            dim, last = order.find(axis), data.shape[order.find(axis)] - 1
            data = data[(slice(None),) * dim + (slice(None, None, last),)] if dim >= 0 < last else data
        data = data[..., :4] if "V" in order else data
        if "T" not in order:
            return data
        return data[:, -steps:].flip(1) if binding.output.backwards else data[:, :steps]

    given = {role: cut(data, role) for role, data in whole.items()}
    heads = have.shape[2]
    small = binding.with_(decay=binding.decay[: heads : max(1, heads - 1)])
    return _recurrence(small, given, tokens)[0], cut(have, "o")


def _check_sizes(have: Tensor, want: Tensor) -> None:
    """CannotReduce where a result is not cut down as the binding has it: sizes may be equal by chance."""
    if have.shape != want.shape:
        raise CannotReduce(f"a result has the sizes {list(have.shape)}, that of the recurrence {list(want.shape)}")


def _tidy(scale: float, key_size: int) -> float:
    """The intended number behind a fitted one: 1, K ** -0.5, or what was fitted."""
    for nice in (1.0, key_size**-0.5, 1.0 / key_size):
        if abs(scale - nice) < PRECISE * nice:
            return nice
    return scale


# -- constant decays --------------------------------------------------------------------------------------------------


def _with_constant_decay(binding: Recurrence, runner: _Runner) -> tuple[Recurrence | None, _Runner]:
    """The binding with a decay per head that the graph makes from constants, and the runner it holds for: the
    constants may be decay tables, rounded to the dtype they are kept in.
    """
    response = _response(binding, runner)
    if response is None:
        return None, runner
    fitted = _with_decay(binding, response[0], runner)
    if fitted is None and runner.tables() and bool((response[0] > 0).all()):
        logs = _log_decay(response)
        ideal = runner.with_exact_tables(logs) if torch.isfinite(logs).all() else None
        if ideal is not None:
            return _with_decay(binding.with_(rounded=True), logs.exp(), ideal), ideal
    return fitted, runner


def _response(binding: Recurrence, runner: _Runner) -> Tensor | None:
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
        output = binding.output.to_canonical(results[0])
        return output[0, 1:, :, 0] / output[0, :1, :, 0]
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


def _with_decay(binding: Recurrence, decay: Tensor, runner: _Runner) -> Recurrence | None:
    """The binding with this decay per head, if the first tokens agree with it."""
    in_range = bool(torch.isfinite(decay).all()) and bool((decay >= 0).all()) and bool((decay <= 1 + 1e-9).all())
    if not in_range or (decay - 1).abs().max() < 1e-12 or not decay.any():
        return None  # nothing decays, or each token stands alone
    decaying = binding.with_(gate="head", decay=tuple(decay.tolist()))
    probe = next(probes(decaying, runner.sizes(binding, heads=True), KINDS))
    fitted, _ = _fit(decaying, probe, runner(probe))
    return fitted


def _only_first(tensor: Tensor) -> Tensor:
    out = torch.zeros_like(tensor)
    out[:, 0] = tensor[:, 0]
    return out


# -- full probing -----------------------------------------------------------------------------------------------------


def _probe_fully(binding: Recurrence, runner: _Runner, *, wide: bool) -> Verdict[Recurrence]:
    """Compare over a prime field, exactly; where that cannot be done, on probes of every kind."""
    worst, count, silent = 0.0, 0, ""
    sizes = runner.sizes(binding, heads=bool(binding.decay))
    if runner.affordable(binding):
        sizes = dict(binding.sizes)
    kinds = KINDS * (4 if wide else 1)
    for count, (kind, inputs) in enumerate(zip(kinds, probes(binding, sizes, kinds), strict=True), 1):
        results = runner(inputs)
        given = {p.role: rows(p, inputs[p.value]) for p in binding.inputs.values()}
        want, state = _recurrence(binding, given)
        have = binding.output.to_canonical(results[0])
        _check_sizes(have, want)
        if count == 1 and not torch.isfinite(have).all():
            return Verdict(None, float("inf"), "not finite on ordinary inputs")
        if kind == "later":
            have, want = have[:, : binding.tokens // 2], want[:, : binding.tokens // 2]
        errors = [token_error(have, want)] if torch.isfinite(have).any() else [0.0]
        if binding.final_state is not None and kind != "later":
            last = binding.final_state.to_canonical(results[1])
            _check_sizes(last, state)
            if torch.isfinite(last).any():
                errors.append(token_error(last.flatten(2), state.flatten(2)))
        worst = max(worst, *errors)
        least = TOLERANCE if not silent else PRECISE * (100 if kind == "strong" else 1)
        if max(errors) > least:
            return Verdict(None, worst, f"probe {count} ({kind}) differs")
        if count == 1:
            found = _exactly(binding, runner, sizes, wide=wide)
            if found is True:
                return Verdict(binding, worst, probes=1)
            if found is False:
                return Verdict(None, worst, DIFFERS, code="field")
            silent = found
            if worst > PRECISE:
                return Verdict(None, worst, "numbers differ by more than rounding")
            untyped = exact.Check(binding, runner.region, sizes).untyped()
            if untyped:
                return Verdict(None, worst, untyped)
    return Verdict(binding, worst, probes=count, silent=silent)


DIFFERS = "the region and the recurrence are different functions: over a prime field their numbers differ"


def _exactly(binding: Recurrence, runner: _Runner, sizes: dict[str, int], *, wide: bool) -> bool | str:
    """Whether the region is the recurrence, exactly; what stood in the way where that cannot be told."""
    for seed in range(3 if wide else 1):
        check = exact.Check(binding, runner.region, sizes, seed)
        try:
            if not check():
                return check.excuse or False
        except Silent as error:
            return str(error)
    return True
