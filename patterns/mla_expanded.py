"""Keys and values that come out of a latent: which projections expand it, and what the heads share beside it.

It counts as MLA once keys and values come out of one activation that is narrower than they are, or that leaves a part
of the key to a tensor all heads share; from there on, whatever stands in the way is reported.
"""

from __future__ import annotations

import math

from kdacompile.patterns.ir import Value
from kdacompile.patterns.mla import Parts
from kdacompile.patterns.mla_walk import CACHED, Attention, Projection, Sources, Term, named, unexpanded
from kdacompile.patterns.obstacle import Obstacle
from kdacompile.patterns.regions import root

Made = tuple[list[Projection], list[Value]]
"""What an operand is made of: projections, and tensors that are shared by all heads."""


def read_expanded(found: Attention) -> Parts | Obstacle | None:
    """The tensors of one attention over an expanded latent, or what is in the way; None: attention of another kind."""
    values, values_shared = Sources().of(found.values)
    latent = named(values[0].activation, 3) if len(values) == 1 else None
    if latent is None or values_shared:
        return _expanded_cache(found)
    parts = [Sources(latent).of(term.right) for term in found.terms]
    keys = list(dict.fromkeys(projection for projections, _ in parts for projection in projections))
    shared = list(dict.fromkeys(value for _, values in parts for value in values))
    if len(keys) != 1 or not _is_latent(keys[0], values[0], latent, shared, found):
        return None
    return _bias(keys[0], values[0]) or _parts(found, keys[0], values[0], shared, parts)


def _expanded_cache(found: Attention) -> Obstacle | None:
    """Keys and values of a latent that are cached one by one, as transformers before 5 does."""
    made = [Sources(moves=CACHED).of(operand)[0] for operand in (found.values, *(term.right for term in found.terms))]
    values, keys = made[0], list(dict.fromkeys(projection for projections in made[1:] for projection in projections))
    if len(values) != 1 or len(keys) != 1:
        return None
    latent = named(values[0].activation, 3)
    if latent is None or named(keys[0].activation, 3) is not latent or not _narrow(keys[0], values[0]):
        return None
    reason = "keys and values are cached expanded: of earlier tokens there is no latent left to attend to"
    return Obstacle("expanded_cache", reason, found.softmax)


def _narrow(keys: Projection, values: Projection) -> bool:
    """True if the latent is narrower than what comes out of it."""
    rows = {projection.op: _rows(projection) for projection in (keys, values)}
    return 2 * keys.activation.shape[-1] < sum(rows.values())


def _is_latent(keys: Projection, values: Projection, latent: Value, shared: list[Value], found: Attention) -> bool:
    """True if keys and values are expanded from a latent, apart from what the queries are made of."""
    made = Sources(latent)
    if any(projection.op is keys.op for term in found.terms for projection in made.of(term.left)[0]):
        return False
    return any(value.shape[-1] for value in shared) or _narrow(keys, values)


def _rows(projection: Projection) -> int:
    """How many rows the weight has: heads times what each has."""
    return math.prod(projection.weight.shape) // projection.activation.shape[-1]


def _bias(*projections: Projection) -> Obstacle | None:
    for projection in projections:
        if projection.bias:
            reason = "the projection that expands the latent has a bias, which does not absorb"
            return Obstacle("bias", reason, projection.op)
    return None


def _parts(
    found: Attention, keys: Projection, values: Projection, shared: list[Value], parts: list[Made]
) -> Parts | Obstacle:
    if len(shared) > 1 or len(found.terms) > 2 or (len(found.terms) == 2 and not shared):
        return Obstacle("roles", "the keys are made of more than a latent and one shared part", found.softmax)
    plain = next(term for term, (projections, _) in zip(found.terms, parts, strict=True) if projections)
    rotated = next((term for term in found.terms if term is not plain), None)
    latent, query = named(keys.activation, 3), named(plain.left, 4)
    query_rope = None if rotated is None else named(rotated.left, 4)
    rope = named(unexpanded(shared[0]), 3) if shared else None
    if latent is None or query is None or (rotated and query_rope is None) or (shared and rope is None):
        return Obstacle("roles", "an operand of the attention is never seen with its batch and heads", found.softmax)
    width = 0 if not shared else rotated.left.shape[-1] if rotated else shared[0].shape[-1]
    sizes = _sizes(found, keys, values, plain, latent, query, width, single=rotated is None)
    if sizes is None:
        return Obstacle("roles", "what enters the attention does not fit the sizes of MLA", found.softmax)
    if rope is not None and math.prod(rope.shape) != sizes["B"] * sizes["C"] * sizes["D"]:
        return Obstacle("per_head_rope", "every head has a rotated key of its own", rope.op or found.softmax)
    weights = {"w": keys} if keys.op is values.op else {"w_k": keys, "w_v": values}
    tensors = {"q": query, "latent": latent} | {role: root(made.weight) for role, made in weights.items()}
    # A rotated part of no columns (no positions) is an operand of the region, though not of the op.
    optional = {"k_rope": rope, "q_rope": query_rope}
    return Parts(tensors | {role: value for role, value in optional.items() if value is not None}, sizes)


def _sizes(
    found: Attention,
    keys: Projection,
    values: Projection,
    plain: Term,
    latent: Value,
    query: Value,
    rope: int,
    *,
    single: bool,
) -> dict[str, int] | None:
    """The size behind every letter; None if the tensors do not agree on one."""
    width = plain.left.shape[-1]
    nope = width - rope if single else width
    value, cached, rank = found.values.shape[-1], found.values.shape[-2], keys.activation.shape[-1]
    per_head = nope + value if keys.op is values.op else nope
    if min(nope, value, rank, cached) < 1 or _rows(keys) % per_head:
        return None
    heads = _rows(keys) // per_head
    batch = found.softmax.out.shape[0]
    held, rest = divmod(math.prod(latent.shape), batch * rank)
    tokens, left = divmod(math.prod(query.shape), batch * heads * width)
    if rest or left or not tokens or (keys.op is not values.op and _rows(values) != heads * value):
        return None
    if math.prod(found.product.out.shape) != batch * tokens * heads * value or held < cached:
        return None
    if held != cached and cached != tokens:
        return None
    sizes = {"B": batch, "T": tokens, "S": cached, "C": held, "H": heads, "N": nope, "D": rope, "R": rank, "V": value}
    return {**sizes, "K": width}
