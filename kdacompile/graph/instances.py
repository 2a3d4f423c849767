"""Symbolic sizes: a match must hold at every size the compiled graph will be called with, not only at today's.

The functional graph is one concrete instance, at the sizes it was captured with, and a proof speaks about that instance
alone. So where a region has symbolic sizes it is read and proven again at others that the graph's guards allow: near
the captured sizes, and beyond every number the region's code mentions (a window of 256 tokens does not show at 20). The
same Dynamo nodes must play the same roles with the same options, or the region is left alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph.build import Tables, functional_graph
from kdacompile.graph.ir import Graph, reach
from kdacompile.graph.laws import NotAffine
from kdacompile.graph.turns import FARTHEST, CannotInstantiate, Turns
from kdacompile.patterns.engine.vocabulary import DATA_MOVEMENT, MAKERS

Sizes = dict[Any, int]
"""A value for each symbol."""

Ties = Mapping[Any, Any]
"""Symbols that have the size of another one; their own, where they stay what they are."""

NO_TIES: Ties = {}

_SIZED = (DATA_MOVEMENT | MAKERS - {"full", "full_like", "new_full", "scalar_tensor"}) | frozenset(
    "reshape narrow flatten unflatten pad roll chunk tensor_split repeat_interleave tile tril triu rand randn".split()
)
"""Calls whose numbers are sizes and places."""

_PLACES = (_SIZED - {"tril", "triu", "roll"}) | {"getitem"}
"""Those of them whose numbers change nothing but which elements are looked at."""

_STEPS = (1, 2, 3, 5, 7, 4, 8, 16, 32, 64, 128, 256, -1, -2, -3, -4, -8, -16, -32, -64)
_MAX_TRIES = 4096
_MOST_TURNS = 6
_LONGEST_STEP = 65


class Instances:
    """Functional graphs of one graph at other sizes, built when first needed."""

    def __init__(
        self, graph: fx.Graph, tables: Tables | None = None, rewritten: Callable[[Graph], object] = lambda _: None
    ) -> None:
        """``rewritten`` applies the canonical rules that the captured instance has seen."""
        self.graph = graph
        self.rewritten = rewritten
        self.tables = tables
        self.nodes = list(graph.nodes)
        self.known: dict[tuple[tuple[str, int], ...], Graph] = {}

    def anywhere(
        self,
        nodes: Collection[fx.Node],
        disagreement: Callable[[Sizes], str | None],
        tied: Ties = NO_TIES,
        turns: Turns | None = None,
    ) -> str | None:
        """The first reason that ``disagreement`` gives at other sizes of these nodes; None if there is none.

        Symbolic numbers that are no sizes (a scale or the length of a window, under ``dynamic=True``) are fixed by a
        guard: a match has them in it. ``tied`` symbols have the sizes of those they are mapped to. Where ``turns`` has
        comparisons that have come out one way so far, sizes at which they come out the other way are looked at as well.
        """
        symbols = symbols_of(nodes)
        if not symbols:
            return None
        if any(compat.is_unbacked(symbol) for symbol in symbols):
            return "a size of the region is known only when the graph runs"
        numbers = {symbol for symbol in symbols if compat.is_number(symbol)} | _mere_numbers(nodes)
        for symbol in numbers:
            compat.settle(compat.shape_env(self.nodes), symbol)
        symbols -= {*numbers, *tied}
        if not symbols:
            return None
        try:
            numbers = numbers_in(nodes) | computed_with(nodes)
            for sizes in self.chosen(symbols, numbers, tied, turns):
                reason = disagreement(sizes)
                if reason is not None:
                    env = compat.shape_env(self.nodes)
                    named = sorted((compat.name_of(env, symbol), sizes[symbol]) for symbol in symbols)
                    where = ", ".join(f"{name} = {size}" for name, size in named)
                    return f"{reason} (with {where}); dynamic=False compiles for each size alone"
        except (CannotInstantiate, NotAffine) as error:
            return str(error)
        return None

    def chosen(self, symbols: set[Any], numbers: Iterable[int], tied: Ties, turns: Turns | None) -> Iterator[Sizes]:
        """Other sizes to look at, each once the ones before have been looked at."""
        env = compat.shape_env(self.nodes)
        yield from other_sizes(env, symbols, numbers, tied)
        if turns is None:
            return
        hints = compat.backed_hints(env)
        if turns.apart and len(symbols) > 1 and turns.one_way():
            yield from _one_by_one(env, hints, symbols, tied)
        for _ in range(_MOST_TURNS):
            wanted = next(turns.further(hints, symbols, functools.partial(compat.in_range, env)), None)
            found = None if wanted is None else _near(env, hints, wanted, tied)
            if found is None:  # none, or none that the graph's guards allow
                break
            yield found
        else:
            raise CannotInstantiate("the region decides something at too many sizes to try them all")
        if (wanted := turns.together(hints, symbols)) is not None:
            if (found := _near(env, hints, wanted, tied)) is None:
                raise CannotInstantiate(
                    "comparisons of positions turn one by one, and together at sizes not allowed here"
                )
            yield found

    def at(self, sizes: Sizes) -> Graph:
        key = tuple(sorted((str(symbol), size) for symbol, size in sizes.items()))
        if key not in self.known:
            functional = functional_graph(self.graph, lambda size: compat.size_at(size, sizes), self.tables)
            self.rewritten(functional)
            self.known[key] = functional
        return self.known[key]


def symbols_of(nodes: Iterable[fx.Node]) -> set[Any]:
    """The open sizes and numbers of what some nodes yield; a number that is read of a tensor counts as a tensor."""
    symbols = set[Any]().union(*(compat.free_symbols(compat.example_value(node)) for node in nodes))
    return {symbol for symbol in symbols if not compat.is_read_of_tensor(symbol)}


# -- choosing sizes -----------------------------------------------------------------------------------------------


def other_sizes(env: Any, symbols: Iterable[Any], numbers: Iterable[int], tied: Ties) -> Iterator[Sizes]:
    """Sizes near the captured ones, then as far out as ``numbers`` ask for; all of ``symbols`` get other values."""
    hints = compat.backed_hints(env)
    wanted = sorted(symbols, key=str)

    near = _first_allowed(env, hints, wanted, _close, tied)
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


def _one_by_one(env: Any, hints: Sizes, symbols: Iterable[Any], tied: Ties) -> Iterator[Sizes]:
    """Sizes at which one symbol alone is another, as far as the guards allow that."""
    for symbol in sorted(symbols, key=str):
        found = _first_allowed(env, hints, [symbol], _close, tied)
        if found is not None:
            yield found


def _close(hint: int, turn: int) -> list[int]:
    return [hint + step for step in _rotated(_STEPS, turn)]


def _rotated(steps: tuple[int, ...], turn: int) -> tuple[int, ...]:
    turn %= len(steps)
    return (*steps[turn:], *steps[:turn])


def _first_allowed(
    env: Any, hints: Sizes, symbols: list[Any], choices: Callable[[int, int], list[int]], tied: Ties
) -> Sizes | None:
    """The first assignment that differs in every symbol and that the guards allow.

    Where it is not allowed by itself, what guards compare with a symbol moves as far as that: the length of a padding
    mask with that of the prompt.
    """
    beside = {s: of for s, of in compat.guarded_with(env, {*symbols, *tied}).items() if s in hints and of in hints}
    guards = compat.Guards(env)
    options = [
        [size for size in choices(hints[symbol], turn) if size != hints[symbol] and guards.allow_alone(symbol, size)]
        for turn, symbol in enumerate(symbols)
    ]
    for picked in itertools.islice(_diagonally(options), _MAX_TRIES):
        sizes = {**hints, **dict(zip(symbols, picked, strict=True))}
        sizes |= {symbol: sizes[other] for symbol, other in tied.items()}
        moved = {other: hints[other] + sizes[symbol] - hints[symbol] for other, symbol in beside.items()}
        for these in (sizes, {**sizes, **moved}):
            if guards.allow(these):
                return these
    return None


def _near(env: Any, hints: Sizes, wanted: Sizes, tied: Ties) -> Sizes | None:
    """Sizes at or a little beyond those that are wanted."""
    if max(wanted.values()) > FARTHEST:
        raise CannotInstantiate(f"the region decides something at {max(wanted.values())}, too large a size to try")
    symbols = sorted(wanted, key=str)

    def beyond(hint: int, turn: int) -> list[int]:
        return [wanted[symbols[turn]] + step for step in range(_LONGEST_STEP)]

    return _first_allowed(env, hints, symbols, beyond, tied)


def _diagonally(options: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """All combinations, those that take early options of every symbol first."""
    longest = max(map(len, options), default=0)
    for ends in range(1, longest + 1):
        cut = [choice[:ends] for choice in options]
        for picked in itertools.product(*cut):
            if any(
                len(choice) >= ends and choice[ends - 1] == size for choice, size in zip(options, picked, strict=True)
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


def computed_with(nodes: Iterable[fx.Node]) -> set[int]:
    """The numbers that sizes are divided by, or compared with, on their way into these nodes; CannotInstantiate where
    they are computed with otherwise.
    """
    found: set[int] = set()
    for node in nodes:
        if (number := _stepwise_factor(node)) is not None:
            raise CannotInstantiate(f"values are computed with {number}, which is no polynomial of sizes")
        for size in compat.symbolic_sizes(compat.example_value(node)):
            numbers, unknown = compat.arithmetic_of(size)
            if unknown:
                raise CannotInstantiate(f"a number is made of a size by {unknown}")
            found |= {number for number in numbers if number >= 2}
    return found


def _stepwise_factor(node: fx.Node) -> str | None:
    """A number made of sizes that stands in the node's values and may be one and the same wherever it is looked at, but
    is not everywhere: min(length, 64) / 64, or the sum of that many ones.
    """
    made = compat.example_value(node)
    if node.op not in ("call_function", "call_method") or not isinstance(made, torch.Tensor):
        return None
    given = [compat.example_value(arg) for arg in [*node.args, *node.kwargs.values()] if isinstance(arg, fx.Node)]
    if _name(node) not in _SIZED and (found := list(filter(compat.has_steps, given))):
        return str(found[0])
    sizes = [size for each in given if isinstance(each, torch.Tensor) for size in each.shape if compat.has_steps(size)]
    lost = sizes and not any(map(compat.has_steps, made.shape)) and _is_constant(node)
    return str(sizes[0]) if lost else None


def _mere_numbers(nodes: Iterable[fx.Node]) -> set[Any]:
    """Symbols that the region computes with and that are in no size of its tensors."""
    tensors, used = set[Any](), set[Any]()
    for node in nodes:
        made = compat.example_value(node)
        if not isinstance(made, torch.Tensor):
            continue
        tensors |= compat.free_symbols(made)
        if node.op != "placeholder" and _name(node) not in _PLACES:
            given = map(compat.example_value, node.all_input_nodes)
            used |= compat.free_symbols([each for each in given if not isinstance(each, torch.Tensor)])
    return used - tensors


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).strip("_")


def _is_constant(node: fx.Node) -> bool:
    """True if the node follows from sizes and literals alone."""
    above = reach([node], lambda each: each.all_input_nodes)
    return not any(
        each.op in ("placeholder", "get_attr") and isinstance(compat.example_value(each), torch.Tensor)
        for each in [node, *above]
    )
