"""Weights that the model has absorbed by hand on one side only: the op takes both, and none of them.

    s_ts = (W_UK^T q_t) . c_s,  o_t = sum_s w_ts (W_UV c_s)    or    s_ts = q_t . W_UK c_s,  o_t = W_UV sum_s w_ts c_s

The product with the other weight stands before the scores, or behind the values; with it the region is what
``expanded.py`` reads, and the op chooses the cheaper form by its sizes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.numbering import Numbering
from kdacompile.patterns.engine.values import operand, root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, LAYOUT
from kdacompile.patterns.mla.absorbed import is_per_head, product_behind, read_keys_of
from kdacompile.patterns.mla.definition import Parts
from kdacompile.patterns.mla.expanded import read_keys_beside
from kdacompile.patterns.mla.sources import (
    MOVES,
    Projection,
    Sources,
    heads_of,
    is_part,
    project,
    scales,
    tokens_of,
)
from kdacompile.patterns.mla.walk import Attention

FAR = 64
"""Operators above a key or value among which its projections are looked for."""


def read_half(found: Attention, numbering: Numbering) -> tuple[Attention, Parts] | None:
    """The tensors of one attention with one weight absorbed, and the attention with its product."""
    parts = _keys_absorbed(found, numbering)
    return (found, parts) if parts is not None else _values_absorbed(found, numbering)


def _keys_absorbed(found: Attention, numbering: Numbering) -> Parts | None:
    """Queries that have been taken through W_UK, beside values that are expanded."""
    made, shared = Sources().of(found.values)
    if len(made) != 1 or shared or made[0].bias:
        return None
    (values,) = made
    parts = read_keys_of(values.activation, values.rank, found, numbering)
    if parts is None:
        return None
    query, sizes, rope = parts.tensors["q"], parts.sizes, parts.tensors.get("q_rope")
    for absorbed, rotated in _in_parts(query) if sizes["D"] and rope is None else ((query, rope),):
        keys = _absorbing(absorbed)
        plain = None if keys is None else heads_of(keys.activation)
        if keys is None or plain is None or (sizes["D"] and rotated is None):
            continue
        sizes = sizes | {"N": keys.rank, "K": keys.rank, "V": found.value_width}
        heads, merged = sizes["H"], is_part(keys.weight, values.weight)
        each = sizes["V"] + sizes["N"] if merged else sizes["V"]
        if keys.rows != heads * sizes["R"] or values.rows != heads * each:
            continue
        if math.prod(plain.shape) != sizes["B"] * sizes["T"] * heads * sizes["N"]:
            continue
        weights = {"w": values} if merged else {"w_k": keys, "w_v": values}
        tensors = parts.tensors | {"q": plain} | {role: operand(made.weight) for role, made in weights.items()}
        return Parts(tensors if rotated is None else tensors | {"q_rope": rotated}, sizes)
    return None


def _in_parts(query: Value) -> list[tuple[Value, Value | None]]:
    """Both ways to say which part of a query in one piece is absorbed, and which is rotated."""
    joined = _above(query).op
    if joined is None or joined.name != "cat" or len(joined.reads) != 2:
        return []
    return [(part, heads_of(other)) for part, other in (joined.reads, joined.reads[::-1])]


def _absorbing(query: Value) -> Projection | None:
    """The product with a weight per head that makes a query."""
    op = _above(query).op
    if op is None or op.name not in CONTRACTIONS or not is_per_head(op.reads):
        return None
    made = project(op)
    return None if made is None or made.bias else made


def _above(value: Value) -> Value:
    """What a value is, rearrangements and constant factors aside."""
    while value.op is not None and (value.op.name in LAYOUT or scales(value.op)):
        value = next(read for read in value.op.reads if not read.const)
    return value


def _values_absorbed(found: Attention, numbering: Numbering) -> tuple[Attention, Parts] | None:
    """Keys that are expanded, beside values that are the latent; the result is taken through W_UV."""
    after = product_behind(found.result)
    made = None if after is None else project(after)
    if after is None or made is None or made.bias or made.rank != found.value_width:
        return None
    width = math.prod(after.out.shape) * made.rank // math.prod(found.result.shape)
    taken, latent = replace(found, result=after.out, taken=width), tokens_of(found.values)
    while latent is not None:
        parts = read_keys_beside(replace(made, activation=latent), taken, numbering)
        if isinstance(parts, Parts):
            return taken, parts
        op = latent.op
        latent = tokens_of(op.reads[0]) if op is not None and op.name in LAYOUT else None
    return None


# -- near misses -------------------------------------------------------------------------------------------------------


def half_absorbed(found: Attention, numbering: Numbering) -> Obstacle | None:
    """Why neither is read, of keys or values that are the latent itself beside others that are expanded from it."""
    for order in (found, found.swapped()):
        sides = {"keys": [term.keys for term in order.terms], "values": [order.values]}
        for expanded, itself in (("keys", "values"), ("values", "keys")):
            made = {numbering.of(latent) for value in sides[expanded] for latent in _latents(value)}
            if any(numbering.of(root(value)) in made for value in sides[itself]):
                reason = f"only the {expanded} are expanded from the latent: weights are absorbed by hand on one side"
                return Obstacle("half_absorbed", reason, found.softmax)
    return None


def _latents(value: Value) -> list[Value]:
    """What the nearest projections above a key or value are made of, rearrangements in between."""
    stack, seen, found = [value], set[Value](), list[Projection]()
    while stack and len(seen) < FAR:
        step = stack.pop()
        op = step.op
        if op is None or step in seen or step.const:
            continue
        seen.add(step)
        projection = project(op)
        if projection is not None:
            found.append(projection)
        elif op.name in MOVES or scales(op):
            stack += [read for read in op.reads if not read.const]
    return [root(projection.activation) for projection in found]
