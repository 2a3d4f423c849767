"""A region run on few rows and heads, and its first tokens, which refute most of what it might be.

Most readings of a region are wrong, and all of them are told apart by one run on numbers that suit any role: the first
token shows which tensor is which, a few more show what the gate does. Readings share the run and what they read of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.evaluate import PRECISE, TOLERANCE, Region, token_error
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.reduced import CannotReduce, EvaluationError
from kdacompile.patterns.engine.vocabulary import LAYOUT
from kdacompile.patterns.recurrence import tables
from kdacompile.patterns.recurrence.definition import token_recurrence
from kdacompile.patterns.recurrence.roles import AXES, READ, Recurrence, RecurrenceCandidate, rows

AFFORDABLE = 1 << 22
"""Numbers a region may compute for batch and heads to be left as they are."""

WHOLE_LIMIT = 1 << 26
"""Largest tensor (elements) for which a region whose heads cannot be cut down is still run whole."""


class Runner:
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

    def with_exact_tables(self, logs: Tensor) -> Runner | None:
        """The same region with decay tables as they were before rounding (``logs``: log decay per head): all that come
        with data, or all that the model computes in so few bits that they are other numbers. None if some such
        constant is none.
        """
        for values in (self.tables(), self.region.misled()):
            found = {value: tables.ideal(self.region.both(value)[0], logs) for value in values}
            instead = {value: table for value, table in found.items() if table is not None}
            if instead and len(instead) == len(found):
                return self._other(instead=instead)
        return None

    def with_rounded_constants(self) -> Runner:
        """The same region with its constants as the model computes them."""
        return self._other(rounds=True)

    def _other(self, **options: Any) -> Runner:
        other = Runner(self.candidate)
        other.region = Region(list(self.candidate.ops), self.candidate.cut, self.candidate.outputs, **options)
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


@dataclass(frozen=True)
class FirstRun:
    inputs: dict[Value, Tensor]
    results: list[Tensor]
    errors: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])
    """Of the first token, by what it depends on."""
    laid: dict[Placement, Tensor] = field(default_factory=dict[Placement, Tensor])
    """Inputs in their roles' own order, which readings share, as they do the corners."""
    corners: dict[tuple[Placement, int, bool], Tensor] = field(default_factory=dict)

    def rows(self, placement: Placement) -> Tensor:
        if placement not in self.laid:
            self.laid[placement] = rows(_forwards(placement), self.inputs[placement.value])
        return self.laid[placement]

    def corner(self, placement: Placement, data: Tensor, tokens: int, *, backwards: bool) -> Tensor:
        """The first and the last request and head, four columns, and so many tokens from where time begins."""
        key = placement, tokens, backwards
        if key not in self.corners:
            self.corners[key] = _cut(data, placement.role, tokens, backwards=backwards)
        return self.corners[key]


_Shapes = tuple[tuple[int, ...], ...]
Drawn = dict[_Shapes, FirstRun | EvaluationError]


def first_run(candidate: RecurrenceCandidate, binding: Recurrence, runner: Runner, drawn: Drawn) -> FirstRun:
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
            drawn[key] = FirstRun(inputs, runner(inputs))
        except EvaluationError as error:
            drawn[key] = error
    found = drawn[key]
    if isinstance(found, Exception):
        raise found
    return found


