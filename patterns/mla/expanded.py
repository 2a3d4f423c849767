"""Keys and values that come out of a latent: which projections expand it, and what the heads share beside it.

It counts as MLA once keys and values come out of one activation that is narrower than they are, or that leaves a part
of the key to a tensor all heads share; from there on, whatever stands in the way is reported.
"""

from __future__ import annotations

import math
from itertools import product

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.numbering import Numbering
from kdacompile.patterns.engine.values import operand
from kdacompile.patterns.mla.bindings import labels
from kdacompile.patterns.mla.definition import Parts
from kdacompile.patterns.mla.sources import CACHED, Projection, Sources, heads_of, is_part, tokens_of, unexpanded
from kdacompile.patterns.mla.walk import Attention, Term

Made = tuple[list[Projection], list[Value]]
"""What an operand is made of: projections, and tensors that are shared by all heads."""


def read_expanded(found: Attention, numbering: Numbering) -> Parts | Obstacle | None:
    """The tensors of one attention over an expanded latent, or what is in the way; None: attention of another kind."""
    values, shared = Sources().of(found.values)
    if len(values) != 1 or shared or tokens_of(values[0].activation) is None:
        return _expanded_cache(found)
    return read_keys_beside(values[0], found, numbering)


def read_keys_beside(values: Projection, found: Attention, numbering: Numbering) -> Parts | Obstacle | None:
    """The tensors of one attention whose keys are expanded from the latent that the values are made of."""
    latent = tokens_of(values.activation)
    if latent is None:
        return None
    parts = [Sources(latent, numbering=numbering).of(term.keys) for term in found.terms]
    keys = list(dict.fromkeys(projection for projections, _ in parts for projection in projections))
    shared = list(dict.fromkeys(value for _, values in parts for value in values))
    if len(keys) != 1 or not _is_latent(keys[0], values, latent, shared, found, numbering):
        return None
    return _bias(keys[0], values) or _parts(found, keys[0], values, shared, parts)


def _expanded_cache(found: Attention) -> Obstacle | None:
    """Keys and values of a latent that are cached one by one, as transformers before 5 does."""
    made = [Sources(moves=CACHED).of(operand)[0] for operand in (found.values, *(term.keys for term in found.terms))]
    values, keys = made[0], list(dict.fromkeys(projection for projections in made[1:] for projection in projections))
    if len(values) != 1 or len(keys) != 1:
        return None
    latent = tokens_of(values[0].activation)
    if latent is None or tokens_of(keys[0].activation) is not latent or not _narrow(keys[0], values[0]):
        return None
    reason = "keys and values are cached expanded: of earlier tokens there is no latent left to attend to"
    return Obstacle("expanded_cache", reason, found.softmax)


def _narrow(keys: Projection, values: Projection) -> bool:
    """True if the latent is narrower than what comes out of it."""
    rows = {projection.op: projection.rows for projection in (keys, values)}
    return 2 * keys.rank < sum(rows.values())


def _is_latent(
    keys: Projection, values: Projection, latent: Value, shared: list[Value], found: Attention, numbering: Numbering
) -> bool:
    """True if keys and values are expanded from a latent, apart from what the queries are made of."""
    made = Sources(latent, numbering=numbering)
    if any(projection.op is keys.op for term in found.terms for projection in made.of(term.queries)[0]):
        return False
    return any(value.shape[-1] for value in shared) or _narrow(keys, values)


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
    latent, query = tokens_of(keys.activation), heads_of(plain.queries)
    query_rope = None if rotated is None else heads_of(rotated.queries)
    rope = tokens_of(unexpanded(shared[0])) if shared else None
    if latent is None or query is None or (rotated and query_rope is None) or (shared and rope is None):
        return Obstacle("roles", "an operand of the attention is never seen with its batch and heads", found.softmax)
    held = math.prod(latent.shape) // keys.rank
    widths = [0] if rope is None else [shared[0].shape[-1], math.prod(rope.shape) // held]  # or keys are columns
    widths = [rotated.width] if rotated else dict.fromkeys(widths)
    batches = dict.fromkeys((found.softmax.out.shape[0], held // found.cached))
    tried = product(widths, batches)
    sized = (_sizes(found, keys, values, plain, latent, query, *sizes, rotated is None) for sizes in tried)
    sizes = next((sizes for sizes in sized if sizes is not None), None)
    if sizes is None:
        return Obstacle("roles", "what enters the attention does not fit the sizes of MLA", found.softmax)
    if rope is not None and next(labels(rope, "k_rope", sizes), None) is None:
        return Obstacle("per_head_rope", "every head has a rotated key of its own", rope.op or found.softmax)
    weights = {"w": keys} if _merged(keys, values) else {"w_k": keys, "w_v": values}
    tensors = {"q": query, "latent": latent} | {role: operand(made.weight) for role, made in weights.items()}
    # A rotated part of no columns (no positions) is an operand of the region, though not of the op.
    optional = {"k_rope": rope, "q_rope": query_rope}
    return Parts(tensors | {role: value for role, value in optional.items() if value is not None}, sizes)


def _merged(keys: Projection, values: Projection) -> bool:
    """True if one weight expands both; the result may be taken through a part of it."""
    return keys.op is values.op or is_part(values.weight, keys.weight)


def _sizes(
    found: Attention,
    keys: Projection,
    values: Projection,
    plain: Term,
    latent: Value,
    query: Value,
    rope: int,
    batch: int,
    single: bool,
) -> dict[str, int] | None:
    """The size behind every axis; None if the tensors do not agree on one."""
    width = plain.width
    nope = width - rope if single else width
    value, cached, rank = found.value_width, found.cached, keys.rank
    merged = _merged(keys, values)
    per_head = nope + value if merged else nope
    if min(nope, value, rank, cached, batch) < 1 or keys.rows % per_head:
        return None
    heads = keys.rows // per_head
    held, rest = divmod(math.prod(latent.shape), batch * rank)
    tokens, left = divmod(math.prod(query.shape), batch * heads * width)
    if rest or left or not tokens or (not merged and values.rows != heads * value):
        return None
    if math.prod(found.result.shape) != batch * tokens * heads * (value + found.padding) or held < cached:
        return None
    if held != cached and cached != tokens:
        return None
    sizes = {"B": batch, "T": tokens, "S": cached, "C": held, "H": heads, "N": nope, "D": rope, "R": rank, "V": value}
    sizes["K"] = width
    return sizes if next(labels(latent, "latent", sizes), None) is not None else None
