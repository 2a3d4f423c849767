"""The latent that keys and values meet in, and who is who around it.

    s_ts = scale * (q_t . W_UK c_s + q_rope_t . r_s)      o_t = softmax_s(s_ts + mask_ts) W_UV c_s

Keys and values are followed up through rearrangements. Where both arrive at one tensor, be it through a product with a
weight each (expanded), through none (absorbed by hand), or through one on one side, that tensor is the latent ``c``;
what else the keys are made of is the rotated part ``r`` of all heads. A weight that is on neither way stands above the
queries (W_UK) or below the result (W_UV): with it the region is the same function, and the op chooses the cheaper form
by its sizes. What the products and rearrangements do to heads and columns the check will say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.values import Numbering, operand, root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, LAYOUT
from kdacompile.patterns.mla.attention import Attention, Term
from kdacompile.patterns.mla.bindings import labels
from kdacompile.patterns.mla.definition import Parts
from kdacompile.patterns.mla.sources import (
    CACHED,
    REARRANGEMENTS,
    Projection,
    Sources,
    climb,
    follows,
    heads_of,
    is_part,
    is_weight,
    project,
    scales,
    tokens_of,
    unexpanded,
)

FAR = 24
"""Operators around an attention among which a weight is looked for."""

Read = tuple[Attention, Parts | Obstacle | None]
"""The attention with its products, and its tensors, or what is in the way; None: attention of another kind."""


def read_latent(attention: Attention, numbering: Numbering) -> Read:
    """The tensors of one attention, with queries before keys or the other way round."""
    near: Obstacle | None = None
    for found in (attention, attention.swapped()):
        for meeting in _meetings(found, numbering):
            taken, parts = meeting.read()
            if isinstance(parts, Parts):
                return taken, parts
            near = near or parts
    return attention, near or _two_latents(attention) or _expanded_cache(attention)


def _meetings(found: Attention, numbering: Numbering) -> Iterator[_Meeting]:
    """Every tensor that keys and values could both be taken from, the nearest first."""
    values = Sources(numbering=numbering).of(found.values)
    expanded = None if values.shared else values.only
    for projection in (None, expanded) if expanded else (None,):
        start, rank = (projection.activation, projection.rank) if projection else (found.values, found.value_width)
        tried = set[Value]()
        for value in climb(start):
            latent = tokens_of(value)
            if latent is None or latent in tried:
                continue
            tried.add(latent)
            made = [Sources(latent, numbering=numbering).of(term.keys) for term in found.terms]
            plain = [term for term, own in zip(found.terms, made, strict=True) if own.latent or own.projections]
            keys = Sources(latent, numbering=numbering).of(*(term.keys for term in found.terms))
            if plain and (keys.only is not None) != keys.latent:
                yield _Meeting(found, latent, rank, projection, keys.only, plain, list(keys.shared), numbering)


@dataclass(frozen=True)
class _Meeting:
    """Keys and values of one tensor, ``rank`` columns of which the values are made of."""

    found: Attention
    latent: Value
    rank: int
    values: Projection | None
    """The product that expands the values; None if they are the latent itself."""
    keys: Projection | None
    """The same of the keys."""
    plain: list[Term]
    """The products of keys that are made of the latent."""
    shared: list[Value]
    """What else keys are made of."""
    numbering: Numbering

    def read(self) -> Read:
        """The attention with what belongs to it, and its tensors."""
        if self.keys is None:
            return self.found, self.parts() or (self.half("values") if self.values else None)
        if not self.is_latent(self.keys):
            return self.found, None
        for made in (self.keys, self.values):
            if made is not None and made.bias:
                reason = "the projection that expands the latent has a bias, which the op does not take"
                return self.found, Obstacle("bias", reason, made.op)
        if self.values is not None:
            return self.found, self.parts() or self.misfit()
        taken = self.taken_through()
        parts = None if taken is None else taken.parts()
        return (taken.found, parts) if taken and isinstance(parts, Parts) else (self.found, self.half("keys"))

    def is_latent(self, keys: Projection) -> bool:
        """True if keys (and values) are expanded from a latent, apart from what the queries are made of: it is
        narrower than what comes out of it, or leaves a part of the key to a tensor that all heads share (made of
        something else: one head's key may be rotated in part).
        """
        queries = Sources(self.latent, numbering=self.numbering).of(*(term.queries for term in self.found.terms))
        if keys.op in queries.projections or follows(self.shared, keys.op):
            return False
        return any(value.shape[-1] for value in self.shared) or _narrow(keys, self.values or self.behind or keys)

    def taken_through(self) -> _Meeting | None:
        """The same with the product behind the result, which takes it through W_UV."""
        made, result = self.behind, self.found.result
        if made is None or made.bias or made.rank != self.rank:
            return None
        width = math.prod(made.op.out.shape) * made.rank // math.prod(result.shape)
        return replace(self, found=replace(self.found, result=made.op.out, taken=width), values=made)

    def parts(self) -> Parts | Obstacle | None:
        """The tensors by role with the sizes behind their axes; None if they do not fit each other."""
        for rope in [] if self.is_odd() else self.rope_widths():
            for query, rotated, keys in self.queries(rope):
                sizes = self.sizes(query, keys, rope)
                if sizes is None:
                    continue
                if self.keys and self.rope and next(labels(self.rope, "k_rope", sizes), None) is None:
                    return self.rope_per_head(self.rope)
                # A rotated part of no columns (no positions) is an operand of the region, though not of the op.
                tensors = {"q": query, "cache" if self.is_cache else "latent": self.latent}
                tensors |= {role: _laid_out(made, role, sizes) for role, made in self.weights(keys).items()}
                optional = {"k_rope": self.rope, "q_rope": rotated}
                return Parts(tensors | {role: value for role, value in optional.items() if value is not None}, sizes)
        return None

    def misfit(self) -> Obstacle:
        reason = "what enters the attention does not fit the sizes of MLA"
        if self.is_odd():
            reason = "the keys are made of more than a latent and one shared part"
        return Obstacle("roles", reason, self.found.softmax)

    def rope_per_head(self, rope: Value) -> Obstacle:
        made = Sources().of(rope).only
        if made is not None and _expands(made):
            return Obstacle("roles", "the keys are expanded from two latents", made.op)
        return Obstacle("per_head_rope", "every head has a rotated key of its own", rope.op or self.found.softmax)

    def half(self, expanded: str) -> Obstacle:
        reason = f"only the {expanded} are expanded from the latent: weights are absorbed by hand on one side"
        return Obstacle("half_absorbed", reason, self.found.softmax)

    # -- tensors

    @property
    def behind(self) -> Projection | None:
        """The product with a weight per head that takes the result."""
        return project(_product_behind(self.found.result))

    @property
    def term(self) -> Term:
        return self.plain[0]

    @property
    def rotated(self) -> Term | None:
        """The product of rotated queries and keys, where it is one of its own."""
        return next((term for term in self.found.terms if term is not self.term), None)

    @property
    def rope(self) -> Value | None:
        return tokens_of(unexpanded(self.shared[0])) if self.shared else None

    @property
    def is_cache(self) -> bool:
        """Whether the tensor has the rotated keys beside the latent."""
        return self.keys is None and not self.shared and self.term.width > self.rank

    def is_odd(self) -> bool:
        """True if keys are made of more than a latent and one part of all heads."""
        terms, unseen = len(self.found.terms), bool(self.shared) and self.rope is None
        return unseen or len(self.shared) > 1 or terms > 2 or len(self.plain) > 1 or (terms == 2 and not self.shared)

    def rope_widths(self) -> list[int]:
        """How many columns are rotated; of a cache of both, those that are not values."""
        if self.rotated is not None:
            return [self.rotated.width]
        if self.shared:
            rope, tokens = self.rope, math.prod(self.latent.shape) // self.rank
            counted = [] if rope is None else [math.prod(rope.shape) // tokens]  # or keys are columns
            return list(dict.fromkeys([self.shared[0].shape[-1], *counted]))
        return [self.term.width - self.rank if self.is_cache else 0]

    def queries(self, rope: int) -> Iterator[tuple[Value, Value | None, Projection | None]]:
        """The query, the rotated one and the product with W_UK. That may stand above the query: of a query in one piece
        it makes either part.
        """
        rotated = None if self.rotated is None else self.rotated.queries
        pairs = [(self.term.queries, rotated)]
        absorbs = self.keys is None and self.values is not None
        if absorbs and rotated is None and rope:
            joined = _above(self.term.queries).op
            both = joined.reads if joined is not None and joined.name == "cat" and len(joined.reads) == 2 else []
            pairs = list(zip(both, reversed(both), strict=True))
        for one, other in pairs:
            keys = _absorbing(one) if absorbs else self.keys
            query = heads_of(keys.activation if absorbs and keys is not None else one)
            turned = None if other is None else heads_of(other)
            if query is not None and (turned is None) == (other is None) and (keys is not None or not absorbs):
                yield query, turned, keys

    def weights(self, keys: Projection | None) -> dict[str, Projection]:
        """One weight where it expands both, or where the other is a part of it; none where both are absorbed."""
        values = self.values
        if keys is None or values is None:
            return {}
        if keys.op is values.op or is_part(values.weight, keys.weight):
            return {"w": keys}
        return {"w": values} if is_part(keys.weight, values.weight) else {"w_k": keys, "w_v": values}

    # -- sizes

    def sizes(self, query: Value, keys: Projection | None, rope: int) -> dict[str, int] | None:
        """The size behind every axis, with ``rope`` columns rotated; None if the tensors do not agree on one."""
        found, rank = self.found, self.rank
        value, cached, width = found.value_width, found.cached, self.term.width
        plain = width if self.rotated else width - rope
        if self.keys is None and plain != rank:
            return None  # keys are the latent itself, and not as wide
        if keys is not None and self.keys is None:
            plain = width = keys.rank
        heads = self.heads_of_weights(keys, plain) if keys is not None else self.heads_of_query(query, rope)
        columns = rank + rope if self.is_cache else rank
        held = math.prod(self.latent.shape) // columns
        for batch in dict.fromkeys((found.softmax.out.shape[0], held // cached, 1)):
            if min(plain, value, rank, heads, batch) < 1:
                continue
            tokens, left = divmod(math.prod(query.shape), batch * heads * width)
            many, rest = divmod(math.prod(self.latent.shape), batch * columns)
            if rest or left or not tokens or many < cached or (many != cached and cached != tokens):
                continue
            if math.prod(found.result.shape) != batch * tokens * heads * (value + found.padding):
                continue
            if self.rope is not None and self.keys is None and math.prod(self.rope.shape) != batch * many * rope:
                continue
            sizes = {"B": batch, "T": tokens, "S": cached, "C": many, "H": heads, "K": width}
            sizes |= {"N": plain, "D": rope, "R": rank, "V": value, "E": rank + rope}
            role = "cache" if self.is_cache else "latent"
            if next(labels(self.latent, role, sizes), None) is not None:
                return sizes
        return None

    def heads_of_weights(self, keys: Projection, plain: int) -> int:
        """How many heads the weights are for; 0 if they are not of MLA's sizes."""
        value = self.found.value_width
        each = {"w": plain + value, "w_k": plain, "w_v": value}
        weights = self.weights(keys)
        counts = {divmod(made.size, max(1, each[role] * self.rank)) for role, made in weights.items()}
        (heads, rest), *others = counts
        return 0 if rest or others else heads

    def heads_of_query(self, query: Value, rope: int) -> int:
        """How many of the query's rows are a token's heads: as many as the weights around have, else as the scores say.
        Without a rotated part nothing but those weights tells it from attention to a memory that is key and value: 0.
        """
        held = math.prod(self.latent.shape) // (self.rank + (rope if self.is_cache else 0))
        batches = (self.found.softmax.out.shape[0], 1)
        batch = next((batch for batch in batches if batch * self.found.cached == held), 0)
        rows, rest = divmod(math.prod(query.shape), max(1, batch) * self.term.width)
        if rest or not batch:
            return 0
        known = _heads_around(query, self.found)
        if known is not None and rows % known == 0:
            return known
        scores = self.found.softmax.out.shape
        between = scores[1:-1] if scores[0] == batch else scores[:-1]  # one request may have no dimension
        if not rope or len(query.shape) < len(scores) or 1 in between:
            return rows if rope else 0
        heads = between[1] if any(_is_by_heads(hidden.mask) for hidden in self.found.masks) else between[0]
        return heads if rows % heads == 0 else 0


def _laid_out(made: Projection, role: str, sizes: dict[str, int]) -> Value:
    """A weight as the op reads it: as it was made, if that has the layout of its role. Scales of groups of columns make
    it in another.
    """
    found = operand(made.weight)
    rows = math.prod(found.shape) // sizes["R"]
    known = {**sizes, "W": rows, "Y": rows // sizes["H"]}

    def fits(value: Value) -> bool:
        return value.node is not None and next(labels(value, role, known), None) is not None

    if fits(found):
        return found
    other = root(made.weight, until=fits)
    return other if fits(other) else found


def _is_by_heads(mask: Value) -> bool:
    """True if a mask is another along the scores' last dimension but two, and the same for all queries."""
    sizes = [1 if at in mask.uniform else size for at, size in enumerate(mask.shape)]
    return len(sizes) > 2 and sizes[-3] > 1 and sizes[-2] == 1


def _narrow(keys: Projection, values: Projection) -> bool:
    """True if the latent is narrower than what comes out of it."""
    rows = {projection.op: projection.size // projection.rank for projection in (keys, values)}
    return 2 * keys.rank < sum(rows.values())


def _expands(projection: Projection) -> bool:
    """True if more columns come out than go in."""
    return projection.rank**2 < projection.size


# -- weights around ----------------------------------------------------------------------------------------------------


def _above(value: Value) -> Value:
    """What a value is, rearrangements and constant factors aside."""
    while value.op is not None and (value.op.name in LAYOUT or scales(value.op)):
        value = next(read for read in value.op.reads if not read.const)
    return value


def _absorbing(query: Value) -> Projection | None:
    """The product with a weight per head that makes a query."""
    op = _above(query).op
    if op is None or op.name not in CONTRACTIONS or not _is_per_head(op.reads):
        return None
    made = project(op)
    return None if made is None or made.bias else made


def _product_behind(value: Value) -> Op | None:
    """The product with a weight per head that alone reads a result, rearrangements aside."""
    for _ in range(FAR):
        if len(value.users) != 1:
            return None
        op = value.users[0]
        if op.name in CONTRACTIONS:
            return op if _is_per_head(op.reads) else None
        if op.name not in LAYOUT:
            return None
        value = op.out
    return None


def _heads_around(query: Value, found: Attention) -> int | None:
    """How many matrices the weight has whose product makes the query, or takes the result."""
    above, stack = set[Value](), [query]
    while stack:
        value = stack.pop()
        op = value.op
        if op is None or value in above or len(above) > FAR:
            continue
        above.add(value)
        if op.name in CONTRACTIONS:
            if _is_per_head(op.reads):
                return _matrices(op.reads)
        elif op.name in REARRANGEMENTS or scales(op):
            stack.extend(read for read in op.reads if not read.const)
    after = _product_behind(found.product.out)
    return None if after is None else _matrices(after.reads)


def _is_per_head(operands: list[Value]) -> bool:
    """True for a batched product, one of whose operands is a weight."""
    return len(operands[-1].shape) == 3 and any(is_weight(root(value)) for value in operands)


def _matrices(operands: list[Value]) -> int:
    """How many matrices a weight has; a product may have them again for every request."""
    weight = next(value for value in operands if is_weight(root(value)))
    return math.prod(root(weight).shape) // math.prod(weight.shape[-2:])


# -- near misses -------------------------------------------------------------------------------------------------------


def _two_latents(found: Attention) -> Obstacle | None:
    """Keys of one latent, values of another."""
    values, keys = Sources().of(found.values), Sources().of(*(term.keys for term in found.terms))
    if values.only is None or keys.only is None or values.shared or not (_expands(values.only) and _expands(keys.only)):
        return None
    if tokens_of(values.only.activation) is tokens_of(keys.only.activation):
        return None
    reason = "keys are expanded from one latent, and values from another"
    return Obstacle("roles", reason, found.softmax)


def _expanded_cache(found: Attention) -> Obstacle | None:
    """Keys and values of a latent that are cached one by one, as transformers before 5 does."""
    own = Sources(moves=CACHED).of(found.values)
    values, keys = own.only, Sources(moves=CACHED).of(*(term.keys for term in found.terms)).only
    if values is None or keys is None or not own.shared:
        return None
    latent = tokens_of(values.activation)
    if latent is None or tokens_of(keys.activation) is not latent or not _narrow(keys, values):
        return None
    reason = "keys and values are cached expanded: of earlier tokens there is no latent left to attend to"
    return Obstacle("expanded_cache", reason, found.softmax)
