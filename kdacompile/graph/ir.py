"""The functional form the recognisers read: single-assignment values and the ATen operators that make them.

``build`` writes it from a Dynamo graph. Nothing in it aliases or mutates, and every value remembers the Dynamo node it
came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from kdacompile.compat.operators import operator_name, overload_name

X = TypeVar("X", bound=Hashable)


class Value:
    """One tensor: its shape and dtype, the operator that makes it (None for an input), and who reads it."""

    __slots__ = ("const", "dtype", "index", "node", "op", "param", "payload", "shape", "uniform", "users", "weight")

    def __init__(self, index: int, shape: tuple[int, ...], dtype: torch.dtype, op: Op | None = None) -> None:
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.op = op
        self.users: list[Op] = []
        self.node: Any = None
        """The Dynamo node that yields exactly this value, if there is one."""
        self.const = False
        """True if no input reaches it: masks, identities, zeros."""
        self.param = False
        """True for a parameter, or a plain rearrangement of one."""
        self.weight = False
        """True for a matrix that enters the graph as such, beside activations of higher rank: a functional weight."""
        self.payload: torch.Tensor | None = None
        """The data of a constant that the graph carries as a tensor."""
        self.uniform: frozenset[int] = frozenset()
        """Dimensions (of size above one) along which the value is the same by construction."""

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"%{self.index}[{dims}]:{str(self.dtype).removeprefix('torch.')}"


@dataclass(eq=False, slots=True)
class Op:
    """One ATen operator. ``args`` and ``kwargs`` hold Values where the operator reads tensors."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: list[Value]
    outs: list[Value] = field(default_factory=list)
    node: Any = None
    """The Dynamo node it belongs to."""
    position: int = 0
    """That node's place in the Dynamo graph."""
    grad: bool = True
    """Grad mode at that point of the Dynamo graph."""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = operator_name(self.target).removeprefix("aten::")
        if self.name == "view" and overload_name(self.target) == "dtype":  # the same bits are other numbers
            self.name = "view_dtype"

    @property
    def out(self) -> Value:
        return self.outs[0]

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.outs))} = {self.name}{self.args}"


@dataclass(slots=True)
class Mutation:
    """An in-place write of the Dynamo graph: ``node`` writes storage ``storage`` (an id), at ``position``."""

    node: Any
    position: int
    storage: int


@dataclass
class Graph:
    """A functional graph: operators in order, what the outside reads, and the in-place writes it replaced."""

    ops: list[Op] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: set[Value] = field(default_factory=set)
    """Values the graph returns."""
    mutations: list[Mutation] = field(default_factory=list)
    written: dict[Value, tuple[Any, Value]] = field(default_factory=dict)
    """Final value of an input the graph overwrites -> (that input's Dynamo node, its value before)."""
    storages: dict[Any, int] = field(default_factory=dict)
    """Dynamo node -> storage id of its (first) tensor."""
    opaque: dict[Value, list[Value]] = field(default_factory=dict)
    """What a call that nobody looked into yields -> what it reads."""
    dead: set[Any] = field(default_factory=set)
    """Dynamo nodes none of whose results is read."""
    calls: Any = None
    """Calls that canonical rules have added (``edit.NewCalls``); None as long as there are none."""
    names: dict[Value, list[tuple[Any, int]]] = field(default_factory=dict)
    """Every Dynamo node that stands for a value, with the position from which it does (buffers: their last write)."""


def map_values(tree: Any, fn: Callable[[Value], Any]) -> Any:
    """``tree`` with every Value replaced."""
    if isinstance(tree, Value):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_values(item, fn) for item in tree])
    if isinstance(tree, dict):
        return {key: map_values(item, fn) for key, item in tree.items()}
    return tree


def walk_values(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from walk_values(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from walk_values(item)


def reach(starts: Iterable[X], onward: Callable[[X], Iterable[X]], most: float = math.inf) -> Iterator[X]:
    """``starts`` and what ``onward`` leads to from each, depth first, everything once; ``most`` of it at the most."""
    stack, seen = list(starts), set[X]()
    while stack and len(seen) < most:
        item = stack.pop()
        if item not in seen:
            seen.add(item)
            yield item
            stack += onward(item)


def ancestors(roots: Iterable[Value], stop: Callable[[Value], bool]) -> set[Op]:
    """Operators that ``roots`` depend on, not looking above values for which ``stop`` holds."""
    seen: set[Op] = set()
    stack = [value for value in roots if not stop(value)]
    while stack:
        op = stack.pop().op
        if op is None or op in seen:
            continue
        seen.add(op)
        stack.extend(value for value in op.reads if not stop(value))
    return seen
