"""What forbids a rewrite around one softmax whatever the region computes, and where the region begins and ends.

Attention of other kinds is passed over in silence: ``latent.py`` says what counts as MLA.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from kdacompile.graph.ir import Graph, Op, Value, ancestors
from kdacompile.patterns.engine.match import Obstacle, rounding
from kdacompile.patterns.engine.values import Numbering, first_column, has_node, root
from kdacompile.patterns.engine.vocabulary import ATTENTION, LAYOUT
from kdacompile.patterns.mla.attention import Attention
from kdacompile.patterns.mla.bindings import MERGED, bindings, labels
from kdacompile.patterns.mla.definition import LatentAttention, LatentCandidate, Parts, place
from kdacompile.patterns.mla.latent import read_latent
from kdacompile.patterns.mla.masks import Masks, read_masks

MAX_BINDINGS = 48

OF_TOKENS = frozenset("q q_rope latent cache k_rope".split())
"""Roles whose dtype is the model's: weights, masks and sinks may be kept in fewer bits."""

WEIGHTS = "the attention weights are"
KEYS = "expanded keys or values (of a cache that keeps them, or returned) are"


def read_attention(graph: Graph, attention: Attention) -> LatentCandidate | Obstacle | None:
    """What could be MLA, or of a near miss what stands in the way; None for attention of another kind."""
    numbering = Numbering()
    found, parts = read_latent(attention, numbering)
    if parts is None or isinstance(parts, Obstacle):
        return parts
    if found.obstacles:
        return found.obstacles[0]
    masks = read_masks(found, parts.sizes)
    return masks if isinstance(masks, Obstacle) else _candidate(graph, found, parts, masks, numbering)


# -- the region --------------------------------------------------------------------------------------------------------


def _candidate(
    graph: Graph, found: Attention, parts: Parts, masks: Masks, numbering: Numbering
) -> LatentCandidate | Obstacle:
    output = _output(graph, found.result, parts.sizes)
    if output is None:
        return Obstacle("roles", "the result is never seen with its batch and heads", found.product)
    # before they are expanded to batch and tokens
    sinks = None if found.sinks is None else root(found.sinks, until=lambda v: has_node(v) and len(v.shape) == 1)
    tensors = parts.tensors | {role: mask.value for role, mask in masks.operands.items()}
    single = {"sinks": sinks, "factor": found.factor}
    tensors |= {role: value for role, value in single.items() if value is not None}
    cut = list(dict.fromkeys(tensors.values()))
    lse = _lse(graph, found, masks)
    numbers = {numbering.of(value): value for value in cut}
    ops = ancestors([output, *lse], lambda value: numbering.of(value) in numbers)
    reads = dict.fromkeys(read for op in ops for read in op.reads if numbering.of(read) in numbers and read not in cut)
    again = {read: numbers[numbering.of(read)] for read in sorted(reads, key=lambda value: value.index)}
    cut += again
    operands = [found.values, *(term.keys for term in found.terms)]
    expanding = ancestors(operands, cut.__contains__)
    # A prefill may leave keys and values behind: attention on all of them gains more than expanding them twice costs.
    whole = 1 < parts.sizes["T"] == parts.sizes["S"] == parts.sizes["C"]
    kept = _kept(graph, ops, cut, expanding) if whole else set[Op]()
    roles = dict.fromkeys(expanding, KEYS) | dict.fromkeys({found.softmax, *found.between}, WEIGHTS)
    tokens = [value for role, value in tensors.items() if role in OF_TOKENS]
    tokens += [read for read, value in again.items() if value in tokens]
    obstacle = _forbidden(graph, ops, [*cut, *lse], output, roles, kept) or rounding(
        ops, ops, _entering(ops, tokens), [output]
    )
    if obstacle is not None:
        return obstacle
    all_bindings = bindings(tensors, output, found.scores, parts.sizes, masks)
    all_bindings = (binding.with_(divides=found.divides) for binding in all_bindings)
    taken = [*islice(_with_lse(all_bindings, lse) if lse else all_bindings, MAX_BINDINGS)]
    if not taken:
        return Obstacle("roles", "the layout of a tensor does not fit its role", found.softmax)
    outputs = [output, found.scores, *lse]
    return LatentCandidate(found.softmax, ops, cut, outputs, taken, duplicates=again, kept=kept)


