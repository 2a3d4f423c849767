"""What the engine hands from stage to stage, whatever the pattern.

A *candidate* is a region of the functional graph with the *bindings* it may have: who is who of what enters and leaves
it. The check turns it into a *verdict*. A binding that holds, with what stands upstream and is taken over, is a
*match*. What forbids one is an *obstacle*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import torch

from kdacompile import compat
from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.engine.vocabulary import LAYOUT

Code = Literal[
    "alias",  # a buffer or a view of the region is read or written elsewhere
    "bias",  # the projection that expands the latent has one
    "constant",  # a number is added that probes could miss
    "cost",  # the op would take longer than what Inductor makes of it
    "deadline",  # nothing was found for as long as kda.deadline allows
    "disabled",  # switched off by kda.disable
    "dropout",  # active on the attention weights
    "dynamic",  # it does not hold at all sizes that the graph allows
    "escape",  # a value within the region is read outside it
    "field",  # over a prime field it computes other numbers
    "expanded_cache",  # keys and values are cached one by one
    "grad",  # gradients get through part of the region only
    "internal",  # an error of ours
    "half_absorbed",  # weights are absorbed by hand on one side
    "mask",  # a mask is not understood
    "mutation",  # an input is overwritten before the result is used
    "operator",  # an operator stands in the way
    "order",  # a result is used before all inputs exist
    "overlap",  # an input was rewritten by an earlier match
    "per_head_rope",  # every head has a rotated key of its own
    "proof",  # it does not compute the same numbers
    "roles",  # what enters and leaves does not fit
    "rounding",  # it rounds between its steps
    "scores",  # something stands between the scores and the softmax
    "subclass",  # inputs are tensor subclasses
    "transform",  # it runs under torch.func
    "weights",  # the attention weights are used elsewhere
]
"""The kinds of reasons for which a region is left alone."""


@dataclass(frozen=True)
class Obstacle:
    """Why a region was left alone: ``code`` for machines, ``reason`` for people, ``op`` where it stands, and the
    ``candidate`` that there would be without it, where that can be checked.
    """

    code: Code
    reason: str
    op: Op | None = None
    candidate: Candidate[Any] | None = None


def by_node(value: Value) -> object:
    """Who a tensor is, at whatever sizes the graph is captured."""
    return value.node


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Who is who in a region, if it is the pattern: a tensor for every role."""

    inputs: dict[str, Placement]
    output: Placement
    final_state: Placement | None = None
    sizes: dict[str, int]
    """The size behind every axis."""
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The pattern's name, as reports and settings have it."""
        raise NotImplementedError

    @property
    def ends(self) -> list[Placement]:
        return [self.output] if self.final_state is None else [self.output, self.final_state]

    def with_(self: B, **changes: Any) -> B:
        return replace(self, **changes)

    def moved(self: B, swap: dict[Value, Value]) -> B:
        """The same binding of the values of a region like this one."""

        def move(placement: Placement) -> Placement:
            return replace(placement, value=swap[placement.value])

        return self.with_(
            inputs={role: move(placement) for role, placement in self.inputs.items()},
            output=move(self.output),
            final_state=move(self.final_state) if self.final_state else None,
        )

    def assignment(self, who: Callable[[Value], object] = by_node) -> tuple[object, ...]:
        """Who is who, comparable between instances of one graph at other sizes."""
        inputs = {role: placement.key(who) for role, placement in self.inputs.items()}
        return inputs, [placement.key(who) for placement in self.ends]

    def reading(self, values: Sequence[Value]) -> tuple[object, ...]:
        """The same by the places of ``values``, the tensors that a region reads and yields: comparable between regions
        of several graphs.
        """
        return self.assignment({value: place for place, value in enumerate(values)}.__getitem__)

    def key(self) -> tuple[object, ...]:
        """All that a rewrite burns into the graph, comparable in the same way."""
        raise NotImplementedError

    def same_as(self, other: Binding) -> bool:
        """Whether the same rewrite is right at the sizes of both."""
        return self.key() == other.key()

    def text(self) -> str:
        """The binding without the graph it is in."""
        fields = {name: item for name, item in vars(self).items() if name not in ("inputs", "output", "final_state")}
        axes = [(placement.role, placement.axes) for placement in (*self.inputs.values(), *self.ends)]
        return f"{axes}{fields}"


B = TypeVar("B", bound=Binding)


@dataclass
class Candidate(Generic[B]):
    """A region between ``cut`` and ``outputs`` (the result first), with every binding it may have."""

    anchor: Op
    """An operator of the region's heart: where reports say it stands."""
    ops: set[Op]
    cut: list[Value]
    outputs: list[Value]
    bindings: Iterable[B]
    """A list, or found one by one as they are asked for."""
    core: set[Op] = field(default_factory=set[Op])
    """What surely belongs to the region."""
    duplicates: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """Values of the cut that are the same by construction as another one, which has the role."""
    kept: set[Op] = field(default_factory=set[Op])
    """Operators of the region whose results are needed outside it as well."""
    likely: B | None = None
    """Of the bindings, one that has held for a region like this, or the only one: it is checked before the others."""

    @property
    def output(self) -> Value:
        return self.outputs[0]

    @property
    def ends(self) -> list[Value]:
        """All that the region reads and yields."""
        return [*self.cut, *self.outputs]


