"""Symbolic sizes: their hints, symbols, ranges and guards, and what they are at an instance."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import sympy
import torch
from torch import fx

# Torch-private: which compilation this is, and what was demanded of its sizes.
from torch._guards import CompileContext, TracingContext
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

from kdacompile.compat.nodes import example_value, propagate_fake


class NoHint(RuntimeError):
    """A number that is known only once the graph runs."""


def size_hint(size: Any) -> Any:
    """The concrete size behind a symbolic one; raises ``NoHint`` for unbacked symbols."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        hint = size.node.hint
        if hint is None:
            raise NoHint(f"{size} has no hint")
        return hint
    return size


def is_one(size: Any) -> bool:
    """True for the number 1; a symbolic size is not asked, which would put a guard on it."""
    return isinstance(size, int) and size == 1


def free_symbols(value: Any) -> set[Any]:
    """The symbols in a size, in a tensor's sizes, or in those of a collection."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        return free_symbols(tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return {symbol for item in value for symbol in free_symbols(item)}
    return set()


def symbolic_sizes(value: Any) -> list[Any]:
    """The symbolic numbers in what a node yields: itself, or a tensor's sizes."""
    items = tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)
    return [item for item in items if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool))]


_ARITHMETIC = frozenset("Add Mul Symbol Integer NegativeOne One Zero FloorDiv CleanDiv Mod PythonMod Max Min".split())
"""Sums, products, quotients rounded down, remainders, the larger and the smaller of sizes and whole numbers."""
_ROUNDED = frozenset("CeilToInt FloorToInt TruncToInt".split())


def arithmetic_of(size: Any) -> tuple[set[int], str]:
    """The whole numbers in a symbolic number, and the first function in it that is more than arithmetic, or ""."""
    expr = sympy.sympify(size.node.expr)
    if not any(symbol_is_type(symbol, SymT.SIZE) for symbol in expr.free_symbols):
        return set(), ""  # a number of the call's, which a guard fixes
    numbers: set[int] = set()
    stack = [expr]
    while stack:
        part = stack.pop()
        name = type(part).__name__
        if isinstance(part, sympy.Integer):
            numbers.add(abs(int(part)))
        elif name in _ROUNDED and type(part.args[0]).__name__ == "IntTrueDiv":
            stack += part.args[0].args
        elif name in _ARITHMETIC or (isinstance(part, sympy.Pow) and part.exp.is_Integer and part.exp > 0):
            stack += part.args
        else:
            return numbers, name
    return numbers, ""


