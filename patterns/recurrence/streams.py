"""Streams of a token that are mixed and put back, as hyper-connections do: products that are no recurrence."""

from __future__ import annotations

import math
from functools import partial

from kdacompile.graph.ir import Op
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, SCANS, SOLVES
from kdacompile.patterns.recurrence.regions import Group

MAX_STREAMS = 16


JOINS = frozenset("stack cat select_scatter slice_scatter".split())


def keeps_tokens_apart(group: Group) -> bool:
    """True if every anchor works within one token, so that nothing of the group can be a recurrence: streams of a token
    that are mixed and put back (hyper-connections). Streams are few: more rows than ``MAX_STREAMS`` are tokens
    with heads in front of them. Where a way leads out of the group and back, as through a model's layer, sums over
    streams are told by what they sum.
    """
    if not group.exits or not group.exits[0].chain or any(map(partial(_joins_turns, group.masks), group.ops)):
        return False
    lead = group.exits[0].chain[-1].shape[:2]
    returns = any(group.beyond.get(op, 0) & group.exits[0].anchors for op in group.anchors)
    for op in group.anchors:
        shape = op.reads[0].shape if returns and op.name == "sum" else op.out.shape
        merged = op.name in CONTRACTIONS and len(shape) == 3 and shape[0] == math.prod(lead)
        if not merged and (op.name in SCANS or op.name in SOLVES or len(shape) < 3 or shape[:2] != lead):
            return False
        if shape[1 if merged else 2] > MAX_STREAMS:
            return False
    return True


def _joins_turns(masks: dict[Op, int], op: Op) -> bool:
    """True if the operator puts results of two turns of a loop beside each other: each has read the state, and for
    itself.
    """
    made = [masks[value.op] for value in op.reads if value.op in masks] if op.name in JOINS else []
    return any(one & other and one & ~other and other & ~one for one in made for other in made)
