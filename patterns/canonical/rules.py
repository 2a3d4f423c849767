"""Which calls of a loop may be made once for all tokens or chunks, and with what arguments then.

Nothing here draws random numbers or writes: a call moves in front of the loop only if it works on each piece by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.patterns.canonical.pieces import Piece

POINTWISE = frozenset(
    "add sub mul div truediv neg rsub pow square exp exp2 log log1p sigmoid softplus logsigmoid log_sigmoid silu tanh "
    "relu elu gelu abs sqrt rsqrt reciprocal clamp clamp_min clamp_max float double half bfloat16 to contiguous".split()
)
ALONG = {"sum": 1, "mean": 1, "softmax": 1, "norm": 2, "linalg_norm": 2, "linalg_vector_norm": 2, "normalize": 2}
"""Functions that work along the dimensions given as this argument, or as ``dim``."""

TRAILING = frozenset("layer_norm rms_norm".split())
"""Functions that work along the last dimensions, as many as their second argument has sizes."""

MOVES = frozenset("view reshape unsqueeze squeeze unflatten flatten getitem".split())
ACTIVATIONS = frozenset(
    "log log1p sigmoid softplus logsigmoid log_sigmoid silu tanh relu elu gelu abs sqrt rsqrt clamp clamp_min "
    "clamp_max norm linalg_norm linalg_vector_norm normalize softmax layer_norm rms_norm linear matmul".split()
)
"""What a region may not hold, whatever stands around it."""

OFFSETS = frozenset("add sub rsub".split())
EXPONENTIALS = frozenset("exp exp2".split())


@dataclass
class Family:
    """Calls that differ only in the piece they read: ``members[i]`` reads piece ``i`` of each of ``sources``."""

    count: int
    width: int
    behind: int
    """Slices: the dimension they were taken of, counted from the right."""
    piece: Piece | None = None
    sources: list[int] = field(default_factory=list)
    members: dict[int, fx.Node] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.members) == self.count

    @property
    def first(self) -> fx.Node:
        return self.members[0]


def name_of(node: fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.strip("_") if name.startswith("__") else name


def stays(family: Family) -> bool:
    """True for a family that lacks a piece, and for one of whose results leaves the graph: it is left in the loop."""
    return not family.complete or any(user.op == "output" for node in family.members.values() for user in node.users)


def is_activation(family: Family) -> bool:
    return name_of(family.first) in ACTIVATIONS


def is_exponential(family: Family) -> bool:
    return name_of(family.first) in EXPONENTIALS


def is_offset(family: Family) -> bool:
    """``1 - x``, ``x + 1``: one tensor and a number, added. No region can tell ``x`` from a role of its own."""
    node = family.first
    return name_of(node) in OFFSETS and len(node.all_input_nodes) == 1 and len(node.args) > 1


def arguments(node: fx.Node, pieces: Sequence[fx.Node], family: Family) -> tuple[Any, Any] | None:
    """The arguments of a call for all pieces, its ``pieces`` not yet replaced; None if it cannot be one call."""
    name, value = name_of(node), compat.example_value(node)
    ranks = {compat.example_value(arg).dim() for arg in pieces}
    if not isinstance(value, torch.Tensor) or len(ranks) != 1:
        return None
    rank = ranks.pop()
    if name in POINTWISE:
        fits = value.dim() == rank and all(_broadcasts(arg, pieces, rank, family) for arg in node.all_input_nodes)
        return (node.args, node.kwargs) if fits else None
    if len(pieces) != 1 or not node.args or node.args[0] is not pieces[0]:
        return None
    if name in ALONG:
        return _along(node, ALONG[name], rank, family)
    if name in TRAILING:
        sizes = node.args[1] if len(node.args) > 1 else None
        along = isinstance(sizes, (list, tuple)) and not (family.width and -family.behind <= len(sizes))
        return (node.args, node.kwargs) if along else None
    if name in ("linear", "matmul"):
        return _projected(node, rank, family)
    if name in MOVES and not family.width and not node.kwargs:
        return _moved(node, name, family.count)
    return None


def _projected(node: fx.Node, rank: int, family: Family) -> tuple[Any, Any] | None:
    """A product with one matrix for all pieces; slices may not be cut along the dimension it sums over."""
    weight = node.args[1] if len(node.args) > 1 else None
    matrix = isinstance(weight, fx.Node) and compat.example_value(weight).dim() == 2
    return (node.args, node.kwargs) if matrix and rank > 1 and not (family.width and family.behind == -1) else None


def _broadcasts(arg: fx.Node, pieces: Sequence[fx.Node], rank: int, family: Family) -> bool:
    """True if an operand means the same beside one piece and beside all of them."""
    value = compat.example_value(arg)
    if arg in pieces or not isinstance(value, torch.Tensor):
        return arg in pieces
    if value.dim() > rank:
        return False
    return not family.width or value.dim() < -family.behind or value.shape[family.behind] == 1


def _along(node: fx.Node, place: int, rank: int, family: Family) -> tuple[Any, Any] | None:
    """A call along dimensions that are told: they count from the right, or lie one further behind."""
    named = "dim" in node.kwargs
    dims: Any = node.kwargs["dim"] if named else node.args[place] if len(node.args) > place else None
    if name_of(node) == "normalize" and dims is None:
        named, dims = True, 1
    single = isinstance(dims, int)
    if dims is None and rank == 1 and name_of(node) in ("sum", "mean"):  # of all there is
        dims, single = -1, True
    listed: list[Any] = [dims] if single else list(dims) if isinstance(dims, (list, tuple)) else []
    if not listed or not all(isinstance(dim, int) for dim in listed):
        return None
    behind = [dim if dim < 0 else dim - rank for dim in listed]
    keeps = compat.example_value(node).dim() == rank
    if family.width and (family.behind in behind or not keeps):
        return None
    given = behind[0] if single else behind
    if named:
        return node.args, {**node.kwargs, "dim": given}
    return (*node.args[:place], given, *node.args[place + 1 :]), node.kwargs


def _moved(node: fx.Node, name: str, count: int) -> tuple[Any, Any] | None:
    """A rearrangement of each piece, with the pieces' own dimension in front."""
    rest: tuple[Any, ...] = node.args[1:]
    if name in ("view", "reshape"):
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        return (node.args[0], count, *sizes), {}
    if name == "getitem":  # x[:, None]: a new dimension, nothing taken
        index: tuple[Any, ...] = rest[0] if isinstance(rest[0], tuple) else rest
        kept = all(item is None or item is Ellipsis or item == slice(None) for item in index)
        return ((node.args[0], (slice(None), *index)), {}) if kept else None
    if name == "flatten":  # two dimensions, where all others have one
        dims = [*rest, *(0, -1)[len(rest) :]]
        return (node.args[0], *(dim if dim < 0 else dim + 1 for dim in dims)), {}
    dim = rest[0] if rest else None
    if not isinstance(dim, int):
        return None
    return (node.args[0], dim if dim < 0 else dim + 1, *rest[1:]), {}
