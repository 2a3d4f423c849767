"""Where MLA could be: from every softmax to the two products around it, and from those to what they are made of.

Forward from the softmax stands the product with the values, backward the product (or the sum of two) of queries and
keys; ``sources.py`` says what those are made of. What the walk does not understand it notes and walks past, so
that a near miss can be told from attention of another kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.values import is_weight, root
from kdacompile.patterns.engine.vocabulary import CONTRACTIONS, LAYOUT, RANDOM
from kdacompile.patterns.mla.softmax import Softmax, divides, find_softmaxes
from kdacompile.patterns.mla.sources import SCALES, is_scalar_factor

MAX_STEPS = 24


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
    product: Op
    """Probabilities times values."""
    result: Value
    """That product, divided by the probabilities' sum where they are not, and taken through W_UV with ``taken``."""
    values_first: bool = False
    """Whether the values are the product's left operand."""
    along_rows: bool = False
    """Whether the softmax runs over another dimension than the last."""
    padding: int = 0
    """How many columns of zeros the values have been given."""
    taken: int = 0
    """How many columns each head's result has where the model takes it through W_UV, and not the values."""
    terms: list[Term] = field(default_factory=list[Term])
    masks: list[Hidden] = field(default_factory=list["Hidden"])
    sinks: Value | None = None
    scores: Value | None = None
    """The softmax's input without sinks."""
    obstacles: list[Obstacle] = field(default_factory=list[Obstacle])

    @property
    def ops(self) -> set[Op]:
        return {self.softmax}

    @property
    def values(self) -> Value:
        return self.product.reads[-2 if self.values_first else -1]

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
    for softmax in find_softmaxes(graph):
        found = _forward(graph, softmax) if 0 not in softmax.scores.shape else None
        summed = softmax.scores.shape[softmax.dim] if softmax.dim >= 0 else 0
        if found is not None and 0 < found.cached in (summed, summed - 1):  # one more with a sink
            found.along_rows = softmax.dim < len(softmax.scores.shape) - 1
            found.scores, found.padding = softmax.scores, 0 if found.values_first else _padding(found.values)
            _scores(softmax.scores, found, 0)
            if found.terms:
                yield found


def _forward(graph: Graph, made: Softmax) -> Attention | None:
    """From the softmax to the product with the values, noting who else reads the probabilities."""
    obstacles: list[Obstacle] = []
    softmax, value = made.op, made.weights
    for _ in range(MAX_STEPS):
        product = next((op for op in value.users if op.name in CONTRACTIONS and value in op.reads[-2:]), None)
        onward = [op for op in value.users if op is not product and op not in made.sums]
        if product is not None:
            result = _divided(product.out, made.sums) if made.sums else product.out
            if result is None:
                return None
            if onward:
                obstacles.append(
                    Obstacle("weights", f"the attention weights are also read by {onward[0].name}", softmax)
                )
            return Attention(softmax, product, result, product.reads[-1] is value, obstacles=obstacles)
        hidden = [found for found, read in graph.opaque.items() if value in read]
        if not onward and len(hidden) == 1:
            name = str(hidden[0].node)
            active = "dropout is active" if "dropout" in name else f"{name}, which nobody can look into, stands"
            obstacles.append(Obstacle("dropout", f"{active} on the attention weights", softmax))
            value = hidden[0]
            continue
        if len(onward) != 1:
            following = [op for op in onward if _leads_to_product(op)]
            if len(following) != 1:
                return None
            obstacles.append(Obstacle("weights", "the attention weights are also used elsewhere", softmax))
            onward = following
        step = onward[0]
        if step.name in RANDOM or any(read.op is not None and read.op.name in RANDOM for read in step.reads):
            obstacles.append(Obstacle("dropout", "dropout is active on the attention weights", step))
        elif step.name not in LAYOUT and not _drops_sink(step):
            obstacles.append(Obstacle("weights", f"{step.name} stands between the softmax and the values", step))
        value = step.outs[0]
    return None


def _divided(value: Value, sums: list[Op]) -> Value | None:
    """The product once it is divided by the sum of its weights."""
    while len(value.users) == 1:
        op = value.users[0]
        if divides(op, sums):
            return op.out
        if op.name not in LAYOUT:
            return None
        value = op.out
    return None


