"""Dimensions cut down: what a region's operators do to tensors with fewer batch rows and heads than were captured.

Each dimension of a tensor is a product of factors, and each factor has the size that was captured and the size of this
run. Views multiply and split them; an operator that looks at one particular row of a reduced dimension raises
``CannotReduce``; operands that are the same all along a dimension are cut down to the others' size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.vocabulary import ADDED_PRODUCTS, CONTRACTIONS, INDEXED, REDUCTIONS, SOLVES

Factors = tuple[tuple[int, int], ...]
"""One dimension as a product of (captured size, size of this run)."""


class EvaluationError(Exception):
    """An operator refused its inputs in float64 on the CPU."""


class CannotReduce(EvaluationError):
    """A reduced dimension is not just carried along by the region."""


def whole(size: int) -> Factors:
    """A dimension that is not cut down."""
    return ((size, size),)


def _captured(dim: Factors) -> int:
    return dim[0][0] if len(dim) == 1 else math.prod(f[0] for f in dim)


def _run(dim: Factors) -> int:
    return dim[0][1] if len(dim) == 1 else math.prod(f[1] for f in dim)


def _is_reduced(dim: Factors) -> bool:
    return _captured(dim) != _run(dim)


class Operand:
    """A tensor of this run, with its dimensions as factors."""

    __slots__ = ("const", "dims", "reduced", "tensor")

    def __init__(self, tensor: Tensor, dims: tuple[Factors, ...], *, const: bool = False) -> None:
        self.tensor = tensor
        self.const = const
        self.dims = dims
        self.reduced = any(_is_reduced(d) for d in dims)


Cut = tuple[int, int, int, bool]
"""An operand's index, its dimension to cut down, the size it gets, and whether it is the end that is left."""

SIZED = frozenset({"view", "_unsafe_view", "_reshape_alias"})
"""Operators whose sizes are written into the graph."""

# They treat one dimension specially, which may not be reduced; and those that may not touch any reduced dimension.
_PICKED = frozenset(
    "select slice select_scatter slice_scatter unbind split split_with_sizes unfold cat cumsum cumprod flip diag_embed "
    "prod".split()
)
_FIXED = INDEXED | frozenset("constant_pad_nd repeat diagonal diagonal_scatter roll".split())
_MATRICES = SOLVES | {"tril", "triu"}
"""They treat the rows and columns of their first operand by number."""


def out_dims(value: Value, result: Tensor, operands: list[Operand]) -> tuple[Factors, ...]:
    """Factors of a result: sizes that differ from the captured ones came from an operand's dimension of that pair."""
    if len(value.shape) != result.dim():
        raise CannotReduce(f"{value}: rank changed to {result.dim()}")
    dims: list[Factors] = []
    for captured, run in zip(value.shape, result.shape, strict=True):
        if captured == run:
            dims.append(whole(captured))
            continue
        known = [d for operand in operands for d in operand.dims if (_captured(d), _run(d)) == (captured, run)]
        dims.append(known[0] if known else ((captured, run),))
    return tuple(dims)


def view_sizes(dims: tuple[Factors, ...], sizes: Sequence[int]) -> list[int]:
    """The sizes of a view, in this run."""
    return [_run(dim) for dim in regrouped(dims, sizes)]


