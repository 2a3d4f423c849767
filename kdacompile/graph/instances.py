"""Symbolic sizes: a match must hold at every size the compiled graph will be called with, not only at today's.

The functional graph is one concrete instance, at the sizes it was captured with, and a proof speaks about that instance
alone. So where a region has symbolic sizes it is read and proven again at others that the graph's guards
allow: once near the captured sizes, and once beyond every number the region's code mentions (a window of 256 tokens
does not show at 20). The same Dynamo nodes must play the same roles with the same options, or the region declines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from kdacompile import compat
from kdacompile.graph.build import Held, functional_graph
from kdacompile.graph.ir import Graph, Op, Value, ancestors
from kdacompile.patterns.engine.match import Fused
from kdacompile.patterns.engine.obstacle import Obstacle
from kdacompile.patterns.recurrence.candidates import Candidate, read_region
from kdacompile.patterns.recurrence.regions import Group, find_groups
from kdacompile.patterns.recurrence.roles import Hypothesis, Placement

Sizes = dict[Any, int]
"""A value for each symbol."""

Ties = Mapping[Any, Any]
"""Symbols that have the size of another one."""

NO_TIES: Ties = {}

Recognise = Callable[[Graph, Candidate], "Fused | None"]
"""Proof and absorption of a candidate, as for the captured instance."""

Move = Callable[[Candidate, Graph, Graph, "list[Group]"], "Candidate | str"]
"""A candidate of one functional graph in another (here, there, there's groups); else the reason it is not there."""

FARTHEST = 4096
"""The largest number in a region's code beyond which another instance is still tried."""

_STEPS = (1, 2, 3, 5, 7, 4, 8, 16, 32, 64, 128, 256, -1, -2, -3, -4, -8, -16, -32, -64)
_MAX_TRIES = 4096


class CannotInstantiate(Exception):
    """No other sizes are found that the graph's guards allow."""


class Instances:
    """Functional graphs of one graph at other sizes, built when first needed."""

    def __init__(self, gm: fx.GraphModule, held: Held | None = None) -> None:
        self.gm = gm
        self.rewritten: Callable[[Graph], object] = lambda functional: None
        """Applies the canonical rules that the captured instance has seen."""
        self.held = held
        self.nodes = list(gm.graph.nodes)
        self.known: dict[tuple[tuple[str, int], ...], tuple[Graph, list[Group]]] = {}

    def disagreement(
        self, functional: Graph, fused: Fused, recognise: Recognise, move: Move | None = None
    ) -> str | None:
        """Why the match does not hold at all sizes; None if it does, as far as other instances can tell.

        ``move`` finds the candidate again in another functional graph.
        """
        return self.anywhere(
            _nodes(fused), lambda sizes: self.compare(functional, fused, sizes, recognise, move or _moved)
        )

    def anywhere(
        self, nodes: Collection[fx.Node], disagreement: Callable[[Sizes], str | None], tied: Ties = NO_TIES
    ) -> str | None:
        """The first reason that ``disagreement`` gives at other sizes of these nodes; None if there is none.

        Symbolic floats (a scale, under ``dynamic=True``) are fixed by a guard: a match has their numbers in it.
        ``tied`` symbols have the sizes of those they are mapped to.
        """
        symbols = set[Any]().union(*(compat.free_symbols(compat.example_value(node)) for node in nodes))
        if not symbols:
            return None
        if any(compat.is_unbacked(symbol) for symbol in symbols):
            return "a size of the region is known only when the graph runs"
        numbers = {symbol for symbol in symbols if compat.is_number(symbol)}
        for symbol in numbers:
            compat.settle(compat.shape_env(self.nodes), symbol)
        symbols -= {*numbers, *tied}
        if not symbols:
            return None
        try:
            others = list(other_sizes(compat.shape_env(self.nodes), symbols, numbers_in(nodes), tied))
            for sizes in others:
                reason = disagreement(sizes)
                if reason is not None:
                    where = ", ".join(f"{symbol} = {sizes[symbol]}" for symbol in sorted(symbols, key=str))
                    return f"{reason} (at {where})"
        except CannotInstantiate as error:
            return str(error)
        return None

    def compare(self, functional: Graph, fused: Fused, sizes: Sizes, recognise: Recognise, move: Move) -> str | None:
        other, groups = self.at(sizes)
        candidate = move(fused.candidate, functional, other, groups)
        if isinstance(candidate, str):
            return candidate
        again = recognise(other, candidate)
        if again is None or _claim(again) != _claim(fused) or not self.same_decay(again.decay, fused.decay):
            return "the region computes something else at other sizes"
        written = "*" in "".join(p.axes for p in fused.inputs.values()) or "A_log" in fused.inputs
        if written and any(again.sizes[axis] != fused.sizes[axis] for axis in "HK"):
            return "the number of heads or channels is not fixed"
        return None

    def same_decay(self, one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        """Decays read off rounded tables come out slightly different at each length; others do not."""
        if not self.held or len(one) != len(other):
            return one == other
        return all(math.isclose(math.log(a), math.log(b), rel_tol=1e-4) for a, b in zip(one, other, strict=True))

    def at(self, sizes: Sizes) -> tuple[Graph, list[Group]]:
        key = tuple(sorted((str(symbol), size) for symbol, size in sizes.items()))
        if key not in self.known:
            functional = functional_graph(self.gm, lambda size: compat.size_at(size, sizes), self.held)
            self.rewritten(functional)
            self.known[key] = functional, find_groups(functional)
        return self.known[key]


# -- choosing sizes -----------------------------------------------------------------------------------------------


def other_sizes(env: Any, symbols: Iterable[Any], numbers: Iterable[int], tied: Ties = NO_TIES) -> Iterator[Sizes]:
    """Sizes near the captured ones, then as far out as ``numbers`` ask for; all of ``symbols`` get other values."""
    hints = compat.backed_hints(env)
    wanted = sorted(symbols, key=str)

    def close(hint: int, turn: int) -> list[int]:
        return [hint + step for step in _rotated(_STEPS, turn)]

    near = _first_allowed(env, hints, wanted, close, tied)
    if near is None:
        raise CannotInstantiate("no other sizes are found that the graph allows")
    yield near
    thresholds = sorted(set(numbers), reverse=True)
    if thresholds and thresholds[0] > FARTHEST:
        raise CannotInstantiate(f"the region mentions {thresholds[0]}, too large a size to try")

    def far(hint: int, turn: int) -> list[int]:
        beyond = [number + step for number in thresholds if number > hint for step in _rotated(_STEPS[:11], turn)]
        return [*beyond, *(hint + step for step in _rotated(_STEPS, turn + 2))]

    distant = _first_allowed(env, hints, wanted, far, tied)
    if distant is not None:
        yield distant


def _rotated(steps: tuple[int, ...], turn: int) -> tuple[int, ...]:
    turn %= len(steps)
    return (*steps[turn:], *steps[:turn])


def _first_allowed(
    env: Any, hints: Sizes, symbols: list[Any], choices: Callable[[int, int], list[int]], tied: Ties
) -> Sizes | None:
    """The first assignment that differs in every symbol and that the guards allow."""
    options = [
        [size for size in choices(hints[symbol], turn) if size != hints[symbol] and compat.in_range(env, symbol, size)]
        for turn, symbol in enumerate(symbols)
    ]
    for picked in itertools.islice(_diagonally(options), _MAX_TRIES):
        sizes = {**hints, **dict(zip(symbols, picked, strict=True))}
        sizes |= {symbol: sizes[other] for symbol, other in tied.items()}
        if compat.allowed(env, sizes):
            return sizes
    return None


def _diagonally(options: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """All combinations, those that take early options of every symbol first."""
    longest = max(map(len, options), default=0)
    for reach in range(1, longest + 1):
        cut = [choice[:reach] for choice in options]
        for picked in itertools.product(*cut):
            if any(
                len(choice) >= reach and choice[reach - 1] == size for choice, size in zip(options, picked, strict=True)
            ):
                yield picked


def numbers_in(nodes: Iterable[fx.Node]) -> set[int]:
    """Numbers in the region's code at which something could begin or end: integers, slice bounds, compared floats."""
    found: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, slice):
            visit([item.start, item.stop, item.step])
        elif isinstance(item, (list, tuple)):
            for part in item:
                visit(part)
        elif isinstance(item, (int, float)) and 2 <= abs(item) <= (FARTHEST if isinstance(item, float) else math.inf):
            found.add(math.ceil(abs(item)))

    for node in nodes:
        if node.op in ("call_function", "call_method"):
            visit([*node.args, *node.kwargs.values()])
    return found


# -- the same region in another functional graph ------------------------------------------------------------------


def _region(fused: Fused) -> set[Op]:
    inputs = {placement.value for placement in fused.inputs.values()}
    return fused.candidate.ops | ancestors(fused.candidate.cut, inputs.__contains__)


def _nodes(fused: Fused) -> set[fx.Node]:
    """The region's Dynamo nodes and what they read: tensors, sizes and other numbers."""
    own = {op.node for op in _region(fused) if op.node is not None}
    own |= {placement.value.node for placement in fused.inputs.values()}
    return own | {arg for node in own for arg in node.all_input_nodes if node.op != "placeholder"}


def _versions(functional: Graph) -> dict[Any, list[Value]]:
    """The values each Dynamo node stands for, in order: a buffer has one per write."""
    found: dict[Any, list[Value]] = {}
    made = itertools.chain(functional.inputs, (value for op in functional.ops for value in op.outs))
    for value in sorted(made, key=lambda value: value.index):
        if value.node is not None:
            found.setdefault(value.node, []).append(value)
    return found


def _moved(candidate: Candidate, here: Graph, there: Graph, groups: list[Group]) -> Candidate | str:
    """The candidate between the same Dynamo nodes of another instance, with the same hypothesis; else the reason."""
    versions, others = _versions(here), _versions(there)

    def move(value: Value) -> Value | None:
        own, other = versions.get(value.node, []), others.get(value.node, [])
        return other[own.index(value)] if value in own and len(own) == len(other) else None

    cut = [move(value) for value in candidate.cut]
    outputs = [move(value) for value in candidate.outputs]
    if any(value is None for value in (*cut, *outputs)):
        return "the region looks different at other sizes"
    output, state = outputs[0], outputs[1] if len(outputs) > 1 else None
    group = next((group for group in groups if output is not None and output.op in group.ops), None)
    if group is None or output is None:
        return "there is no such region at other sizes"
    found = next(read_region(group, [value for value in cut if value is not None], output, state), None)
    if found is None or isinstance(found, Obstacle):
        return found.reason if found else "the roles do not fit at other sizes"
    claims = {_claims(hypothesis) for hypothesis in candidate.hypotheses}
    same = [hypothesis for hypothesis in found.hypotheses if _claims(hypothesis) in claims]
    return replace(found, hypotheses=same) if same else "the roles do not fit at other sizes"


def _role(placement: Placement | None) -> tuple[str, Any, str, bool] | None:
    return placement and (placement.role, placement.value.node, placement.axes, placement.backwards)


def _claims(hypothesis: Hypothesis) -> tuple[Any, ...]:
    roles = tuple(_role(placement) for placement in hypothesis.inputs)
    gate = hypothesis.gate_form, hypothesis.gate_rate
    return roles, _role(hypothesis.output), _role(hypothesis.final_state), hypothesis.delta, gate


def _claim(fused: Fused) -> tuple[Any, ...]:
    """All that the rewrite burns into the graph."""
    roles = {name: _role(placement) for name, placement in fused.inputs.items()}
    ends = _role(fused.output), _role(fused.final_state)
    options = (fused.delta, f"{fused.scale:.9g}", fused.sigmoid_beta)  # a fitted scale carries rounding
    gate = (fused.gate, fused.gate_rate, fused.gate_fn, fused.gate_scale)
    return roles, ends, gate, options, fused.qk_l2norm_eps, fused.mode
