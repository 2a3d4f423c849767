"""Where MLA could be: every softmax between two products, found by what depends on it and on what it depends.

Above the softmax, as far as numbers lead, stand the products of queries and keys, and what is done to their results on
the way is scaling, masks, a sink, a maximum that is subtracted. Below stands the product with the values; the region
ends where all that depends on the softmax runs through one value: behind the product, or behind the division by the
weights' sum. What the steps in between compute is left to the check, as far as the op could compute it at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kdacompile.graph.ir import Graph, Op, Value, ancestors
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.values import root
from kdacompile.patterns.engine.vocabulary import (
    ADDED_PRODUCTS,
    ATTENTION,
    CONTRACTIONS,
    LAYOUT,
    RANDOM,
    REDUCTIONS,
    REGION,
    SOFTMAXES,
)
from kdacompile.patterns.mla.sources import factor_of, is_matrix, is_weight, scales

FAR = 64
"""Operators around a softmax that are looked through."""

SOFTMAX_STEPS = ATTENTION - REGION - SOFTMAXES
"""What spells a softmax on the way to its exponential."""

WEIGHT_STEPS = LAYOUT | {"sum", "div", "mul", "reciprocal", "slice"}
"""What may be done to weights: they are divided by their sum, and a sink's is dropped."""


@dataclass(frozen=True)
class Term:
    """A product of queries and keys, in this order unless ``swapped``."""

    op: Op
    swapped: bool = False

    @property
    def queries(self) -> Value:
        return self.op.reads[-1 if self.swapped else -2]

    @property
    def keys(self) -> Value:
        return self.op.reads[-2 if self.swapped else -1]

    @property
    def width(self) -> int:
        """How many columns are summed over."""
        return self.op.reads[-2].shape[-1]


@dataclass(frozen=True)
class Hidden:
    """What hides tokens: the operator that applies it, and the mask, which may be numbers to add or a selection."""

    op: Op
    mask: Value
    keeps: bool = True
    """Of a selection: True leaves the scores as they are."""
    fill: object = None
    """Of a selection: what the other scores become."""


@dataclass
class Attention:
    """One softmax with its surroundings."""

    softmax: Op
    dim: int
    """Along which the weights add up to one."""
    product: Op
    """Probabilities times values."""
    result: Value
    """That product, divided by the probabilities' sum where they are not, and taken through W_UV with ``taken``."""
    values_first: bool
    """Whether the values are the product's left operand."""
    scores: Value
    """The softmax's input without sinks."""
    sinks: Value | None = None
    factor: Value | None = None
    """A tensor of one number that scales the scores."""
    divides: bool = False
    """Whether the scores are divided by it."""
    taken: int = 0
    """How many columns each head's result has where the model takes it through W_UV, and not the values."""
    terms: list[Term] = field(default_factory=list[Term])
    masks: list[Hidden] = field(default_factory=list["Hidden"])
    """In the order in which they are applied."""
    between: set[Op] = field(default_factory=set[Op])
    """What is done to the weights before the product."""
    obstacles: list[Obstacle] = field(default_factory=list[Obstacle])

    @property
    def ops(self) -> set[Op]:
        return {self.softmax}

    @property
    def along_rows(self) -> bool:
        """Whether the softmax runs over another dimension than the last."""
        return self.dim < len(self.softmax.out.shape) - 1

    @property
    def values(self) -> Value:
        return self.product.reads[-2 if self.values_first else -1]

    @property
    def padding(self) -> int:
        """How many columns of zeros stand at the end of the values."""
        op = root(self.values).op
        if op is None or op.name != "constant_pad_nd" or self.values_first:
            return 0
        (before, after, *others), *filler = op.args[1:]
        return after if before == 0 and after > 0 and not any((*others, *filler)) else 0

    @property
    def value_width(self) -> int:
        return self.taken or self.product.out.shape[-2 if self.values_first else -1] - self.padding

    @property
    def cached(self) -> int:
        """Tokens attended to."""
        return self.product.reads[-2].shape[-1]

    def swapped(self) -> Attention:
        """The same with keys written before queries."""
        return replace(self, terms=[replace(term, swapped=True) for term in self.terms])


def find_attention(graph: Graph) -> Iterator[Attention]:
    """Every softmax over one dimension that stands between two products; of no requests, queries or tokens none."""
    for op in graph.ops:
        if op.name not in SOFTMAXES | {"exp"} or op.out.const or 0 in op.out.shape:
            continue
        dim = _summed(op)
        found = None if dim is None else _below(graph, op, dim)
        # One more with a sink.
        if found is not None and 0 < found.cached in (op.out.shape[found.dim], op.out.shape[found.dim] - 1):
            _above(found)
            if found.terms:
                yield found


def _summed(softmax: Op) -> int | None:
    """The dimension over which a softmax sums, or the sum (maximum, log-softmax) beside an exponential."""
    above = root(softmax.reads[0]).op
    near = [softmax, *softmax.out.users, above, *([] if above is None else [root(read).op for read in above.reads])]
    for op in near:
        given = op.args[1] if op is not None and op.name in REDUCTIONS and len(op.args) > 1 else None
        dims = [given] if isinstance(given, int) else given
        if isinstance(dims, (list, tuple)) and len(dims) == 1:
            return dims[0] % len(softmax.out.shape)
    return None


# -- below the softmax -------------------------------------------------------------------------------------------------