def regrouped(dims: tuple[Factors, ...], sizes: Sequence[int]) -> tuple[Factors, ...]:
    """The dimensions of a view: the operand's factors cut into groups of the captured sizes."""
    queue = [factor for dim in dims for factor in dim if factor != (1, 1)]
    captured = math.prod(f[0] for f in queue)
    if not captured:
        raise CannotReduce("a view without elements")
    known = math.prod(s for s in sizes if s != -1)
    wanted = [captured // known if s == -1 else s for s in sizes]
    out: list[Factors] = []
    for size in wanted:
        have = 1
        group: list[tuple[int, int]] = []
        while have < size:
            if not queue:
                raise CannotReduce("view needs more elements than there are")
            total, part = queue.pop(0)
            if size % (have * total) == 0:
                group.append((total, part))
                have *= total
            elif total == part and total % (size // have) == 0:  # split an ordinary dimension
                need = size // have
                queue.insert(0, (total // need, total // need))
                group.append((need, need))
                have = size
            else:
                raise CannotReduce("a view splits a reduced dimension")
        out.append(tuple(group) if group else whole(1))
    return tuple(out)


def expand_sizes(operand: Operand, shape: tuple[int, ...]) -> list[int]:
    """The sizes of an ``expand`` to ``shape``, in this run."""
    offset = len(shape) - len(operand.dims)
    sizes = list(shape)
    for index, dim in enumerate(operand.dims):
        if _captured(dim) == shape[offset + index]:
            sizes[offset + index] = _run(dim)
    return sizes


def cuts(op: Op, operands: list[Operand], tails: frozenset[int]) -> list[Cut]:
    """Where the operands of an operator are to be cut down before it runs; ``tails`` as for ``evaluate.Region``.

    Raises CannotReduce if the operator does not treat all rows of a reduced dimension alike.
    """
    name, first = op.name, operands[0]
    if name in _PICKED:
        _check_picks(op, first)
    elif name in _FIXED:
        _check_untouched(op, first)
    elif name in _MATRICES:
        if any(_is_reduced(dim) for dim in first.dims[-2:]):
            raise CannotReduce(f"{name} of matrices one of whose dimensions is reduced")
    elif name in REDUCTIONS or name in CONTRACTIONS:
        _check_sums(op, operands, tails)
    if len(operands) == 1 and name != "stack":
        return []
    if name == "stack":
        return _align(op, operands, tails, offset=False)
    if name in ADDED_PRODUCTS:
        return _align_added(operands, tails)
    if name in CONTRACTIONS | SOLVES:
        return _align_batch(operands)
    return _align(op, operands, tails, offset=name not in ("cat", "select_scatter"))


def cut(tensors: Sequence[Tensor], where: Sequence[Cut]) -> list[Tensor]:
    """Operands that are the same all along some dimensions, cut down there to the size of the others."""
    tensors = list(tensors)
    for index, dim, size, tail in where:
        tensors[index] = _tail(tensors[index], dim, size) if tail else _narrow(tensors[index], dim, size)
    return tensors


def _dim_of(op: Op, operand: Operand, place: int) -> int:
    dim = op.args[place] if len(op.args) > place else op.kwargs.get("dim", 0)
    return dim % max(1, len(operand.dims))


def _check_picks(op: Op, operand: Operand) -> None:
    if op.name == "flip":
        if any(_is_reduced(operand.dims[dim]) for dim in op.args[1]):
            raise CannotReduce("flip of a reduced dimension")
        return
    if op.name == "diag_embed":
        if _is_reduced(operand.dims[-1]):
            raise CannotReduce("a reduced dimension on a diagonal")
        return
    place = {"split": 2, "split_with_sizes": 2, "select_scatter": 2, "slice_scatter": 2}.get(op.name, 1)
    dim = operand.dims[_dim_of(op, operand, place)]
    if not _is_reduced(dim):
        return
    if op.name == "slice" and op.out.shape == op.reads[0].shape:
        return
    if op.name == "slice_scatter" and op.reads[1].shape == op.reads[0].shape:
        return
    raise CannotReduce(f"{op.name} picks from a reduced dimension")


def _check_sums(op: Op, operands: list[Operand], tails: frozenset[int]) -> None:
    """Sums over fewer rows than there are would be other sums; ``tails``, whose rest is known, may be summed over."""
    if op.name in CONTRACTIONS:
        summed = [operands[-2].dims[-1]]
    else:
        operand, given = operands[0], op.args[1] if len(op.args) > 1 else None
        if isinstance(given, Value):  # the larger of two tensors
            return
        places = (
            range(len(operand.dims)) if given is None or given == [] else [given] if isinstance(given, int) else given
        )
        summed = [operand.dims[place] for place in places] if operand.dims else []
    if any(_is_reduced(dim) and _captured(dim) not in tails for dim in summed):
        raise CannotReduce(f"{op.name} over a reduced dimension")


def _check_untouched(op: Op, operand: Operand) -> None:
    """These operators may run only if the reduced dimensions come out as they went in."""
    if op.name == "constant_pad_nd":
        pads = op.args[1]
        padded = [len(operand.dims) - 1 - i // 2 for i, pad in enumerate(pads) if pad]
        if not any(_is_reduced(operand.dims[d]) for d in padded):
            return
    if op.name == "repeat":
        times = op.args[1][len(op.args[1]) - len(operand.dims) :]
        if not any(n != 1 and _is_reduced(dim) for n, dim in zip(times, operand.dims, strict=True)):
            return
    raise CannotReduce(f"{op.name} on a reduced dimension")


def _align(op: Op, operands: list[Operand], tails: frozenset[int], *, offset: bool) -> list[Cut]:
    """Make operands that share a captured size share the run's size too (``offset``: broadcast from the right)."""
    cuts: list[Cut] = []
    joined = {"cat": 1, "slice_scatter": 2}.get(op.name)  # along this dimension the operands' sizes are their own
    if op.name == "slice_scatter" and op.reads[1].shape == op.reads[0].shape:
        joined = None  # all of it is replaced
    skip = -1 if joined is None else _dim_of(op, operands[0], joined)
    dropped = _dim_of(op, operands[0], 2) if op.name == "select_scatter" else -1
    rank = max(len(operand.dims) for operand in operands)
    for position in range(rank):
        places: list[tuple[int, int]] = []
        for index, operand in enumerate(operands):
            dim = position - (rank - len(operand.dims)) if offset else position
            if dropped >= 0 and index == 1:
                dim = position if position < dropped else position - 1
                if position == dropped:
                    continue
            if 0 <= dim < len(operand.dims) and _captured(operand.dims[dim]) != 1 and position != skip:
                places.append((index, dim))
        if not places:
            continue
        target = min(operands[i].tensor.shape[d] for i, d in places)
        for index, dim in places:
            if operands[index].tensor.shape[dim] != target:
                end = operands[index].const and _captured(operands[index].dims[dim]) in tails
                cuts.append((index, dim, target, end))
    return cuts


def _align_added(operands: list[Operand], tails: frozenset[int]) -> list[Cut]:
    """``added + one @ other``: what is added has the product's sizes, or 1."""
    added, one, other = operands
    cuts = [(index + 1, dim, size, end) for index, dim, size, end in _align_batch([one, other])]
    lead = map(min, one.tensor.shape[:-2], other.tensor.shape[:-2])
    product = (*lead, one.tensor.shape[-2], *(other.tensor.shape[-1:] if other.tensor.dim() > 1 else ()))
    first = len(product) - len(added.dims)
    for dim, size in enumerate(added.tensor.shape):
        if size not in (1, product[first + dim]):
            end = added.const and _captured(added.dims[dim]) in tails
            cuts.append((0, dim, product[first + dim], end))
    return cuts


def _align_batch(operands: list[Operand]) -> list[Cut]:
    """Batched products: only the leading (batch) dimensions must agree."""
    cuts: list[Cut] = []
    for dim in range(len(operands[0].dims) - 2):
        target = min(operand.tensor.shape[dim] for operand in operands)
        cuts += [
            (index, dim, target, False) for index, operand in enumerate(operands) if operand.tensor.shape[dim] != target
        ]
    return cuts


def _narrow(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Cut an operand that is the same all along ``dim`` (a constant, or an expanded one) down to ``size``."""
    if tensor.stride(dim) != 0:
        edge = tensor.narrow(dim, 0, 1)
        if not torch.equal(edge.expand_as(tensor), tensor):
            raise CannotReduce("a constant varies along a reduced dimension")
    return tensor.narrow(dim, 0, size)


def _tail(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.narrow(dim, tensor.shape[dim] - size, size)