@dataclass(frozen=True)
class Verdict(Generic[B]):
    """A binding that holds with the largest error met, or the reason why none does."""

    binding: B | None
    max_error: float
    reason: str = ""
    silent: str = ""
    """What kept the region from being compared over a prime field; "" if it was, and is equal there."""
    code: Code = "proof"
    alone: bool = False
    """Whether it holds at the sizes that it was found at, and nobody knows at which others."""

    @property
    def shown(self) -> str:
        """How the binding was shown to hold, for reports."""
        how = f"by probes ({self.silent} stood in the way of an exact check)" if self.silent else "exactly"
        return how + ", for these sizes alone" if self.alone else how


@dataclass(frozen=True)
class Match(Generic[B]):
    """A binding that holds: what the rewrite needs to know."""

    candidate: Candidate[B]
    checked: B
    """The binding as it was checked."""
    binding: B
    """The same, moved up to what the op takes."""
    max_error: float
    shown: str = "exactly"
    """How the binding was shown to hold: "exactly", or "by probes" and what stood in the way."""
    absorbed: tuple[str, ...] = ()
    """What stands upstream and is taken over."""
    upcast: frozenset[str] = frozenset()
    """Roles whose half-precision tensors the op gets in float32, where the model's own upcasts are to be kept."""

    @property
    def inputs(self) -> dict[str, Placement]:
        return self.binding.inputs

    @property
    def output(self) -> Placement:
        return self.binding.output

    @property
    def final_state(self) -> Placement | None:
        return self.binding.final_state

    @property
    def sizes(self) -> dict[str, int]:
        return self.binding.sizes

    @property
    def mode(self) -> str:
        return "step" if self.sizes["T"] == 1 else "sequence"

    def moved_up(self, inputs: dict[str, Placement], **options: Any) -> Match[B]:
        """This, with roles moved to ``inputs`` and options of the binding changed."""
        return replace(self, binding=self.binding.with_(inputs={**self.inputs, **inputs}, **options))

    def taking(self, what: str, inputs: dict[str, Placement], **options: Any) -> Match[B]:
        """This, with ``what`` absorbed."""
        absorbed = self.absorbed if what in self.absorbed else (*self.absorbed, what)
        return replace(self.moved_up(inputs, **options), absorbed=absorbed)


def model_dtype(value: Value) -> torch.dtype:
    """The dtype of a value in the model, which under autocast is another one than in the functional graph."""
    example = None if value.node is None else compat.example_value(value.node)
    return example.dtype if isinstance(example, torch.Tensor) else value.dtype


def rounding(
    casts: Iterable[Op], ops: Collection[Op], inputs: Iterable[Value], outputs: Sequence[Value]
) -> Obstacle | None:
    """The first of ``casts`` that rounds between the steps of the region ``ops``: to fewer bits than any of ``inputs``
    has, or to as many in another dtype; what autocast makes of these counts as well. What autocast rounds by itself is
    no rounding between steps.
    """
    dtypes = {dtype for value in inputs for dtype in (value.dtype, model_dtype(value)) if dtype.is_floating_point}
    least = min((dtype.itemsize for dtype in dtypes), default=0)
    for op in sorted(casts, key=lambda op: op.out.index):
        dtype = op.out.dtype
        if op.name != "_to_copy" or op.out.const or dtype.itemsize > least or dtype in dtypes:
            continue
        value = _read_by(op.out, ops, outputs)
        if value not in outputs and not _autocast_rounds(value, ops, outputs, dtype):
            return Obstacle("rounding", f"the region rounds to {dtype} between its steps", op)
    return None


def _read_by(value: Value, ops: Collection[Op], outputs: Sequence[Value]) -> Value:
    """The last value that holds the same elements: past operators that only lay out or cast, each its only reader."""
    while value not in outputs:
        users = [user for user in value.users if user in ops]
        if len(users) != 1 or users[0].name not in LAYOUT:
            break
        value = users[0].out
    return value


def _autocast_rounds(value: Value, ops: Collection[Op], outputs: Sequence[Value], dtype: torch.dtype) -> bool:
    """True if a product alone reads ``value``, of which autocast makes one of tensors in ``dtype``: it rounds the
    operand whether the model does so before or not.
    """
    readers = [user for user in value.users if user in ops]
    if len(readers) != 1 or readers[0].name not in ("mm", "bmm"):
        return False
    made = readers[0].out
    while made.node is None and made not in outputs:
        users = [user for user in made.users if user in ops]
        if len(users) != 1 or users[0].name not in LAYOUT:
            return False
        made = users[0].out
    return made.dtype != dtype == model_dtype(made)
