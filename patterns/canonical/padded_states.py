"""A state that is kept where a token is padding: that token's gate is 1, and it writes nothing.

    where(real_t, S * exp(g_t) + k_t (beta_t (v_t - k_t^T S exp(g_t)))^T, S)    (any of ``choices``)
    becomes    S * exp(where(real_t, g_t, 0)) + ...    of where(real_t, k_t, 0), and of beta and v likewise

Everything that a padded token would write is chosen, not multiplied away: padding may hold anything, NaN too. What
reads the state reads it as kept. What is chosen by data is chosen before the loop (``hoist``), where no region has to
hold it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Graph, Op, Value, ancestors, reach
from kdacompile.patterns.canonical.choices import Choice, choices
from kdacompile.patterns.canonical.exponents import exponent
from kdacompile.patterns.canonical.masks import Mask, Masks
from kdacompile.patterns.engine.values import Numbering, moves, number, root
from kdacompile.patterns.engine.vocabulary import AS_IS, LAYOUT

SIGNS = {"mul": 0, "add": 1, "sub": -1}
MOST_LINKS = 8
"""How many factors and sums a token's step has at most."""


@dataclass(frozen=True)
class Link:
    """One operator between a state and the next: a factor, or what is added (``sign``)."""

    op: Op
    other: Value | float
    sign: int = 0


def apply(edit: Edit) -> None:
    """Redefine every state that a loop keeps at some tokens."""
    numbering = Numbering(everything=True)
    for op in list(edit.functional.ops):
        for choice, links in _kept(edit.functional, op, numbering):
            with contextlib.suppress(CannotEdit):
                Padding(edit, choice, Masks(edit, op.node)).rewrite(links)
            break


def keep(graph: Graph) -> set[Op]:
    """What states that are kept are chosen with."""
    numbering = Numbering(everything=True)
    found = (choice for op in graph.ops for choice, _ in _kept(graph, op, numbering))
    return {part for choice in found for part in choice.parts}


def _kept(graph: Graph, op: Op, numbering: Numbering) -> Iterator[tuple[Choice, list[Link]]]:
    """The choices between a state and its next one that an operator may be, whatever the state is."""
    for choice in choices(op, numbering):
        links = _links(choice)
        if links and _is_read_here_only(graph, choice, links):
            yield choice, links


def _links(choice: Choice) -> list[Link] | None:
    """From the state to the next one; None if that is not made by factors and sums of its size."""
    state, value, found = root(choice.rest, AS_IS), root(choice.chosen, AS_IS), list[Link]()
    while value is not state:
        ways = [each for each in _onward(value) if _leads(each[0], state, MOST_LINKS - len(found) - 1)]
        if not ways or value.op is None:
            return None
        op, (value, other) = value.op, ways[0]
        found.append(Link(op, other, SIGNS[op.name]))
    return found[::-1]


def _onward(value: Value) -> list[tuple[Value, Value | float]]:
    """What a state within a step may be made of, and the factor or what is added."""
    op = value.op
    if op is None or op.kwargs or op.name not in SIGNS or len(op.args) != 2:
        return []
    ways = [op.args] if op.name == "sub" else [op.args, op.args[::-1]]
    like = (value.shape, value.dtype)
    return [
        (root(read, AS_IS), other)
        for read, other in ways
        if isinstance(read, Value) and (read.shape, read.dtype) == like
    ]


def _leads(value: Value, state: Value, most: int) -> bool:
    """Whether factors and sums of its size lead from the state to a value."""
    return value is state or (most > 0 and any(_leads(read, state, most - 1) for read, _ in _onward(value)))


def _is_read_here_only(graph: Graph, choice: Choice, links: list[Link]) -> bool:
    """Whether nothing but the step itself reads the states within it."""
    step = _step(choice) | choice.parts
    within = [link.op.out for link in links] + [choice.chosen]
    kept = (value in graph.outputs or value in graph.written for value in within)
    return not any(kept) and all(user in step for value in within for user in value.users)


def _step(choice: Choice) -> set[Op]:
    """What makes the next state of this one, and what it is made of besides."""
    state = root(choice.rest, AS_IS)
    return ancestors([choice.chosen], lambda value: value is state)