def _lse(graph: Graph, found: Attention, masks: Masks) -> list[Value]:
    """The logarithm of the sum of the scores' exponentials, if something beside the softmax reads it.

    Where a mask leaves finite numbers of what it hides, a row that is hidden as a whole has one of its own.
    """
    scores = found.scores
    if found.along_rows or any(math.isfinite(m.fill) and m.fill for m in masks.operands.values()):
        return []
    last = (-1, len(scores.shape) - 1)
    made = [op.out for op in scores.users if op.name == "logsumexp" and len(op.args[1]) == 1 and op.args[1][0] in last]
    if len(made) != 1 or made[0].node is None or made[0] in graph.written:
        return []
    below = {op for value in (found.result, found.product.out) for op in ancestors([value], lambda v: v is scores)}
    read = made[0] in graph.outputs or any(user not in below for user in made[0].users)
    return made if read else []


def _with_lse(found: Iterator[LatentAttention], made: list[Value]) -> Iterator[LatentAttention]:
    """Bindings that say which dimension of lse is which, as that of the scores is."""
    (lse,) = made
    for binding in found:
        if binding.scores not in MERGED:
            axes = "".join(axis for axis in binding.scores if axis != "S")
            axes = axes if len(axes) == len(lse.shape) else binding.scores.replace("S", ".")
            yield binding.with_(final_state=place("lse", lse, axes))


def _entering(ops: set[Op], tokens: list[Value]) -> list[Value]:
    """What is given of tokens as it enters the region: tensors, and what they are cast to first (autocast does)."""
    return [*tokens, *(op.out for op in ops if op.name == "_to_copy" and root(op.reads[0]) in tokens)]


def _kept(graph: Graph, ops: set[Op], cut: list[Value], expanding: set[Op]) -> set[Op]:
    """What makes keys and values that are also read elsewhere, or returned; none that end in a buffer of the caller."""
    made = [value for op in expanding & ops for value in op.outs if value not in cut]
    read = [value for value in made if value in graph.outputs or any(user not in ops for user in value.users)]
    return set[Op]() if any(value in graph.written for value in made) else ancestors(read, cut.__contains__)


def _output(graph: Graph, value: Value, sizes: dict[str, int]) -> Value | None:
    """The last value that still has batch, tokens, heads and channels apart."""
    best: Value | None = None
    while True:
        if value.node is not None and next(labels(value, "o", sizes), None) is not None:
            best = value
        if len(value.users) != 1 or value in graph.outputs or not _onward(value.users[0], sizes["V"]):
            return best
        value = value.users[0].out


def _onward(op: Op, width: int) -> bool:
    """A rearrangement, or what cuts off the columns that values were padded with."""
    cuts = op.name == "slice" and first_column(op.out) == 0 and op.out.shape[-1] == width
    return op.name in LAYOUT or cuts


def _forbidden(
    graph: Graph, region: set[Op], cut: list[Value], output: Value, what: dict[Op, str], kept: set[Op]
) -> Obstacle | None:
    """The first operator that must not be in the region, or whose result is needed elsewhere; ``what``: what they make,
    in words; ``kept``: those that stay.
    """
    for op in sorted(region, key=lambda item: item.outs[0].index):
        if op.out.const or op.out.param:
            continue
        if op.name not in ATTENTION:
            return Obstacle("operator", f"the region contains {op.name}, which probes cannot judge", op)
        for value in op.outs:
            if value is output or value in cut or op in kept:
                continue
            outside = next((user.name for user in value.users if user not in region), None)
            if value in graph.outputs or value in graph.written:
                outside = "the graph's caller"
            if outside is not None:
                made = what.get(op, "an intermediate value of the region is")
                return Obstacle("weights" if made is WEIGHTS else "escape", f"{made} also read by {outside}", op)
    return None
