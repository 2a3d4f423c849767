"""Where MLA could be: from every softmax to the two products around it, and from those to what they are made of.

Forward from the softmax stands the product with the values, backward the product (or the sum of two) of queries and
keys. Keys and values are followed back through rearrangements only, to a *projection* (the product of an activation
with a weight: kv_b_proj of the latent) and to *shared* tensors (the rotated key of all heads, expanded). What the walk
does not understand it notes and walks past, so that a near miss can be told from attention of another kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kdacompile.patterns.ir import Graph, Op, Value
from kdacompile.patterns.obstacle import Obstacle
from kdacompile.patterns.regions import is_weight, root
from kdacompile.patterns.vocabulary import CONTRACTIONS, LAYOUT

SOFTMAXES = frozenset({"_softmax", "_safe_softmax"})
MOVES = LAYOUT | frozenset("slice split split_with_sizes select unbind cat slice_scatter select_scatter".split())
"""How keys and values are laid out on the way to their product."""

CACHED = MOVES | frozenset("index_copy index_put scatter".split())
"""The same where they are put into a cache first."""

SCALES = frozenset({"mul", "div"})
RANDOM = frozenset("native_dropout bernoulli rand_like rand dropout".split())
MAX_STEPS = 24


@dataclass(frozen=True)
class Projection:
    """``activation @ weight^T``, in any spelling."""

    op: Op
    activation: Value
    weight: Value
    bias: bool


@dataclass(frozen=True)
class Term:
    """A product of queries and keys: ``left`` holds the queries, ``right`` the keys."""

    op: Op

    @property
    def left(self) -> Value:
        return self.op.reads[-2]

    @property
    def right(self) -> Value:
        return self.op.reads[-1]


@dataclass
class Attention:
    """One softmax with its surroundings."""

    softmax: Op
    product: Op
    """Probabilities times values."""
    terms: list[Term] = field(default_factory=list[Term])
    masks: list[tuple[Op, Value]] = field(default_factory=list[tuple[Op, Value]])
    """What hides tokens: the operator that applies it, and the mask."""
    sinks: Value | None = None
    scores: Value | None = None
    """The softmax's input without sinks."""
    obstacles: list[Obstacle] = field(default_factory=list[Obstacle])

    @property
    def values(self) -> Value:
        return self.product.reads[-1]


def find_attention(graph: Graph) -> Iterator[Attention]:
    """Every softmax over the last dimension that stands between two products."""
    for op in graph.ops:
        if op.name in SOFTMAXES and not op.out.const and op.args[1] in (-1, len(op.out.shape) - 1):
            found = _forward(graph, op)
            if found is not None:
                _scores(op.reads[0], found, 0)
                if found.terms:
                    yield found


def _forward(graph: Graph, softmax: Op) -> Attention | None:
    """From the softmax to the product with the values, noting who else reads the probabilities."""
    obstacles: list[Obstacle] = []
    value = softmax.out
    for _ in range(MAX_STEPS):
        product = next((op for op in value.users if op.name in CONTRACTIONS and op.reads[-2] is value), None)
        onward = [op for op in value.users if op is not product]
        if product is not None:
            if onward:
                obstacles.append(
                    Obstacle("weights", f"the attention weights are also read by {onward[0].name}", softmax)
                )
            return Attention(softmax, product, obstacles=obstacles)
        hidden = [made for made, read in graph.opaque.items() if value in read]
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
    """``probabilities[..., :-1]``."""
    source = op.reads[0].shape
    return op.name == "slice" and op.out.shape == (*source[:-1], source[-1] - 1) and op.args[2] in (0, None)


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
        return _scores(op.reads[0], found, depth + 1)
    if op.name in ("where", "masked_fill"):
        return _selection(op, found, depth)
    data = [read for read in op.reads if not read.const]
    if op.name in SCALES and len(data) == 1 and _is_scalar_factor(op):
        return _scores(data[0], found, depth + 1)
    reached = any(_scores(read, found, depth + 1) for read in op.reads[:2])
    if reached:
        found.obstacles.append(Obstacle("scores", f"{op.name} stands between the scores and the softmax", op))
    return reached


def _term(op: Op, found: Attention) -> bool:
    if any(is_weight(root(read)) for read in op.reads):
        return False
    if found.scores is None:
        found.scores = found.softmax.reads[0]
    found.terms.append(Term(op))
    return True


def _sum(op: Op, found: Attention, depth: int) -> bool:
    if len(op.reads) != 2:  # a number is added: the same for all tokens, the proof will say
        return bool(op.reads) and _scores(op.reads[0], found, depth + 1)
    first, second = (_scores(read, found, depth + 1) for read in op.reads)
    if first != second:
        found.masks.append((op, op.reads[1] if first else op.reads[0]))
    return first or second


