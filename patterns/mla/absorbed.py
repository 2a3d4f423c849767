"""Attention over the latent itself: weights absorbed by hand, one key and one value for all heads.

    s_ts = scale * (q~_t . c_s + q_rope_t . r_s)      o_t = softmax_s(s_ts + mask_ts) c_s

The query has been taken through W_UK before, the result is taken through W_UV after; both products stay where they
are. Values and keys are followed up to one tensor that knows no heads: the latent, beside which a rotated part stands
in the key (a ``cat``, or a second product), or a cache of ``[c | r]`` whose first columns are the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.numbering import Numbering
from kdacompile.patterns.engine.values import is_weight, root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, LAYOUT, PICKING
from kdacompile.patterns.mla.definition import Parts
from kdacompile.patterns.mla.sources import MOVES, heads_of, scales, tokens_of, unexpanded
from kdacompile.patterns.mla.walk import Attention, Term

MAX_STEPS = 24
TAKEN = LAYOUT | PICKING | {"repeat"}


def read_absorbed(found: Attention, numbering: Numbering) -> Parts | None:
    """The tensors of one attention over a latent itself; None if keys and values are not the same for all heads."""
    return read_keys_of(found.values, found.value_width, found, numbering)


def read_keys_of(values: Value, rank: int, found: Attention, numbering: Numbering) -> Parts | None:
    """The same where the latent, of ``rank`` columns, stands at or above ``values``."""
    for batch in dict.fromkeys((found.softmax.out.shape[0], 1)):  # one request may have no dimension of its own
        meeting = _Meeting(values, rank, found, numbering, batch)
        parts = None
        if len(found.terms) == 1:
            parts = meeting.one_product(found.terms[0])
        elif len(found.terms) == 2:
            first, second = found.terms
            parts = meeting.two_products(first, second) or meeting.two_products(second, first)
        if parts is not None:
            return parts
    return None


class _Meeting:
    """Where the way up from the values meets that from the keys."""

    def __init__(self, values: Value, rank: int, found: Attention, numbering: Numbering, batch: int) -> None:
        self.found, self.numbering, self.batch = found, numbering, batch
        self.cached, self.rank = found.cached, rank
        self.above = {numbering.of(value): value for value in reversed(list(_climb(values)))}

    def one_product(self, term: Term) -> Parts | None:
        width = term.width
        rope = width - self.rank
        cache = self.shared(term.keys, width)
        if cache is not None:
            return self.parts(term, {"latent" if rope == 0 else "cache": cache}, rope)
        joined = list(_climb(term.keys))[-1].op
        if joined is None or joined.name != "cat" or len(joined.reads) != 2 or rope <= 0:
            return None
        for part, other in (joined.reads, joined.reads[::-1]):
            latent, rotated = self.shared(part, self.rank), tokens_of(unexpanded(other))
            if latent is not None and rotated is not None:
                return self.parts(term, {"latent": latent, "k_rope": rotated}, rope)
        return None

    def two_products(self, plain: Term, rotated: Term) -> Parts | None:
        latent = self.shared(plain.keys, plain.width) if plain.width == self.rank else None
        rope, query = tokens_of(unexpanded(rotated.keys)), heads_of(rotated.queries)
        if latent is None or rope is None or query is None:
            return None
        return self.parts(plain, {"latent": latent, "k_rope": rope, "q_rope": query}, rotated.width)

    def shared(self, operand: Value, width: int) -> Value | None:
        """The tensor of ``width`` columns and no heads that both this operand and the values are taken from."""
        for value in _climb(operand):
            other = self.above.get(self.numbering.of(value))
            if other is not None and math.prod(value.shape) == self.batch * self.cached * width:
                least = 3 if self.batch > 1 else 2
                seen = (item for item in (value, other) if item.node is not None and len(item.shape) >= least)
                tensor = next(seen, None)
                if tensor is not None:
                    return tensor
        return None

    def parts(self, term: Term, tensors: dict[str, Value], rope: int) -> Parts | None:
        query, width = heads_of(term.queries), term.width
        if query is None:
            return None
        rows, rest = divmod(math.prod(query.shape), self.batch * width)
        heads = None if rest else self.heads(query, rows, sure=not rope)
        if heads is None:
            return None
        if "k_rope" in tensors and math.prod(tensors["k_rope"].shape) != self.batch * self.cached * rope:
            return None
        sizes = {"B": self.batch, "T": rows // heads, "S": self.cached, "C": self.cached, "H": heads, "K": width}
        sizes |= {"N": self.rank, "D": rope, "R": self.rank, "V": self.rank, "E": self.rank + rope}
        return Parts({"q": query, **tensors}, sizes)

    def heads(self, query: Value, rows: int, *, sure: bool) -> int | None:
        """How many of the query's rows are a token's heads: as many as the weights around have, else as the scores say.

        ``sure``: nothing but those weights tells it from attention to a memory that is key and value at once.
        """
        known = _heads_of_weights(query, self.found)
        if known is not None and rows % known == 0:
            return known
        if sure:
            return None
        between = self.found.softmax.out.shape[1:-1]
        if len(query.shape) < 4 or 1 in between:
            return rows
        return between[0] if rows % between[0] == 0 else None


def _climb(value: Value) -> Iterator[Value]:
    """A key or value operand and what it is taken from, through rearrangements and cuts of one tensor."""
    yield value
    for _ in range(MAX_STEPS):
        op = value.op
        data = [] if op is None else [read for read in op.reads if not read.const]
        if op is None or len(data) != 1 or not ((op.name in MOVES and op.name in TAKEN) or scales(op)):
            return
        value = data[0]
        yield value


def _heads_of_weights(query: Value, found: Attention) -> int | None:
    """How many matrices the weight has whose product makes the query, or takes the result."""
    above, stack = set[Value](), [query]
    while stack:
        value = stack.pop()
        op = value.op
        if op is None or value in above or len(above) > MAX_STEPS:
            continue
        above.add(value)
        if op.name in CONTRACTIONS:
            if is_per_head(op.reads):
                return _matrices(op.reads)
        elif op.name in MOVES or scales(op):
            stack.extend(read for read in op.reads if not read.const)
    after = product_behind(found.product.out)
    return None if after is None else _matrices(after.reads)


def product_behind(value: Value) -> Op | None:
    """The product with a weight per head that alone reads a result, rearrangements aside."""
    for _ in range(MAX_STEPS):
        if len(value.users) != 1:
            return None
        op = value.users[0]
        if op.name in CONTRACTIONS:
            return op if is_per_head(op.reads) else None
        if op.name not in LAYOUT:
            return None
        value = op.out
    return None


def is_per_head(operands: list[Value]) -> bool:
    """True for a batched product, one of whose operands is a weight."""
    return len(operands[-1].shape) == 3 and any(is_weight(root(value)) for value in operands)


def _matrices(operands: list[Value]) -> int:
    """How many matrices a weight has; a product may have them again for every request."""
    weight = next(value for value in operands if is_weight(root(value)))
    return math.prod(root(weight).shape) // math.prod(weight.shape[-2:])