def _padding(values: Value) -> int:
    """How many columns of zeros stand at the end of the values."""
    op = root(values).op
    if op is None or op.name != "constant_pad_nd":
        return 0
    (before, after, *others), *filler = op.args[1:]
    return after if before == 0 and after > 0 and not any((*others, *filler)) else 0


def _leads_to_product(op: Op) -> bool:
    for _ in range(MAX_STEPS):
        if op.name in CONTRACTIONS:
            return True
        users = op.outs[0].users
        if len(users) != 1:
            return False
        op = users[0]
    return False


def _drops_sink(op: Op) -> bool:
    """``probabilities[..., :-1]``, or ``[..., 1:]`` where the sink comes first."""
    source = op.reads[0].shape
    return op.name == "slice" and op.out.shape == (*source[:-1], source[-1] - 1) and op.args[2] in (0, 1, None)


# -- the scores --------------------------------------------------------------------------------------------------------


def _scores(value: Value, found: Attention, depth: int) -> bool:
    """Walk from the softmax's input back to its products; False if there are none this way."""
    op = value.op
    if op is None or value.const or depth > MAX_STEPS:
        return False
    if op.name in CONTRACTIONS:
        return _term(op, found)
    if op.name in LAYOUT:
        return _scores(op.reads[0], found, depth + 1)
    if op.name == "cat" and len(op.reads) == 2:
        return _with_sink(op, found, depth)
    if op.name == "add":
        return _sum(op, found, depth)
    if op.name == "sub" and _subtracts_maximum(op):
        found.scores = op.reads[0]
        return _scores(op.reads[0], found, depth + 1)
    if op.name in ("where", "masked_fill"):
        return _selection(op, found, depth)
    data = [read for read in op.reads if not read.const]
    if op.name in SCALES and len(data) == 1 and is_scalar_factor(op):
        return _scores(data[0], found, depth + 1)
    reached = any(_scores(read, found, depth + 1) for read in op.reads[:2])
    if reached:
        found.obstacles.append(Obstacle("scores", f"{op.name} stands between the scores and the softmax", op))
    return reached


def _term(op: Op, found: Attention) -> bool:
    if any(is_weight(root(read)) for read in op.reads):
        return False
    found.terms.append(Term(op))
    if op.name in ("baddbmm", "addmm") and op.kwargs.get("beta", 1) != 0:
        found.masks.append(Hidden(op, op.reads[0]))
        if op.kwargs.get("beta", 1) != 1:
            found.obstacles.append(Obstacle("mask", "a mask is added with a factor of its own", op))
    return True


def _sum(op: Op, found: Attention, depth: int) -> bool:
    if len(op.reads) != 2:  # a number is added: the same for all tokens, the proof will say
        return bool(op.reads) and _scores(op.reads[0], found, depth + 1)
    first, second = (_scores(read, found, depth + 1) for read in op.reads)
    if first != second:
        found.masks.append(Hidden(op, op.reads[1] if first else op.reads[0]))
    return first or second


def _selection(op: Op, found: Attention, depth: int) -> bool:
    """``where(mask, scores, fill)``, ``where(mask, fill, scores)`` and ``masked_fill(scores, mask, fill)``."""
    if op.name == "where":
        mask, yes, no = op.args
        choices = ((True, yes, no), (False, no, yes))
    else:
        mask, choices = op.args[1], ((False, op.args[0], op.args[2]),)
    for keeps, scores, fill in choices:
        if isinstance(scores, Value) and _scores(scores, found, depth + 1):
            found.masks.append(Hidden(op, mask, keeps, fill))
            return True
    return False


def _with_sink(op: Op, found: Attention, depth: int) -> bool:
    scores, sinks = op.reads
    if sinks.shape[-1] > scores.shape[-1]:
        scores, sinks = sinks, scores
    if not _scores(scores, found, depth + 1):
        return False
    found.scores, found.sinks = scores, sinks
    if sinks.shape[-1] != 1 or op.args[1] not in (-1, len(op.out.shape) - 1):
        found.obstacles.append(Obstacle("scores", "something other than one sink is appended to the scores", op))
    return True


def _subtracts_maximum(op: Op) -> bool:
    """``x - x.max(-1, keepdim=True)``, which a softmax over that dimension does not see."""
    if len(op.reads) != 2:
        return False
    largest = root(op.reads[1]).op
    return largest is not None and largest.name in ("max", "amax") and largest.reads[0] is op.reads[0]