def _selection(op: Op, found: Attention, depth: int) -> bool:
    """``where(mask, scores, fill)`` and ``masked_fill(scores, mask, fill)``."""
    scores, mask = (op.args[1], op.args[0]) if op.name == "where" else (op.args[0], op.args[1])
    if not isinstance(scores, Value) or not _scores(scores, found, depth + 1):
        return False
    found.masks.append((op, mask))
    return True


def _with_sink(op: Op, found: Attention, depth: int) -> bool:
    scores, sinks = op.reads
    if not _scores(scores, found, depth + 1):
        return False
    found.scores, found.sinks = scores, sinks
    if sinks.shape[-1] != 1 or op.args[1] not in (-1, len(op.out.shape) - 1):
        found.obstacles.append(Obstacle("scores", "something other than one sink is appended to the scores", op))
    return True


def _subtracts_maximum(op: Op) -> bool:
    """``x - x.max(-1, keepdim=True)``, which a softmax does not see."""
    if len(op.reads) != 2 or op.reads[1].op is None:
        return False
    largest = op.reads[1].op
    return largest.name in ("max", "amax") and largest.reads[0] is op.reads[0] and op.reads[1].shape[-1] == 1


def _is_scalar_factor(op: Op) -> bool:
    """A factor that is one number; on the right of a division."""
    other = op.args[1]
    if op.name == "div" and isinstance(other, Value) and not other.const:
        return False
    return not isinstance(other, Value) or any(all(n == 1 for n in read.shape) for read in op.reads if read.const)


# -- keys and values ---------------------------------------------------------------------------------------------------


class Sources:
    """What a key or value operand is made of: projections, of ``latent`` alone if it is given, and shared tensors."""

    def __init__(self, latent: Value | None = None, moves: frozenset[str] = MOVES) -> None:
        self.latent, self.moves = latent, moves
        self.reached: dict[Value, bool] = {}

    def of(self, value: Value) -> tuple[list[Projection], list[Value]]:
        projections: dict[Op, Projection] = {}
        shared: dict[Value, None] = {}
        self._collect(value, projections, shared)
        return list(projections.values()), list(shared)

    def _collect(self, value: Value, projections: dict[Op, Projection], shared: dict[Value, None]) -> None:
        projection = self._project(value)
        if projection is not None:
            projections[projection.op] = projection
        elif value.op is not None and self._reaches(value):
            for read in _data(value.op):
                self._collect(read, projections, shared)
        elif not value.const:
            shared[value] = None

    def _project(self, value: Value) -> Projection | None:
        found = project(value.op)
        other = self.latent is not None and found is not None and named(found.activation, 3) is not self.latent
        return None if other else found

    def _reaches(self, value: Value) -> bool:
        """True if rearrangements alone lie between ``value`` and a projection."""
        if value not in self.reached:
            op = value.op
            self.reached[value] = False
            moves = op is not None and (op.name in self.moves or scales(op))
            self.reached[value] = self._project(value) is not None or (
                op is not None and moves and any(self._reaches(read) for read in _data(op))
            )
        return self.reached[value]


def _data(op: Op) -> list[Value]:
    return [read for read in op.reads if not read.const]


def scales(op: Op) -> bool:
    """A constant factor, as scaled_dot_product_attention puts on both operands."""
    return op.name in SCALES and len(_data(op)) == 1 and _is_scalar_factor(op)


def project(op: Op | None) -> Projection | None:
    """The projection an operator is, a bias added right after included."""
    if op is None or op.out.const:
        return None
    if op.name == "add" and len(op.reads) == 2 and sum(root(read).param for read in op.reads) == 1:
        inner = next(read for read in op.reads if not root(read).param)
        while inner.op is not None and inner.op.name in LAYOUT:
            inner = inner.op.reads[0]
        found = project(inner.op)
        return None if found is None else Projection(op, found.activation, found.weight, True)
    if op.name not in CONTRACTIONS:
        return None
    left, right = op.reads[-2:]
    weights = [is_weight(root(read)) for read in (left, right)]
    if sum(weights) != 1:
        return None
    activation, weight = (right, left) if weights[0] else (left, right)
    return Projection(op, activation, weight, op.name in ("addmm", "baddbmm"))


def unexpanded(value: Value) -> Value:
    """A shared tensor before it is expanded over heads; itself if it never is."""
    step = value
    while step.op is not None and step.op.name in LAYOUT and not step.const:
        source = step.op.reads[0]
        if step.op.name == "expand" and source.shape != step.shape[len(step.shape) - len(source.shape) :]:
            return source
        step = source
    return value


def named(value: Value, rank: int = 0) -> Value | None:
    """The nearest value at or above ``value``, through rearrangements and constant factors, that a node yields."""
    step = value
    while step.node is None or len(step.shape) < rank:
        op = step.op
        if op is None or not (op.name in LAYOUT or scales(op)):
            return None
        step = _data(op)[0]
    return step
