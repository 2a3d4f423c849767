"""Gates that a loop makes of the largest exponent so far, as pieces of one tensor.

    m_t = max(f_t + m_(t-1), i_t):    exp(f_t + m_(t-1) - m_t)  becomes  g[t],    g = exp(stack(f_t + m_(t-1) - m_t))

mLSTM keeps its exponentials in range like this, token by token. Each number stays what it was; but no tensor held all
of a gate, so that a region had as many inputs as tokens. Maxima that depend on the state are left: then there is no
gate before the loop.
"""

from __future__ import annotations

import contextlib

import torch

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Graph, Op, Value, ancestors, reach
from kdacompile.patterns.engine.vocabulary import LAYOUT

SUMS = LAYOUT | {"add", "sub", "neg"}
"""What exponents are made with of maxima and gates."""


def apply(edit: Edit) -> None:
    """Redefine the exponentials of every chain of maxima."""
    for chain in _chains(edit.functional):
        for kind in _kinds(edit, chain):
            with contextlib.suppress(CannotEdit):
                like = kind[-1].node
                whole = edit.call(torch.exp, edit.call(torch.stack, [op.reads[0] for op in kind], like=like), like=like)
                turns = [edit.call("select", whole, 0, turn, like=like) for turn in range(len(kind))]
                edit.redefine_all([(op.out, piece) for op, piece in zip(kind, turns, strict=True)])


def _chains(graph: Graph) -> list[list[Op]]:
    """Maxima of which each, but for the first, is made of the one before and of no other."""
    found: dict[Op, list[Op]] = {}
    chains: list[list[Op]] = []
    for op in graph.ops:
        if op.name != "maximum" or op.out.const:
            continue
        above = _maxima(op.reads)
        chain = found.get(above[0]) if len(above) == 1 else None
        if chain is not None and chain[-1] is above[0]:
            chain.append(op)
        else:
            chain = [op]
            chains.append(chain)
        found[op] = chain
    return [chain for chain in chains if len(chain) > 1]


def _kinds(edit: Edit, chain: list[Op]) -> list[list[Op]]:
    """Exponentials of sums with the maxima of a chain, those of one kind together: one for each turn."""
    place = {op: turn for turn, op in enumerate(chain)}
    turns: list[list[Op]] = [[] for _ in chain]
    for op in _below(chain):
        above = _maxima(op.reads) if op.name == "exp" else []
        if above and all(one in place for one in above) and op.out.node not in edit.fixed:
            turns[max(place[one] for one in above)].append(op)
    exponentials = {op for turn in turns for op in turn}
    if len({len(turn) for turn in turns}) != 1 or len({(op.out.shape, op.out.dtype) for op in exponentials}) != 1:
        return []
    sources = [read for op in exponentials for read in op.reads]
    if not exponentials.isdisjoint(ancestors(sources, lambda value: False)):
        return []
    return [list(kind) for kind in zip(*turns, strict=True)]


def _maxima(values: list[Value]) -> list[Op]:
    """The maxima that sums are made of."""

    def above(op: Op) -> list[Op]:
        return _makers(op.reads) if op.name in SUMS else []

    return [op for op in reach(_makers(values), above) if op.name == "maximum" and not op.out.const]


def _below(chain: list[Op]) -> list[Op]:
    """What is made of the maxima, up to exponentials, in the order of the graph."""

    def onward(op: Op) -> list[Op]:
        return list(op.out.users) if op.name in SUMS or op in chain else []

    return sorted(reach(chain, onward), key=lambda op: op.out.index)


def _makers(values: list[Value]) -> list[Op]:
    return [value.op for value in values if value.op is not None]
