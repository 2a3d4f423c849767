"""What absorption may cross: everything a rule asks about a value before it moves a role up to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kdacompile import compat
from kdacompile.graph import gradient
from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.engine.vocabulary import LAYOUT
from kdacompile.patterns.recurrence.roles import RecurrenceMatch

FULL_PRECISION = 4
"""Bytes of float32: arithmetic below it rounds, and that rounding is the model's own."""

HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Scope:
    """One match's surroundings: the functional graph, the policy for upcasts and where the region ends."""

    functional: Graph
    keep_upcasts: bool
    grad: bool
    """A result of the region wants a gradient, so gradients must get through whatever is absorbed too."""
    end: int
    """Where the results have been read for the first time, at the latest."""
    inside: frozenset[object] = field(repr=False)
    """Dynamo nodes whose writes come after the op has read its inputs."""

    @staticmethod
    def of(match: RecurrenceMatch, functional: Graph, *, keep_upcasts: bool) -> Scope:
        results = match.binding.ends
        return Scope(
            functional,
            keep_upcasts,
            grad=any(gradient.wants_gradient(placement.value.node) for placement in results),
            end=max(op.position for op in [*match.candidate.core, *(user for p in results for user in p.value.users)]),
            inside=frozenset([*(op.node for op in match.candidate.ops), *_stores(match, functional)]),
        )

    def crosses(self, op: Op) -> bool:
        """True unless the operator cuts the gradient or casts in a way that is part of the function."""
        return op.name != "detach" and (op.name != "_to_copy" or self.cast_is_free(op))

    def lets_gradients_through(self, ops: Iterable[Op], inputs: Iterable[Value]) -> bool:
        """True if a gradient of ``inputs`` gets through ``ops`` on every path, or none is wanted."""
        return not self.grad or not gradient.is_cut(ops, inputs, self.functional.names)

    def cast_is_free(self, op: Op) -> bool:
        """Copies, and the upcast of a half-precision tensor to float32, which the op does anyway.

        An upcast to float64 stays: it asks for arithmetic that the op does only for float64 inputs.
        """
        source, target = op.reads[0].dtype, op.out.dtype
        if source == target:
            return True
        return not self.keep_upcasts and source in HALVES and target == torch.float32

    def computes(self, op: Op) -> bool:
        """True if the operator's arithmetic is at least float32: the op's own is, and would not round in between."""
        if not self.crosses(op):
            return False
        return op.name in LAYOUT or not op.out.dtype.is_floating_point or op.out.dtype.itemsize >= FULL_PRECISION

    def holds(self, value: Value) -> bool:
        """True if the Dynamo graph has the value by name, unchanged until the region is done with it."""
        node = value.node
        if node is None or not value.dtype.is_floating_point:
            return False
        storage = self.functional.storages.get(node)
        made = value.op.position if value.op is not None else -1
        return not any(
            write.storage == storage and write.node not in self.inside and made < write.position <= self.end
            for write in self.functional.mutations
        )

    def same_device(self, value: Value, other: Value) -> bool:
        return compat.example_value(value.node).device == compat.example_value(other.node).device


def _stores(match: RecurrenceMatch, functional: Graph) -> list[object]:
    """Writes of the final state itself into a buffer."""
    if match.final_state is None:
        return []
    node = match.final_state.value.node
    return [write.node for write in functional.mutations if node in write.node.all_input_nodes]
