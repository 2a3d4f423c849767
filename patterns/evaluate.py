"""Run a region of the shadow on chosen inputs, in float64, with batch and heads cut down where nothing mixes them.

Rounding is left out on purpose: every floating dtype becomes float64, so that what is compared with the recurrence is
the function, not its rounding. A model's real sizes would make probing slow, so inputs may come with fewer batch rows
and heads than the graph was captured with. Sizes written into the graph (views, expands, zeros) are then scaled along.
An operator that looks at one particular row of a reduced dimension raises ``LaneError``, and the region must be run
whole. So does a constant that varies along one, but where the caller has looked at it whole (``tails``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdacompile.patterns.ir import Op, Value, ancestors, map_values
from kdacompile.patterns.vocabulary import INDEXED, SOLVES

Factors = tuple[tuple[int, int], ...]
"""One dimension as a product of (captured size, size of this run)."""


class LaneError(Exception):
    """A reduced dimension is not just carried along by the region."""


class EvaluationError(Exception):
    """An operator refused its inputs in float64 on the CPU."""


def _plain(size: int) -> Factors:
    return ((size, size),)


def _captured(dim: Factors) -> int:
    return math.prod(f[0] for f in dim)


def _run(dim: Factors) -> int:
    return math.prod(f[1] for f in dim)


class _Lane:
    """A tensor of this run, with its dimensions as factors."""

    __slots__ = ("const", "dims", "reduced", "tensor")

    def __init__(self, tensor: Tensor, dims: tuple[Factors, ...], *, const: bool = False) -> None:
        self.tensor = tensor
        self.const = const
        self.dims = dims
        self.reduced = any(_captured(d) != _run(d) for d in dims)


Cut = tuple[int, int, int, bool]
"""An operand's index, its dimension to cut down, the size it gets, and whether it is the end that is left."""

Step = Callable[[list[Tensor]], list[Tensor]]
"""One operator made ready for operands of known sizes."""


@dataclass(frozen=True)
class _Planned:
    """A step with where its operands come from (a tensor: a constant) and what is not needed any more after it."""

    sources: list[Value | Tensor]
    step: Step
    outs: list[Value]
    dead: list[Value]