def has_steps(number: Any) -> bool:
    """True for a symbolic number that is no polynomial of sizes: it may stay what it is from one size to another."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat)):
        return False
    expr = sympy.sympify(number.node.expr)
    return any(symbol_is_type(symbol, SymT.SIZE) for symbol in expr.free_symbols) and not expr.is_polynomial()


def is_assumption(node: fx.Node) -> bool:
    """True for an assertion that a size known only when the graph runs equals one of the call's: torch writes it where
    two tensors must fit, and it fails where one of them is broadcast (a last row, cut from a chunk, by torch 2.11).
    """
    if node.target is not torch.ops.aten._assert_scalar.default or not isinstance(node.args[0], fx.Node):
        return False
    asserted = example_value(node.args[0])
    symbols = free_symbols(asserted)
    mixed = any(map(is_unbacked, symbols)) and not all(map(is_unbacked, symbols))
    return mixed and isinstance(asserted, torch.SymBool) and isinstance(asserted.node.expr, sympy.Eq)


def is_unbacked(symbol: Any) -> bool:
    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def is_read_of_tensor(symbol: Any) -> bool:
    """True for the symbol of a float that ``tensor.item()`` yields."""
    return symbol_is_type(symbol, SymT.UNBACKED_FLOAT)


def is_number(symbol: Any) -> bool:
    """True for the symbol of a float, which dynamic shapes make of a number that a module or a caller holds."""
    return symbol_is_type(symbol, SymT.FLOAT)


def settle(env: Any, symbol: Any) -> None:
    """Guard that a symbol stays what it is: with another value the graph is captured again."""
    env.evaluate_expr(sympy.Eq(symbol, env.backed_var_to_val[symbol]))


def stays_below(size: Any, limit: int) -> bool:
    """Whether a size is below a number. Where it is open that is guarded: beyond, the graph is captured again; where it
    may not be, and where the size is not below at first, nothing is guarded, and the answer is no.
    """
    if isinstance(size, int):
        return size < limit
    return times_captured(size) is not None and size_hint(size) < limit and bool(size < limit)


def times_captured(*sizes: Any) -> int | None:
    """How often the code that is being compiled was captured before; None where it will not be captured again for other
    ``sizes`` (numbers or symbols), as the caller has demanded that they stay open.
    """
    compiled, tracing = CompileContext.current_compile_id(), TracingContext.try_get()
    if compiled is None or compiled.frame_compile_id is None or tracing is None:
        return None
    symbols = {
        symbol for size in sizes for symbol in ({size} if isinstance(size, sympy.Symbol) else free_symbols(size))
    }
    return None if symbols & _demanded(tracing) else compiled.frame_compile_id


def _demanded(tracing: TracingContext) -> set[Any]:
    """The symbols of sizes that the caller has demanded to stay open (``mark_dynamic``)."""
    names = {
        f"{_text(context.tensor_source)}.size()[{dim}]"  # type: ignore[attr-defined]
        for context in tracing.tensor_to_context.values()
        for dim, demand in enumerate(getattr(context, "constraint_sizes", None) or ())
        if demand is not None and not demand.warn_only
    }
    if not names or tracing.fake_mode is None or tracing.fake_mode.shape_env is None:
        return set()
    env: Any = tracing.fake_mode.shape_env
    own = {symbol for symbol, sources in env.var_to_sources.items() if names & set(map(_text, sources))}
    return {symbol for each in own for symbol in (each, *sympy.sympify(env.replacements.get(each, each)).free_symbols)}


def _text(source: Any) -> str:
    """What torch calls an input or a size of it; a method up to torch 2.11."""
    return str(source.name() if callable(source.name) else source.name)


def tie(size: Any, other: Any) -> None:
    """Guard that two sizes are equal: from here on they have the same symbols."""
    if isinstance(size, torch.SymInt) or isinstance(other, torch.SymInt):
        bool(size == other)


def name_of(env: Any, symbol: Any) -> str:
    """A size as the caller of the graph knows it, "dimension 1 of x" or "the number n"; the symbol's own name where
    it is no input's.
    """
    for source in env.var_to_sources.get(symbol, ()):
        found = re.fullmatch(r"L\['(\w+)'\](.*?)(?:\.size\(\)\[(\d+)\])?", _text(source))
        if found is not None:
            what = "the number" if found[3] is None else f"dimension {found[3]} of"
            return f"{what} {found[1]}{found[2]}"
    return str(symbol)


def shape_env(nodes: list[fx.Node]) -> Any:
    """The environment that knows the graph's symbols, guards and ranges."""
    for node in nodes:
        value = example_value(node)
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, (torch.SymInt, torch.SymFloat)):
                return size.node.shape_env
    raise ValueError("the graph has no symbolic sizes")


def backed_hints(env: Any) -> dict[Any, int]:
    return {symbol: int(hint) for symbol, hint in env.backed_var_to_val.items() if getattr(hint, "is_integer", False)}


def in_range(env: Any, symbol: Any, size: int) -> bool:
    """Whether a symbol may be that; 0 and 1 are captured apart, and less than nothing only numbers of the call are."""
    known = env.var_to_range.get(symbol)
    if known is None:
        return size >= 2
    return size not in (0, 1) and bool(known.lower <= size) and bool(size <= known.upper)


