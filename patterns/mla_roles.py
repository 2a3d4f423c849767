"""What plays which role around one softmax, and what forbids a rewrite whatever the region computes.

Attention of other kinds is passed over in silence. It counts as MLA once keys and values come out of one activation
that is narrower than they are, or that leaves a part of the key to a tensor all heads share; from there on, whatever
stands in the way is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, permutations, product

from kdacompile.patterns.ir import Graph, Op, Value, ancestors
from kdacompile.patterns.mla import LETTERS, Claim, MlaCandidate, MlaPlacement
from kdacompile.patterns.mla_masks import MaskRole, read_masks
from kdacompile.patterns.mla_walk import (
    SOFTMAXES,
    Attention,
    Projection,
    Sources,
    Term,
    find_attention,
    named,
    unexpanded,
)
from kdacompile.patterns.obstacle import Obstacle
from kdacompile.patterns.regions import root
from kdacompile.patterns.vocabulary import LAYOUT, REGION

ALLOWED = REGION | SOFTMAXES | frozenset({"max", "amax"})
MAX_CLAIMS = 48
USUAL = ("BTHK", "BHTK", "BTHV", "BHTV", "BHTS", "BTHS", "BTHD", "BHTD")


@dataclass(frozen=True)
class _Parts:
    """The tensors of one attention by role, with the sizes of everything."""

    keys: Projection
    values: Projection
    latent: Value
    query: Value
    query_rope: Value | None
    rope: Value | None
    sizes: dict[str, int]


def find_mla(graph: Graph) -> Iterator[MlaCandidate | Obstacle]:
    """Every region that could be MLA, and near misses with what stands in the way."""
    for found in find_attention(graph):
        yield from _read(graph, found)


def _read(graph: Graph, found: Attention) -> Iterator[MlaCandidate | Obstacle]:
    values, values_shared = Sources().of(found.values)
    latent = named(values[0].activation, 3) if len(values) == 1 else None
    if latent is None or values_shared:
        return
    parts = [Sources(latent).of(term.right) for term in found.terms]
    keys = list(dict.fromkeys(projection for projections, _ in parts for projection in projections))
    shared = list(dict.fromkeys(value for _, values in parts for value in values))
    if len(keys) != 1 or not _is_latent(keys[0], values[0], latent, shared, found):
        return
    obstacle = _bias(keys[0], values[0]) or next(iter(found.obstacles), None)
    if obstacle is not None:
        yield obstacle
        return
    roles = _parts(found, keys[0], values[0], shared, parts)
    if isinstance(roles, Obstacle):
        yield roles
        return
    masks = read_masks(found, roles.sizes)
    yield masks if isinstance(masks, Obstacle) else _candidate(graph, found, roles, masks)


def _is_latent(keys: Projection, values: Projection, latent: Value, shared: list[Value], found: Attention) -> bool:
    """True if keys and values are expanded from a latent, apart from what the queries are made of."""
    made = Sources(latent)
    if any(projection.op is keys.op for term in found.terms for projection in made.of(term.left)[0]):
        return False
    rows = {projection.op: _rows(projection) for projection in (keys, values)}
    return any(value.shape[-1] for value in shared) or 2 * keys.activation.shape[-1] < sum(rows.values())


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
    found: Attention,
    keys: Projection,
    values: Projection,
    shared: list[Value],
    parts: list[tuple[list[Projection], list[Value]]],
) -> _Parts | Obstacle:
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
    return _Parts(keys, values, latent, query, query_rope, rope, sizes)


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


# -- the region --------------------------------------------------------------------------------------------------------


def _candidate(graph: Graph, found: Attention, parts: _Parts, masks: MaskRole) -> MlaCandidate | Obstacle:
    output = _output(graph, found.product.out, parts.sizes)
    if output is None or found.scores is None:
        return Obstacle("roles", "the result is never seen with its batch and heads", found.product)
    tensors: dict[str, Value] = {"q": parts.query, "latent": parts.latent}
    weights = {"w": parts.keys} if parts.keys.op is parts.values.op else {"w_k": parts.keys, "w_v": parts.values}
    tensors |= {role: root(projection.weight) for role, projection in weights.items()}
    sinks = None if found.sinks is None else _sink_vector(found.sinks)
    # A rotated part of no columns (no positions) is an operand of the region, though not of the op.
    optional = {"k_rope": parts.rope, "q_rope": parts.query_rope, "mask": masks.value, "sinks": sinks}
    tensors |= {role: value for role, value in optional.items() if value is not None}
    cut = list(dict.fromkeys(tensors.values()))
    ops = ancestors([output], set(cut).__contains__)
    obstacle = _forbidden(graph, ops, cut, output)
    if obstacle is not None:
        return obstacle
    claims = list(islice(_claims(tensors, output, found, parts, masks), MAX_CLAIMS))
    if not claims:
        return Obstacle("roles", "the layout of a tensor does not fit its role", found.softmax)
    return MlaCandidate(found.softmax, ops, cut, output, found.scores, claims)


def _output(graph: Graph, value: Value, sizes: dict[str, int]) -> Value | None:
    """The last value that still has batch, tokens, heads and channels apart."""
    best: Value | None = None
    while True:
        if value.node is not None and next(labels(value, "o", sizes), None) is not None and len(value.shape) == 4:
            best = value
        if len(value.users) != 1 or value in graph.outputs or value.users[0].name not in LAYOUT:
            return best
        value = value.users[0].out


def _sink_vector(value: Value) -> Value:
    """The sinks before they are expanded to batch and tokens."""
    while value.op is not None and value.op.name in LAYOUT and not (value.node and len(value.shape) == 1):
        value = value.op.reads[0]
    return value


def _forbidden(graph: Graph, ops: set[Op], cut: list[Value], output: Value) -> Obstacle | None:
    for op in sorted(ops, key=lambda item: item.outs[0].index):
        if op.out.const or op.out.param:
            continue
        if op.name not in ALLOWED:
            return Obstacle("operator", f"the region contains {op.name}, which probes cannot judge", op)
        for value in op.outs:
            if value is output or value in cut:
                continue
            outside = next((user.name for user in value.users if user not in ops), None)
            if value in graph.outputs or value in graph.written:
                outside = "the graph's caller"
            if outside is not None:
                what = "the attention weights are" if op.name in SOFTMAXES else "an intermediate value of the region is"
                return Obstacle("escape", f"{what} also read by {outside}", op)
    return None


# -- claims ------------------------------------------------------------------------------------------------------------


def labels(value: Value, role: str, sizes: dict[str, int]) -> Iterator[str]:
    """Letters for the dimensions of ``value`` in ``role``: all that have more than one entry, and no others."""
    order = LETTERS[role]
    dims = [(i, size) for i, size in enumerate(value.shape) if size != 1]
    wanted = [letter for letter in order if sizes[letter] != 1]
    if len(dims) != len(wanted):
        return
    for letters in permutations(wanted):
        if all(sizes[letter] == size for letter, (_, size) in zip(letters, dims, strict=True)):
            text = ["."] * len(value.shape)
            for letter, (i, _) in zip(letters, dims, strict=True):
                text[i] = letter
            yield "".join(text)


def _oddity(letters: str) -> int:
    bare = letters.replace(".", "")
    usual = any("".join(letter for letter in order if letter in bare) == bare for order in USUAL)
    return 0 if usual or letters[0] == "B" else 1


def _claims(
    tensors: dict[str, Value], output: Value, found: Attention, parts: _Parts, masks: MaskRole
) -> Iterator[Claim]:
    """Every assignment of letters the sizes allow, usual layouts first."""
    assert found.scores is not None
    sizes = {**parts.sizes, "W": 0}
    options: list[list[MlaPlacement]] = []
    for role, value in tensors.items():
        if role == "mask":
            continue
        if role in ("w", "w_k", "w_v"):
            sizes["W"] = math.prod(value.shape) // sizes["R"]
        options.append([MlaPlacement(role, value, text) for text in labels(value, role, sizes)])
    outputs = [MlaPlacement("o", output, text) for text in labels(output, "o", sizes)]
    layouts = [text for text in labels(found.scores, "mask", sizes) if len(text) == 4]
    both = "w" in tensors
    choices = product(*options, outputs, layouts)
    ordered = sorted(islice(choices, 4096), key=lambda choice: sum(map(_oddity_of, choice)))
    for rope_first, values_first in product((False, True), (False, True) if both else (False,)):
        if rope_first and (not parts.sizes["D"] or "q_rope" in tensors):
            continue
        for choice in ordered:
            *inputs, out, layout = choice
            placed = {item.role: item for item in inputs if isinstance(item, MlaPlacement)}
            claim = _claim(placed, out, layout, parts.sizes, masks)
            if claim is not None:
                yield claim.with_(rope_first=rope_first, values_first=values_first)


def _oddity_of(item: MlaPlacement | str) -> int:
    return _oddity(item if isinstance(item, str) else item.letters)


def _claim(
    placed: dict[str, MlaPlacement],
    out: MlaPlacement | str,
    layout: MlaPlacement | str,
    sizes: dict[str, int],
    masks: MaskRole,
) -> Claim | None:
    assert isinstance(out, MlaPlacement) and isinstance(layout, str)
    causal = masks.causal_in(layout, sizes)
    if causal is None:
        return None
    if masks.value is not None:
        letters = masks.letters(layout)
        if letters is None:
            return None
        placed = {**placed, "mask": MlaPlacement("mask", masks.value, letters)}
    claim = Claim(placed, out, sizes, layout)
    return claim.with_(causal=causal, mask_keeps=masks.keeps, mask_fill=masks.fill)
