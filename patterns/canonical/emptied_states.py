"""What empties a state, or is a further factor of it: part of its gate.

    where(reset_t, 0, S) * exp(g_t)    becomes    S * exp(where(reset_t, -inf, g_t))
    where(reset_t, 0, S) * a_t         becomes    S * where(reset_t, 0, a_t)
    (S - reset_t * S) * a_t            becomes    the same
    (S * a_t) * b_t                    becomes    S * (a_t * b_t)

A document that begins within a sequence leaves nothing of the state that the tokens before it have made: a gate of 0.
Whether that is told by a boolean or by a number, a state has one gate a token, and what is chosen by data is chosen
before the loop, where no region has to hold it. A state that comes from outside the loop may hold anything where it is
emptied (a cache's memory): it is emptied there as the model does it, besides.

A first token that is padding keeps a state of zeros: where(real_t, S + k_t v_t^T, 0) empties nothing
(``padded_states``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.canonical import padded_states
from kdacompile.patterns.canonical.choices import bit, factors
from kdacompile.patterns.canonical.exponents import exponent
from kdacompile.patterns.engine.constants import constant
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.values import number, root
from kdacompile.patterns.engine.vocabulary import AS_IS, ORDERED

SELECTIONS = frozenset("where masked_fill index_put".split())


@dataclass(frozen=True)
class Step:
    """One factor of a state."""

    op: Op
    state: Value
    factor: Value | float
    kind: str
    """"empties" or "keeps" for a mask that does where it is true, "bit" for a number that is 0 or 1, "share" for such a
    number that is taken from 1, else "factor".
    """

    @property
    def is_mask(self) -> bool:
        return self.kind != "factor"

    @property
    def is_data(self) -> bool:
        return isinstance(self.factor, Value) and not self.factor.const

    @property
    def is_whole(self) -> bool:
        """True for numbers that no region can hold: it would begin behind them, and they are no gates."""
        if not isinstance(self.factor, Value):
            return False
        made = root(self.factor, ORDERED).op
        chosen = self.op.name in SELECTIONS or (self.kind == "bit" and made is not None and made.name in SELECTIONS)
        return chosen or self.kind == "share" or not self.factor.dtype.is_floating_point


Chain = list[Step]


def apply(edit: Edit) -> None:
    """Redefine what is left of every state that a loop may empty."""
    _apply(edit, lambda chain: any(step.is_whole or (step.is_mask and len(chain) > 1) for step in chain))


def apply_all(edit: Edit) -> None:
    """The same for every state with several factors of any kind."""
    _apply(edit, lambda chain: len(chain) > 1 or chain[0].is_whole)


def _apply(edit: Edit, wanted: Callable[[Chain], bool]) -> None:
    for place, chain in _loops(edit.functional):
        if wanted(chain):
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, chain, given=place == 0)


def _loops(graph: Graph) -> list[tuple[int, Chain]]:
    """Factors of a state one after the other, for all states of loops: those that follow from one another. Each with
    how many came before it.
    """
    chains: dict[Value, Chain] = {}
    passed: dict[Value, int] = {}
    starts: dict[Value, int] = {}
    padding = padded_states.keep(graph)
    for op in graph.ops:
        step = _step(op) if op not in padding else None
        before = max((passed.get(read, 0) for read in op.reads), default=0)
        if step is not None:
            chain = chains.pop(step.state, []) if _is_read_once(graph, step.state) else []
            before = starts.pop(step.state) if chain else before
            chains[op.out] = [*chain, step]
            starts[op.out] = before
            before += 1
        for out in op.outs if before else ():
            passed[out] = before
    deepest: dict[tuple[int, ...], int] = {}
    for out, place in starts.items():
        deepest[out.shape] = max(place, deepest.get(out.shape, 0))
    found = [(starts[out], _without_reads(chain)) for out, chain in chains.items() if deepest[out.shape]]
    return [(place, chain) for place, chain in found if any(step.is_data for step in chain)]


def _is_read_once(graph: Graph, value: Value) -> bool:
    return len(value.users) == 1 and value not in graph.outputs and value not in graph.written


def _without_reads(chain: Chain) -> Chain:
    """Less a last product that is only summed: with the query or the key, which are no factors of the state."""
    users = chain[-1].op.out.users
    return chain[:-1] if users and all(user.name == "sum" for user in users) else chain


def _step(op: Op) -> Step | None:
    out = op.out
    if out.const or op.kwargs or not out.dtype.is_floating_point:
        return None
    for state, factor, kind in _readings(op):
        small = not isinstance(factor, Value) or math.prod(factor.shape) < math.prod(out.shape)
        if small and (state.shape, state.dtype) == (out.shape, out.dtype):
            return Step(op, state, factor, kind)
    return None


def _readings(op: Op) -> list[tuple[Value, Value | float, str]]:
    """State, factor and kind, as an operator may be read."""
    if op.name == "mul" and len(op.reads) == 1 and isinstance(op.args[1], (int, float)):
        return [(op.args[0], op.args[1], "factor")]
    if op.name == "mul" and len(op.reads) == 2:
        return [(one, other, _kind(other)) for one, other in (op.reads, op.reads[::-1])]
    if op.name == "sub" and len(op.reads) == 2:
        ways = factors(op.args[1])
        return [
            (one, other, "share") for one, other in ways if root(one, AS_IS) is root(op.args[0], AS_IS) and bit(other)
        ]
    if op.name == "where" and len(op.args) == 3:
        mask, chosen, rest = op.args
        return [
            (state, mask, kind)
            for state, nothing, kind in ((rest, chosen, "empties"), (chosen, rest, "keeps"))
            if isinstance(state, Value) and not mask.const and _is_zero(nothing)
        ]
    if op.name == "masked_fill" and not op.args[1].const and _is_zero(op.args[2]):
        return [(op.args[0], op.args[1], "empties")]
    if op.name == "index_put" and len(op.args) == 3 and len(op.args[1]) == 1 and _is_zero(op.args[2]):
        state, (mask,), _ = op.args
        return [(state, mask, "empties")] if mask is not None and mask.dtype == torch.bool else []
    return []


def _kind(factor: Value) -> str:
    if factor.dtype == torch.bool:
        return "keeps"
    return "bit" if bit(factor) else "factor"


def _is_zero(item: object) -> bool:
    if isinstance(item, Value) and item.const:
        with contextlib.suppress(EvaluationError):
            return not constant(item).any()
    return number(item) == 0


def _rewrite(edit: Edit, chain: Chain, *, given: bool) -> None:
    """``given``: the state may be one that no turn of the loop has made."""
    last, state = chain[-1].op, root(chain[0].state, AS_IS)
    like = last.node or next(step.op.node for step in chain if step.op.node is not None)
    if last.out.node in edit.fixed:
        return
    factors = [_number(edit, step.factor, last.out.dtype, like) for step in chain if not step.is_mask]
    exponents = [found for factor in factors if (found := exponent(edit, factor, like)) is not None]
    logs = len(exponents) == len(factors) > 0
    gate: Value | float = 1.0
    for term in exponents if logs else sorted(factors, key=lambda factor: not isinstance(factor, Value)):
        gate = term if gate == 1 else edit.call(torch.add if logs else torch.mul, gate, term, like=like)
    for step in (step for step in chain if step.is_mask):
        mask = _where_emptied(edit, step, like)
        if given and step.op.name in SELECTIONS and not state.const:
            state = edit.call("masked_fill", state, mask, 0.0, like=like)
        if isinstance(gate, Value):
            gate = edit.call(
                "masked_fill", _spread(edit, gate, mask, like), mask, -math.inf if logs else 0.0, like=like
            )
        else:
            kept = edit.call("to", edit.call("logical_not", mask, like=like), last.out.dtype, like=like)
            gate = kept if gate == 1 else edit.call(torch.mul, kept, gate, like=like)
    factor = edit.call("exp", gate, like=like) if logs else gate
    edit.redefine(last.out, edit.call(torch.mul, state, factor, like=like))


def _number(edit: Edit, factor: Value | float, dtype: torch.dtype, like: fx.Node) -> Value | float:
    if isinstance(factor, Value) and not factor.dtype.is_floating_point:
        return edit.call("to", factor, dtype, like=like)
    return factor


def _where_emptied(edit: Edit, step: Step, like: fx.Node) -> Value:
    """A mask of the state's rank that is true where the state is emptied."""
    mask = step.factor
    assert isinstance(mask, Value)
    if step.op.name == "index_put":
        for _ in range(len(step.state.shape) - len(mask.shape)):
            mask = edit.call("unsqueeze", mask, -1, like=like)
    if step.kind in ("bit", "share"):
        return edit.call("eq" if step.kind == "bit" else "ne", mask, 0, like=like)
    return mask if step.kind == "empties" else edit.call("logical_not", mask, like=like)


def _spread(edit: Edit, gate: Value, mask: Value, like: fx.Node) -> Value:
    """The gate with the dimensions that only the mask has."""
    if torch.broadcast_shapes(gate.shape, mask.shape) == gate.shape:
        return gate
    return edit.call(torch.add, gate, edit.call(torch.mul, mask, 0.0, like=like), like=like)