class Guards:
    """The guards of a graph as they are now; each is evaluated once for the same numbers, since thousands of sizes may
    be tried.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        conditions = dict.fromkeys(guard.expr.xreplace(env.replacements) for guard in env.guards)
        self.read = {condition: sorted(condition.free_symbols, key=str) for condition in conditions}
        self.known: dict[tuple[Any, ...], bool] = {}

    def allow(self, sizes: dict[Any, int]) -> bool:
        """True if ``sizes`` satisfy every guard."""
        return all(self._holds(condition, sizes) for condition in self.read)

    def allow_alone(self, symbol: Any, size: int) -> bool:
        """True if the symbol's range and the guards about nothing else do."""
        own = (condition for condition, read in self.read.items() if read == [symbol])
        return in_range(self.env, symbol, size) and all(self._holds(condition, {symbol: size}) for condition in own)

    def _holds(self, condition: Any, sizes: dict[Any, int]) -> bool:
        key = (condition, *(sizes.get(symbol) for symbol in self.read[condition]))
        if key not in self.known:
            numbers = {symbol: sympy.Integer(sizes[symbol]) for symbol in self.read[condition] if symbol in sizes}
            try:
                self.known[key] = condition.xreplace(numbers) == sympy.true
            except (AssertionError, ZeroDivisionError):  # Mod takes no negative number (T - 33 at 32 tokens), and no 0
                self.known[key] = False
        return self.known[key]


def guarded_with(env: Any, symbols: Collection[Any]) -> dict[Any, Any]:
    """Other symbols that guards compare with one of ``symbols``, be it through a third, each with that one."""
    behind = {symbol: symbol for symbol in symbols}
    reached = sorted(symbols, key=str)
    for symbol in reached:
        for guard in env.guards:
            if symbol in (free := guard.expr.free_symbols):
                new = sorted(free.difference(behind), key=str)
                behind |= dict.fromkeys(new, behind[symbol])
                reached += new
    return {other: symbol for other, symbol in behind.items() if other not in symbols}


def size_at(size: Any, sizes: dict[Any, int]) -> Any:
    """A symbolic number at an instance; raises ``NoHint`` where the instance does not settle it. Floats are no sizes:
    they are what they were (those of a match are guarded).
    """
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    number = sympy.sympify(size.node.expr).xreplace({symbol: sympy.Integer(value) for symbol, value in sizes.items()})
    known = size.node.shape_env.backed_var_to_val
    number = number.xreplace({symbol: known[symbol] for symbol in number.free_symbols if is_number(symbol)})
    if number.free_symbols:
        raise NoHint(f"{size} is not settled")
    kind = int if isinstance(size, torch.SymInt) else float if isinstance(size, torch.SymFloat) else bool
    return kind(number)


def alike(one: Any, other: Any) -> bool:
    """Whether two sizes are one expression, symbols with one hint taken for each other (an op asks for equal lengths
    of q and v, which no guard has compared).
    """
    if not isinstance(one, torch.SymInt) and not isinstance(other, torch.SymInt):
        return bool(one == other)
    exprs = [sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size) for size in (one, other)]
    env = next(size.node.shape_env for size in (one, other) if isinstance(size, torch.SymInt))
    hints = backed_hints(env)
    named = {symbol: sympy.Symbol(f"of_{hint}", integer=True, positive=True) for symbol, hint in hints.items()}
    return exprs[0].xreplace(named) == exprs[1].xreplace(named)


def number_in(graph: fx.Graph, size: Any, like: fx.Node) -> Any:
    """A size as an argument of a call: itself if it is fixed, else a node that computes it from the graph's inputs,
    at the graph's insertion point. Raises ``NoHint`` where an input of the graph lacks a symbol of it.
    """
    if not isinstance(size, torch.SymInt):
        return size
    expr = sympy.sympify(size.node.expr)
    if expr.is_Integer:
        return int(expr)
    inputs = {node: example_value(node) for node in graph.find_nodes(op="placeholder")}
    given = {x.node.expr: node for node, x in inputs.items() if isinstance(x, torch.SymInt)}
    if not expr.free_symbols <= given.keys():
        raise NoHint(f"{size} is no input of the graph")
    before = set(graph.nodes)
    tracer = GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(given[symbol], tracer) for symbol in expr.free_symbols}
    node = sympy_interp(PythonReferenceAnalysis, proxies, expr).node
    for new in graph.nodes:
        if new not in before:
            propagate_fake(new, like)
    return node
