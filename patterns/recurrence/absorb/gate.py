"""Gate activations: every gate function of the op's table that reads more than a log gate or a factor.

    g = -exp(A_log) * softplus(x)                       absorbed: gate_fn="softplus", A_log
    g = c * sigmoid(exp(A_log) * x),  c <= 0            absorbed: gate_fn="sigmoid", gate_scale=c, A_log
    g = c * logsigmoid(x),  c > 0                       absorbed: gate_fn="logsigmoid", gate_scale=c

in any spelling (``F.softplus``, its text ``where(x > 20, x, log(1 + exp(x)))``); A_log is one number per head and may
be absent. x and A_log are looked for above the gate, and the cone between them is run against the table's formula,
densely on both sides of every threshold (the branch of a ``where``, softplus' own). A bias added to x is
``dt_bias.py``'s, afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.lowering.gates import FORMS, GATE_FUNCTIONS, GateFunction, log_decay
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.recurrence.absorb.axes import POINTWISE, SAME_DATA
from kdacompile.patterns.recurrence.absorb.cone import Cone, Runner, agrees, allows, cones, holds_for, upstream
from kdacompile.patterns.recurrence.absorb.scope import Scope
from kdacompile.patterns.recurrence.absorb.turning_points import points
from kdacompile.patterns.recurrence.roles import RecurrenceMatch, in_role

NAMES = SAME_DATA | POINTWISE
FLAT = frozenset("zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor".split())
SIGNS = {"": 0, "lower bound": -1, "factor": 1}
"""What gate_scale must be, as the table has it: exactly one (0), negative or positive."""

ENOUGH = 2048
"""Probed logits per run, where the gate has that many."""


_SPELLINGS = {
    "softplus": "softplus; exp log; exp log1p; logaddexp; log_sigmoid_forward",
    "logsigmoid": "log_sigmoid_forward; softplus; sigmoid; exp log; exp log1p; logaddexp",
    "sigmoid": "sigmoid; tanh; exp div; exp reciprocal; exp pow",
}
"""Operators that spell a function, set by set: a cone without any is not run. One that is not listed is always run."""


def may_compute(cone: Cone, function: str) -> bool:
    """True if the cone has the operators (all of one set) that one of the function's spellings has."""
    sets = _SPELLINGS.get(function, "").split("; ")
    return any(frozenset(names.split()) <= cone.names for names in sets)


def absorb_gate(match: RecurrenceMatch, scope: Scope) -> RecurrenceMatch | None:
    g, binding = match.inputs.get("g"), match.binding
    if g is None or binding.gate not in ("token", "channel") or binding.gate_fn not in FORMS:
        return None
    if "rate" in match.inputs or binding.decay:
        return None
    for function in GATE_FUNCTIONS.values():
        if function.name in FORMS:
            continue
        for cone in _cones(g, scope, match.sizes, function):
            scale = _scale(cone, match, function) if _plausible(cone, match) else None
            if scale is not None:
                moved = {"g": cone.sources[0]}
                if len(cone.sources) > 1:
                    moved["A_log"] = in_role(cone.sources[1], "A_log")
                options = {"gate_fn": function.name, "gate_scale": scale, "gate_rate": 1.0}
                return match.taking(f"gate_{function.name}", moved, **options)
    return None


def _cones(gate: Placement, scope: Scope, sizes: dict[str, int], function: GateFunction) -> Iterator[Cone]:
    """Cones with a rate first: without one, ``rate * x`` would be the logit."""
    if function.parametric:
        above = upstream(gate.value, allows(scope, NAMES))
        rates = [value for value in above if any(user.name == "exp" for user in value.users) and scope.holds(value)]
        if rates:
            yield from cones(gate, scope, sizes, NAMES, rates)
    yield from cones(gate, scope, sizes, NAMES)