def _below(graph: Graph, softmax: Op, dim: int) -> Attention | None:
    """The first product with the weights, and the value that all that depends on them runs through."""
    found: Attention | None = None
    reached, passed = {softmax.out}, list[Op]()
    obstacles = _opaque(graph, softmax.out, reached)
    waiting = {user for value in reached for user in value.users}
    while waiting and len(passed) < FAR:
        op = min(waiting, key=lambda op: op.out.index)
        waiting.remove(op)
        passed.append(op)
        if found is not None and op.name not in WEIGHT_STEPS:
            break
        if found is None and op.name in CONTRACTIONS:
            sides = [read in reached for read in op.reads[-2:]]
            if all(sides):
                return None
            found = Attention(softmax, dim, op, op.out, sides[1], softmax.reads[0])
            weights = op.reads[-1 if sides[1] else -2]
            found.between = ancestors([weights], lambda value: value is softmax.out or value not in reached)
            found.obstacles = [*obstacles, *_standing_between(found.between, reached)]
        reached.update(op.outs)
        obstacles += [] if found else _opaque(graph, op.out, reached)
        waiting.update(user for value in reached for user in value.users if user not in passed)
        left = {value for value in reached if value in graph.outputs or not waiting.isdisjoint(value.users)}
        if found is not None and left <= set(op.outs):
            return replace(found, result=op.out)
    return found


def _opaque(graph: Graph, weights: Value, reached: set[Value]) -> list[Obstacle]:
    """Calls on the weights that nobody can look into, past which the way is followed all the same."""
    found: list[Obstacle] = []
    for value, reads in graph.opaque.items():
        if weights in reads:
            name = str(value.node)
            active = "dropout is active" if "dropout" in name else f"{name}, which nobody can look into, stands"
            found.append(Obstacle("dropout", f"{active} on the attention weights", weights.op))
            reached.add(value)
    return found


def _standing_between(ops: set[Op], reached: set[Value]) -> Iterator[Obstacle]:
    """What is done to weights that no softmax does: ``reached`` depends on them, everything else is foreign."""
    for op in sorted(ops, key=lambda op: op.out.index):
        if op.name in RANDOM or any(read.op is not None and read.op.name in RANDOM for read in op.reads):
            yield Obstacle("dropout", "dropout is active on the attention weights", op)
        elif op.name not in WEIGHT_STEPS or any(not (read.const or read in reached) for read in op.reads):
            yield Obstacle("weights", f"{op.name} stands between the softmax and the values", op)


# -- above the softmax -------------------------------------------------------------------------------------------------


def _above(found: Attention) -> None:
    """Fill in the products that the scores are computed from, and what is done to their results."""
    depends: dict[Value, bool] = {}
    _depends(found.scores, depends)
    ops = dict.fromkeys(value.op for value in depends if depends[value] and value.op is not None)
    for op in sorted(ops, key=lambda op: op.out.index):
        scores = [read for read in op.reads if depends.get(read)]
        others = [read for read in op.reads if read not in scores]
        if op.name in CONTRACTIONS:
            _term(op, found)
        elif op.name == "add":
            found.masks += [Hidden(op, other) for other in others]
        elif op.name in ("where", "masked_fill"):
            found.masks.append(_selection(op, scores))
        elif len(scores) == 1 and (factor := factor_of(op, scores[0])) is not None:
            if found.factor is not None or found.masks:
                reason = "scores that are masked, or scaled before, are scaled by a tensor"
                found.obstacles.append(Obstacle("scores", reason, op))
            found.factor, found.divides = factor, op.name == "div"
        elif op.name == "cat" and len(others) == 1:
            if others[0].shape[-1] != 1 or op.args[1] not in (-1, len(op.out.shape) - 1):
                reason = "something other than one sink is appended to the scores"
                found.obstacles.append(Obstacle("scores", reason, op))
        elif op.name not in SOFTMAX_STEPS | LAYOUT and not scales(op) and (op.name != "sub" or others):
            reason = f"{op.name} stands between the scores and the softmax"
            found.obstacles.append(Obstacle("scores", reason, op))
    found.scores, found.sinks = _without_sinks(found.scores, depends)


def _depends(value: Value, known: dict[Value, bool]) -> bool:
    """Whether a value is computed from a product of activations; masks that one decides are no numbers."""
    if value not in known:
        op, known[value] = value.op, False
        if op is None or value.const or not value.dtype.is_floating_point or len(known) > FAR:
            return False
        if op.name in CONTRACTIONS:
            known[value] = not any(is_weight(root(read)) and not is_matrix(read) for read in op.reads)
        else:
            known[value] = sum(_depends(read, known) for read in op.reads) > 0  # all are looked at
    return known[value]


def _term(op: Op, found: Attention) -> None:
    found.terms.append(Term(op))
    if op.name in ADDED_PRODUCTS and op.kwargs.get("beta", 1) != 0:
        found.masks.append(Hidden(op, op.reads[0]))
        if op.kwargs.get("beta", 1) != 1:
            found.obstacles.append(Obstacle("mask", "a mask is added with a factor of its own", op))


def _selection(op: Op, scores: list[Value]) -> Hidden:
    """``where(mask, scores, fill)``, ``where(mask, fill, scores)`` and ``masked_fill(scores, mask, fill)``."""
    if op.name == "masked_fill":
        return Hidden(op, op.args[1], False, op.args[2])
    mask, yes, no = op.args
    keeps = any(yes is read for read in scores)
    return Hidden(op, mask, keeps, no if keeps else yes)


def _without_sinks(scores: Value, depends: dict[Value, bool]) -> tuple[Value, Value | None]:
    """The scores below what only a softmax adds to them, and the sinks."""
    step, sinks = scores, None
    while step.op is not None and step.op.name in LAYOUT | SOFTMAX_STEPS | {"sub", "cat"}:
        op = step.op
        below = [read for read in op.reads if depends.get(read)]
        if not below:  # no scores: the exponential is one of gates
            break
        step = below[0]
        if op.name not in LAYOUT:
            scores = step
        if op.name == "cat":
            sinks = next((read for read in op.reads if not depends.get(read)), None)
    return scores, sinks