@dataclass
class Padding:
    """The step of one token, made anew of what it writes where it is no padding."""

    edit: Edit
    choice: Choice
    masks: Masks
    new: dict[Value, Value] = field(default_factory=dict[Value, Value])
    """The states within the step, as made anew."""
    depends: set[Value] = field(default_factory=set[Value])
    """What follows from the state within the step."""

    @property
    def dtype(self) -> torch.dtype:
        return self.choice.op.out.dtype

    @property
    def like(self) -> fx.Node:
        return self.choice.op.node

    def call(self, target: object, *args: object) -> Value:
        return self.edit.call(target, *args, like=self.like)

    def rewrite(self, links: list[Link]) -> None:
        if self.choice.op.out.node in self.edit.fixed:
            raise CannotEdit("a state that is overwritten")
        given = self.choice.mask
        if given.dtype != torch.bool:
            given = self.call("ne", given, 0)
        mask = self.masks.of(given if self.choice.inverted else self.call("logical_not", given))
        state, origin = self.choice.rest, root(self.choice.rest, AS_IS)
        self.edit.refuse_cuts(ancestors([state], lambda value: value is origin))
        self.new[origin] = state
        self.depends = self._below(origin)
        for link in links:
            state = self.linked(state, link, mask)
            self.new[link.op.out] = state
        self.edit.redefine(self.choice.op.out, state)

    def linked(self, state: Value, link: Link, mask: Mask) -> Value:
        if link.sign == 0:
            is_nothing = number(link.other) == 1
            return state if is_nothing else self.call(torch.mul, state, self.gate(link.other, mask))
        if not isinstance(link.other, Value):
            raise CannotEdit("a number is added")
        write, is_chosen = self.chosen(link.other, mask)
        if not is_chosen:
            raise CannotEdit("a padded token would write")
        return self.call(torch.add if link.sign > 0 else torch.sub, state, write)

    def _below(self, state: Value) -> set[Value]:
        """What follows from the state within the step."""
        step = _step(self.choice)
        return set(reach([state], lambda value: [out for user in value.users if user in step for out in user.outs]))

    def gate(self, factor: Value | float, mask: Mask) -> Value:
        if not isinstance(factor, Value):
            nothing = self.call(torch.mul, self.call("to", self.masks.value(mask), self.dtype), 0.0)
            return self.masks.filled(self.call(torch.add, nothing, factor), mask, 1.0)
        if factor in self.depends:
            raise CannotEdit("a gate that the state decides")
        logarithm = exponent(self.edit, factor, self.like)
        if logarithm is None:
            return self.masks.filled(factor, mask, 1.0)
        return self.call("exp", self.masks.filled(logarithm, mask, 0.0))

    def chosen(self, value: Value, mask: Mask) -> tuple[Value, bool]:
        """A value that is 0 where the mask, laid out like it, is true, and True; or what is made of the state alone."""
        op = value.op
        if value in self.new:
            return self.new[value], False
        fits = mask.fits(value.shape)
        if op is None or not (value in self.depends or (fits and self._goes_on(op))):
            return self.masks.filled(value, mask, 0.0), True
        if not fits:
            raise CannotEdit("a part of what the state makes")
        if op.name in SIGNS and not op.kwargs and len(op.args) == 2:
            return self._combined(op, mask)
        if op.name == "neg":
            inner, is_chosen = self.chosen(op.reads[0], mask)
            return self.call(torch.neg, inner), is_chosen
        if op.name == "bmm" and max(mask.dims, default=0) == 0:
            return self._product(op, mask, torch.bmm)
        if op.name == "sum" and not op.kwargs and len(op.args) > 1:
            return self._summed(op, mask)
        if op.name in LAYOUT:
            inner, is_chosen = self.chosen(op.reads[0], self.masks.below(mask, op))
            return self.edit.moved(inner, moves(op), self.like), is_chosen
        raise CannotEdit(f"{op.name} within a step")

    def _goes_on(self, op: Op) -> bool:
        """True for products, and rearrangements of them: a factor is a role, and the product is none."""
        while op.name in LAYOUT and op.reads[0].op is not None:
            op = op.reads[0].op
        return op.name == "bmm" or (op.name == "mul" and not op.kwargs and not op.out.const)

    def _combined(self, op: Op, mask: Mask) -> tuple[Value, bool]:
        target = {"mul": torch.mul, "add": torch.add, "sub": torch.sub}[op.name]
        if op.name == "mul" and len(op.reads) == 2:
            return self._product(op, mask, target)
        terms = [self.chosen(arg, mask) if isinstance(arg, Value) else (arg, op.name == "mul") for arg in op.args]
        if op.name != "mul" and any(not isinstance(term, Value) for term, _ in terms):
            raise CannotEdit("a number is added")
        return self.call(target, *(term for term, _ in terms)), all(is_chosen for _, is_chosen in terms)

    def _product(self, op: Op, mask: Mask, target: object) -> tuple[Value, bool]:
        terms = [self.chosen(read, mask) for read in op.args]
        return self.call(target, *(term for term, _ in terms)), any(is_chosen for _, is_chosen in terms)

    def _summed(self, op: Op, mask: Mask) -> tuple[Value, bool]:
        read, dims, keeps = op.reads[0], op.args[1], bool((*op.args, False, False)[2])
        dims = [dim % len(read.shape) for dim in ([dims] if isinstance(dims, int) else dims or range(len(read.shape)))]
        for dim in () if keeps else sorted(dims):
            mask = mask.placed([has + (has >= dim) for has in mask.dims], mask.rank + 1)
        inner, is_chosen = self.chosen(read, mask)
        return self.call("sum", inner, dims, keeps), is_chosen