def _plausible(cone: Cone, match: RecurrenceMatch) -> bool:
    logit = cone.sources[0].axes
    if match.binding.gate == "channel" and match.sizes["K"] > 1 and not {"K", "*"} & set(logit):
        return False
    return len(cone.sources) == 1 or set(cone.sources[1].axes) <= set("H.")


def _is_flat(value: Value) -> bool:
    """True for a constant with one value throughout: a threshold of its own per channel could hide from the probes."""
    while value.op is not None and value.op.name in SAME_DATA:
        value = value.op.reads[0]
    return math.prod(value.shape) == 1 or (value.op is not None and value.op.name in FLAT)


def holds_everywhere(
    cone: Cone, function: str, sizes: dict[str, int], heads: int, check: Callable[[Runner, Tensor], bool]
) -> bool:
    """``check`` of a cone with logits on all sides of its turning points; False for one that is not the function."""
    flat = all(_is_flat(read) for op in cone.ops for read in op.reads if read.const)
    given = points(cone) if flat and may_compute(cone, function) else None
    if given is None:
        return False
    tokens = -(-ENOUGH // heads)
    runner = Runner(cone, sizes, at_most={"B": -(-tokens // sizes["T"]), "T": tokens})
    return holds_for(runner, lambda run: check(run, given))


def logits(run: Runner, given: Tensor) -> Iterator[Tensor]:
    """All of them, as many at once as a run takes, in the canonical shape of its source."""
    shape = run.shape(0)
    count = math.prod(shape)
    for start in range(0, len(given), count):
        yield given[(torch.arange(count) + start) % len(given)].reshape(shape)


def _scale(cone: Cone, match: RecurrenceMatch, function: GateFunction) -> float | None:
    """The scale with which the cone is the activation, if it is."""
    heads = match.sizes["H"] * (match.sizes["K"] if match.binding.gate == "channel" else 1)
    found: list[float] = []
    alike: list[int] = []
    sign = SIGNS[function.scale]

    def check(run: Runner, given: Tensor) -> bool:
        found.clear()
        for (turn, x), scaled in product(enumerate(logits(run, given)), (False, True)[: len(cone.sources)]):
            rate = None if len(cone.sources) == 1 else _rates(run, turn)
            by: Tensor | float = 1.0 if rate is None else rate.reshape(1, 1, -1, 1)
            x = x / by if scaled else x  # what is given are logits times the rate
            have = run(x) if rate is None else run(x, rate.log())
            have = have.log() if match.binding.gate_fn == "factor" else have * match.binding.gate_rate
            wanted = _wanted(x, by, function.name)
            if not found:
                found.append(_fitted(have, wanted[0], sign))
                alike[:] = range(len(wanted))
            absolute = 1e-14 * max(1.0, abs(found[0]))
            alike[:] = [form for form in alike if agrees(have, wanted[form] * found[0], absolute=absolute)]
            if not alike:
                return False
        return sign == 0 or found[0] * sign > 0.0

    return found[0] if holds_everywhere(cone, function.name, match.sizes, heads, check) else None


def _wanted(x: Tensor, rate: Tensor | float, function: str) -> list[Tensor]:
    """The log decay, and the same with or without the branch of ``F.softplus``, which is x itself from 20 on."""
    other = {"softplus": lambda: -rate * torch.logaddexp(x, torch.zeros_like(x)), "logsigmoid": lambda: -F.softplus(-x)}
    return [log_decay(x, rate, function, 1.0), *(form() for name, form in other.items() if name == function)]


def _rates(run: Runner, seed: int) -> Tensor:
    """One per head."""
    noise = torch.randn(run.shape(1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (0.7 * noise).exp()


def _fitted(have: Tensor, want: Tensor, sign: int) -> float:
    """The factor between two tensors, as the number that was probably written."""
    if sign == 0:
        return 1.0
    have, want = torch.broadcast_tensors(have, want)
    some = torch.isfinite(have)
    raw = float((have[some] * want[some]).sum() / want[some].square().sum().clamp_min(1e-300))
    return float(f"{raw:.12g}")