def _float64(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


class Region:
    """Operators between ``inputs`` and ``outputs``, ready to run many times."""

    def __init__(
        self,
        ops: Sequence[Op],
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        instead: Mapping[Value, Tensor] | None = None,
        tails: frozenset[int] = frozenset(),
    ) -> None:
        """``instead`` gives constants other data than the graph's. ``tails``: along dimensions of these captured sizes
        a constant may be cut down to its end; whoever allows it knows what the constant is elsewhere.
        """
        self.instead = instead or {}
        self.tails = tails
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.ops = sorted(ops, key=lambda op: op.outs[0].index)
        last: dict[Value, int] = {}
        for index, op in enumerate(self.ops):
            for value in op.reads:
                last[value] = index
        keep = set(self.outputs)
        self.dead: list[list[Value]] = [[] for _ in self.ops]
        for value, index in last.items():
            if value not in keep and not value.const:
                self.dead[index].append(value)
        self.constants: dict[Value, _Lane] = {}
        self.moving = set(self.inputs)
        """What depends on the inputs, one of which may be a constant of the graph (a mask)."""
        for op in self.ops:
            if not self.moving.isdisjoint(op.reads):
                self.moving.update(op.outs)
        self.plans: dict[tuple[torch.Size, ...], list[_Planned]] = {}
        """What a run does, by the sizes of its inputs: probes differ in their numbers only."""

    def __call__(
        self, tensors: Sequence[Tensor], factors: Mapping[Value, tuple[Factors, ...]] | None = None
    ) -> list[Tensor]:
        """Outputs for ``tensors``, given in the order of ``inputs`` (any of their dimensions may be reduced).

        ``factors``: dimensions of inputs that are products, only some of whose factors are reduced. They are the same
        in every run of these sizes.
        """
        tensors = [tensor.to(_float64(tensor.dtype)) for tensor in tensors]
        sizes = tuple(tensor.shape for tensor in tensors)
        with torch.no_grad():
            if sizes in self.plans:
                return self.again(self.plans[sizes], tensors)
            plan: list[_Planned] = []
            results = self.first(tensors, plan, factors or {})
        self.plans[sizes] = plan
        return results

    def first(
        self, tensors: Sequence[Tensor], plan: list[_Planned], factors: Mapping[Value, tuple[Factors, ...]]
    ) -> list[Tensor]:
        """Run while working out how each operator is to be run on inputs of these sizes."""
        env: dict[Value, _Lane] = {}
        for value, tensor in zip(self.inputs, tensors, strict=True):
            pairs = tuple(((a, b),) for a, b in zip(value.shape, tensor.shape, strict=True))
            env[value] = _Lane(tensor, factors.get(value, pairs))
        for op, dead in zip(self.ops, self.dead, strict=True):
            self.step(op, env, dead, plan)
            for value in dead:
                env.pop(value, None)
        return [self.load(value, env).tensor for value in self.outputs]

    def again(self, plan: list[_Planned], tensors: Sequence[Tensor]) -> list[Tensor]:
        env = dict(zip(self.inputs, tensors, strict=True))
        for item in plan:
            results = item.step([x if isinstance(x, Tensor) else env[x] for x in item.sources])
            env.update(zip(item.outs, results, strict=False))
            for value in item.dead:
                env.pop(value, None)
        return [env[value] if value in env else self.load(value, {}).tensor for value in self.outputs]

    def load(self, value: Value, env: dict[Value, _Lane]) -> _Lane:
        if value in env:
            return env[value]
        if value.payload is not None:
            data = self.instead.get(value, value.payload).detach().cpu()
            return _Lane(data.to(_float64(data.dtype)), tuple(map(_plain, data.shape)), const=True)
        if value in self.constants:
            return self.constants[value]
        raise EvaluationError(f"{value} is neither an input nor computed in the region")

    def step(self, op: Op, env: dict[Value, _Lane], dead: list[Value], plan: list[_Planned]) -> None:
        if op.out.const and op.out in self.constants:
            return
        lanes = [self.load(value, env) for value in op.reads]
        step = _reduced(op, lanes, self.tails) if any(lane.reduced for lane in lanes) else _call(op)
        results = step([lane.tensor for lane in lanes])
        sources = [value if value in env else lane.tensor for value, lane in zip(op.reads, lanes, strict=True)]
        viewed = _regrouped(lanes[0].dims, op.args[1]) if op.name in _SIZED and lanes[0].reduced else None
        for value, result in zip(op.outs, results, strict=False):
            dims = _out_dims(value, result, lanes) if viewed is None else viewed
            lane = _Lane(result, dims, const=value.const and value not in self.moving)
            if lane.const and not lane.reduced:
                self.constants[value] = lane
            else:
                env[value] = lane
        if not all(value in self.constants for value in op.outs):
            plan.append(_Planned(sources, step, op.outs, dead))


def constant(value: Value) -> Tensor:
    """The data of a value no input reaches; EvaluationError if it cannot be computed here."""
    return Region(list(ancestors([value], lambda _: False)), [], [value])([])[0]


_FILLERS = {"zeros": 0.0, "ones": 1.0, "zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0}
_PICKED = frozenset(
    "select slice select_scatter slice_scatter unbind split split_with_sizes unfold cat cumsum cumprod flip diag_embed "
    "prod".split()
)
_FIXED = INDEXED | frozenset("constant_pad_nd repeat diagonal roll".split())
_SIZED = frozenset({"view", "_unsafe_view", "_reshape_alias"})


def _call(op: Op) -> Step:
    """The operator itself; floating dtypes are float64 and devices the CPU."""
    if op.name in _FILLERS or op.name in ("full", "full_like", "new_full", "empty", "empty_like", "new_empty"):
        filled = _filled(op)
        return lambda _: [filled]
    kwargs = {
        name: item
        for name, item in op.kwargs.items()
        if name not in ("device", "layout", "pin_memory", "memory_format")
    }
    if isinstance(kwargs.get("dtype"), torch.dtype):
        kwargs["dtype"] = _float64(kwargs["dtype"])
    elif op.name in ("arange", "eye", "linspace", "scalar_tensor") and op.out.dtype.is_floating_point:
        kwargs["dtype"] = torch.float64
    if op.name in _SIZED:
        sizes = op.args[1]
        return lambda tensors: [tensors[0].reshape(sizes)]

    # The softmax's third argument asks for a dtype that float64 is not rounded to.
    given = (*op.args[:2], False) if op.name == "_softmax" else op.args

    def call(tensors: list[Tensor]) -> list[Tensor]:
        queue = iter(tensors)
        args = [next(queue) if isinstance(x, Value) else map_values(x, lambda _: next(queue)) for x in given]
        named = map_values(kwargs, lambda _: next(queue)) if kwargs else kwargs
        try:
            result = op.target(*args, **named)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise EvaluationError(f"{op.name}: {error}") from error
        return [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]

    return call


def _filled(op: Op) -> Tensor:
    """A constant tensor without its memory: one element, expanded. ``empty`` is NaN, so that a read of it shows."""
    dtype = _float64(op.out.dtype)
    if op.name in _FILLERS:
        fill: Any = _FILLERS[op.name]
    elif op.name.endswith("empty") or op.name == "empty_like":
        fill = math.nan if dtype.is_floating_point else 0
    else:
        fill = op.args[1] if op.name != "new_full" else op.args[2]
        if isinstance(fill, Value):
            raise EvaluationError("a tensor filled with a computed value")
    return torch.full((), fill, dtype=dtype).expand(op.out.shape)


def _out_dims(value: Value, result: Tensor, lanes: list[_Lane]) -> tuple[Factors, ...]:
    """Factors of a result: sizes that differ from the captured ones came from an operand's dimension of that pair."""
    if len(value.shape) != result.dim():
        raise LaneError(f"{value}: rank changed to {result.dim()}")
    dims: list[Factors] = []
    for captured, run in zip(value.shape, result.shape, strict=True):
        if captured == run:
            dims.append(_plain(captured))
            continue
        known = [d for lane in lanes for d in lane.dims if (_captured(d), _run(d)) == (captured, run)]
        dims.append(known[0] if known else ((captured, run),))
    return tuple(dims)


def _reduced(op: Op, lanes: list[_Lane], tails: frozenset[int]) -> Step:
    """An operator some of whose operands have reduced dimensions."""
    name, first = op.name, lanes[0]
    if name in _SIZED:
        sizes = _regroup(first.dims, op.args[1])
        return lambda tensors: [tensors[0].reshape(sizes)]
    if name == "expand":
        sizes = _expand_sizes(first, op.out.shape)
        return lambda tensors: [tensors[0].expand(sizes)]
    if name in _PICKED:
        _check_picks(op, first)
    elif name in _FIXED:
        _check_untouched(op, first)
    call = _call(op)
    if len(lanes) == 1 and name != "stack":
        return call
    if name == "stack":
        cuts = _align(op, lanes, tails, offset=False)
    elif name in ("bmm", "mm", "mv", "dot", *SOLVES):
        cuts = _align_batch(lanes)
    elif name in ("baddbmm", "addmm"):
        cuts = _align_added(lanes, tails)
    else:
        cuts = _align(op, lanes, tails, offset=name not in ("cat", "select_scatter"))
    return _after_cuts(cuts, call)


def _regroup(dims: tuple[Factors, ...], sizes: Sequence[int]) -> list[int]:
    """The sizes of a view, in this run."""
    return [_run(dim) for dim in _regrouped(dims, sizes)]


def _regrouped(dims: tuple[Factors, ...], sizes: Sequence[int]) -> tuple[Factors, ...]:
    """The dimensions of a view: the operand's factors cut into groups of the captured sizes."""
    queue = [factor for dim in dims for factor in dim if factor != (1, 1)]
    captured = math.prod(f[0] for f in queue)
    if not captured:
        raise LaneError("a view without elements")
    known = math.prod(s for s in sizes if s != -1)
    wanted = [captured // known if s == -1 else s for s in sizes]
    out: list[Factors] = []
    for size in wanted:
        have = 1
        group: list[tuple[int, int]] = []
        while have < size:
            if not queue:
                raise LaneError("view needs more elements than there are")
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
                raise LaneError("a view splits a reduced dimension")
        out.append(tuple(group) if group else _plain(1))
    return tuple(out)


def _expand_sizes(lane: _Lane, shape: tuple[int, ...]) -> list[int]:
    offset = len(shape) - len(lane.dims)
    sizes = list(shape)
    for index, dim in enumerate(lane.dims):
        if _captured(dim) == shape[offset + index]:
            sizes[offset + index] = _run(dim)
    return sizes


def _dim_of(op: Op, lane: _Lane, place: int) -> int:
    dim = op.args[place] if len(op.args) > place else op.kwargs.get("dim", 0)
    return dim % max(1, len(lane.dims))


def _check_picks(op: Op, lane: _Lane) -> None:
    if op.name == "flip":
        if any(_captured(lane.dims[dim]) != _run(lane.dims[dim]) for dim in op.args[1]):
            raise LaneError("flip of a reduced dimension")
        return
    if op.name == "diag_embed":
        if _captured(lane.dims[-1]) != _run(lane.dims[-1]):
            raise LaneError("a reduced dimension on a diagonal")
        return
    place = {"split": 2, "split_with_sizes": 2, "select_scatter": 2, "slice_scatter": 2}.get(op.name, 1)
    dim = lane.dims[_dim_of(op, lane, place)]
    if _captured(dim) == _run(dim):
        return
    if op.name == "slice" and op.out.shape == op.reads[0].shape:
        return
    if op.name == "slice_scatter" and op.reads[1].shape == op.reads[0].shape:
        return
    raise LaneError(f"{op.name} picks from a reduced dimension")


def _check_untouched(op: Op, lane: _Lane) -> None:
    """These operators may run only if the reduced dimensions come out as they went in."""
    if op.name == "constant_pad_nd":
        pads = op.args[1]
        padded = [len(lane.dims) - 1 - i // 2 for i, pad in enumerate(pads) if pad]
        if all(_captured(lane.dims[d]) == _run(lane.dims[d]) for d in padded):
            return
    if op.name == "repeat":
        times = op.args[1][len(op.args[1]) - len(lane.dims) :]
        if all(n == 1 or _captured(dim) == _run(dim) for n, dim in zip(times, lane.dims, strict=True)):
            return
    raise LaneError(f"{op.name} on a reduced dimension")


def _after_cuts(cuts: list[Cut], call: Step) -> Step:
    """``call`` on operands that are the same all along some dimensions, cut down there to the size of the others."""
    if not cuts:
        return call

    def step(tensors: list[Tensor]) -> list[Tensor]:
        tensors = list(tensors)
        for index, dim, size, tail in cuts:
            tensors[index] = _tail(tensors[index], dim, size) if tail else _narrow(tensors[index], dim, size)
        return call(tensors)

    return step


def _narrow(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Cut an operand that is the same all along ``dim`` (a constant, or an expanded one) down to ``size``."""
    if tensor.stride(dim) != 0:
        edge = tensor.narrow(dim, 0, 1)
        if not torch.equal(edge.expand_as(tensor), tensor):
            raise LaneError("a constant varies along a reduced dimension")
    return tensor.narrow(dim, 0, size)


def _tail(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.narrow(dim, tensor.shape[dim] - size, size)


def _align(op: Op, lanes: list[_Lane], tails: frozenset[int], *, offset: bool) -> list[Cut]:
    """Make operands that share a captured size share the run's size too (``offset``: broadcast from the right)."""
    cuts: list[Cut] = []
    joined = {"cat": 1, "slice_scatter": 2}.get(op.name)  # along this dimension the operands' sizes are their own
    if op.name == "slice_scatter" and op.reads[1].shape == op.reads[0].shape:
        joined = None  # all of it is replaced
    skip = -1 if joined is None else _dim_of(op, lanes[0], joined)
    dropped = _dim_of(op, lanes[0], 2) if op.name == "select_scatter" else -1
    rank = max(len(lane.dims) for lane in lanes)
    for position in range(rank):
        places: list[tuple[int, int]] = []
        for index, lane in enumerate(lanes):
            dim = position - (rank - len(lane.dims)) if offset else position
            if dropped >= 0 and index == 1:
                dim = position if position < dropped else position - 1
                if position == dropped:
                    continue
            if 0 <= dim < len(lane.dims) and _captured(lane.dims[dim]) != 1 and position != skip:
                places.append((index, dim))
        if not places:
            continue
        target = min(lanes[i].tensor.shape[d] for i, d in places)
        for index, dim in places:
            if lanes[index].tensor.shape[dim] != target:
                end = lanes[index].const and _captured(lanes[index].dims[dim]) in tails
                cuts.append((index, dim, target, end))
    return cuts


def _align_added(lanes: list[_Lane], tails: frozenset[int]) -> list[Cut]:
    """``added + one @ other``: what is added has the product's sizes, or 1."""
    added, one, other = lanes
    cuts = [(index + 1, dim, size, end) for index, dim, size, end in _align_batch([one, other])]
    lead = map(min, one.tensor.shape[:-2], other.tensor.shape[:-2])
    product = (*lead, one.tensor.shape[-2], other.tensor.shape[-1])
    first = len(product) - len(added.dims)
    for dim, size in enumerate(added.tensor.shape):
        if size not in (1, product[first + dim]):
            end = added.const and _captured(added.dims[dim]) in tails
            cuts.append((0, dim, product[first + dim], end))
    return cuts


def _align_batch(lanes: list[_Lane]) -> list[Cut]:
    """Batched products: only the leading (batch) dimensions must agree."""
    cuts: list[Cut] = []
    for dim in range(len(lanes[0].dims) - 2):
        target = min(lane.tensor.shape[dim] for lane in lanes)
        cuts += [(index, dim, target, False) for index, lane in enumerate(lanes) if lane.tensor.shape[dim] != target]
    return cuts