def recurrence(binding: Recurrence, given: dict[str, Tensor], steps: int | None = None) -> tuple[Tensor, Tensor]:
    return token_recurrence(
        given["q"],
        given["k"],
        given["v"],
        _decay(binding, given),
        given.get("beta"),
        given.get("initial_state"),
        bonus=given.get("u"),
        reads=binding.reads,
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


def first_token_error(binding: Recurrence, first: FirstRun) -> float:
    """How far the first token, which no decay has touched yet, is from what the binding has it be, up to a scale.

    This alone refutes most, and is worked out once for bindings that differ in what the first token does not read. A
    state that is given decays before the first token: by a factor per head, which is fitted, where there is no gate
    among the inputs; 0 with one.
    """
    state = binding.inputs.get("initial_state")
    if binding.reads != "after" and "u" not in binding.inputs:
        return _error_before_any_write(binding, first)
    if state is not None and binding.gate != "none":
        return 0.0
    read = {role: placement for role, placement in binding.inputs.items() if role not in ("g", "rate")}
    key = frozenset(read.values()), binding.output, binding.delta and state is not None
    if key not in first.errors:
        own = binding.with_(inputs=read)
        want, have = _corner(own, first, 1)
        if state is None:
            want = want * (have * want).sum() / (want * want).sum()
        else:
            empty = {**first.inputs, state.value: torch.zeros_like(first.inputs[state.value])}
            written, _ = _corner(own, FirstRun(empty, first.results), 1)
            want = _fitted_per_head(have, written, want - written)
        first.errors[key] = token_error(have, want)
    return first.errors[key]


def _error_before_any_write(binding: Recurrence, first: FirstRun) -> float:
    """The same where a token does not read its own write: there is nothing to be read, or the state that is given."""
    key = frozenset(binding.inputs.values()), binding.output, binding.reads
    if key not in first.errors and "initial_state" not in binding.inputs:
        have = first.corner(
            binding.output,
            _forwards(binding.output).to_canonical(first.results[0]),
            1,
            backwards=binding.output.backwards,
        )
        first.errors[key] = float(have.norm() / first.results[0].norm())
    elif key not in first.errors:
        want, have = _corner(binding, first, 1)
        first.errors[key] = token_error(have, _fitted_per_head(have, want))
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


def fit(binding: Recurrence, run: FirstRun) -> tuple[Recurrence | None, float]:
    """The binding with its scale, if the first tokens agree with it."""
    error = float("inf")
    for steps in (3, 80):
        want, have = _corner(binding, run, steps)
        power = (want * want).sum()
        scale = float((have * want).sum() / power) if power > 0 else 1.0
        if not math.isfinite(scale) or scale == 0.0:
            return None, error
        error = token_error(have, want * scale)
        if error > TOLERANCE:
            return None, error
    return binding.with_(scale=_tidy(binding.scale * scale, binding.sizes["K"])), error


def _corner(binding: Recurrence, run: FirstRun, tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of the first and the last request, in the first and the last head and in four columns: as the
    recurrence and the region have them.

    A wrong binding of a model's real sizes can make the state very large; this is all of it that most need.
    """
    backwards = binding.output.backwards
    whole = {role: run.rows(placement) for role, placement in binding.inputs.items()}
    have = _forwards(binding.output).to_canonical(run.results[0])
    check_sizes(have, whole["v"][:, : binding.tokens].expand(*whole["q"].shape[:2], -1, -1))
    given: dict[str, Tensor] = {}
    for role, data in whole.items():
        steps = tokens if role in READ else tokens * binding.writes
        given[role] = run.corner(binding.inputs[role], data, steps, backwards=backwards)
    heads = have.shape[2]
    small = binding.with_(decay=binding.decay[: heads : max(1, heads - 1)]) if binding.decay else binding
    return recurrence(small, given, tokens)[0], run.corner(binding.output, have, tokens, backwards=backwards)


def _forwards(placement: Placement) -> Placement:
    return replace(placement, backwards=False) if placement.backwards else placement


def _cut(data: Tensor, role: str, steps: int, *, backwards: bool) -> Tensor:
    order = AXES[role]
    for axis in "BGH":  # the last value head reads the last key head
        dim, last = order.find(axis), data.shape[order.find(axis)] - 1
        data = data[(slice(None),) * dim + (slice(None, None, last),)] if dim >= 0 < last else data
    data = data[..., :4] if "V" in order else data
    if "T" not in order:
        return data
    return data[:, -steps:].flip(1) if backwards else data[:, :steps]


def check_sizes(have: Tensor, want: Tensor) -> None:
    """CannotReduce where a result is not cut down as the binding has it: sizes may be equal by chance."""
    if have.shape != want.shape:
        raise CannotReduce(f"a result has the sizes {list(have.shape)}, that of the recurrence {list(want.shape)}")


def _tidy(scale: float, key_size: int) -> float:
    """The intended number behind a fitted one: 1, K ** -0.5, or what was fitted."""
    for nice in (1.0, key_size**-0.5, 1.0 / key_size):
        if abs(scale - nice) < PRECISE * nice:
            return nice
    return scale
