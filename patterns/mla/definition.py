"""Multi-head latent attention (MLA): what the semantic op computes, and what a binding says of a region.

    k_s = [W_UK c_s | r_s]      v_s = W_UV c_s
    o_t = softmax_s(scale * q_t . k_s + mask_ts) v

``c_s`` is one latent per token, ``r_s`` one rotated key per token that all heads share; what expands the latent
(kv_b_proj) has no bias. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. The equation in code is
``oracle.py``; ``attention.py`` finds where it could be, ``latent.py`` says what plays which role, and
nothing is believed before the proof.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.match import Binding, Candidate, Match, by_node
from kdacompile.patterns.engine.placement import Placement

NAME = "mla"

X = TypeVar("X")

AXES = {
    "q": "BTHK",
    "q_rope": "BTHD",
    "latent": "BCR",
    "k_rope": "BCD",
    "cache": "BCE",
    **dict.fromkeys(("mask", "mask_2", "mask_3"), "BHTS"),
    "sinks": "H",
    "factor": "",
    "lengths": "B",
    "block_table": "BM",
    "lse": "BHT",
    "w": "WR",
    "w_k": "WR",
    "w_v": "WR",
    "o": "BTHV",
}
"""The op's own order of dimensions, per role. C counts what the cache holds, S the tokens attended to: all of it, or as
many as there are queries (a prefill into an empty static cache). K is N + D where the query comes in one piece, N where
in two; W counts the rows of a weight, heads times what each has. Without weights N and V are R, and E = R + D is the
latent and the rotated key side by side. Of a paged cache there are P pages of G tokens, M of them a request's."""

WEIGHTS = ("w", "w_k", "w_v")
MASKS = ("mask", "mask_2", "mask_3")
"""Roles of masks that are operands, in the order in which the graph applies them."""


def order_of(role: str, value: Value) -> str:
    """The op's own order of a role's dimensions; a weight may have one for heads, then Y counts the rows of each."""
    return "HYR" if role in WEIGHTS and len(value.shape) == 3 else AXES[role]


def place(role: str, value: Value, axes: str, columns: tuple[int, int] | None = None) -> Placement:
    """A tensor in a role of MLA; a cache that is a pool of pages has the axes P and G for tokens, and ``columns`` that
    are the cache's.
    """
    order = order_of(role, value)
    return Placement(role, value, axes, order if columns is None else "PG" + order[-1], columns)


@dataclass(frozen=True)
class Hiding:
    """How one of the masks is applied."""

    role: str
    keeps: bool
    """Of a boolean mask: True marks what may be seen."""
    fill: float
    """What hidden scores become: -inf, or a number so low that only a row hidden as a whole can tell (half the dtype's
    lowest; numbers nearer to zero, which scores may reach, are added as they are). Of a mask that is
    added: -inf if it adds nothing else, 0 if nobody knows."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Binding):
    """The binding of a region that could be MLA. There is no state: the cache is an input like any other.

    ``final_state`` is lse, the logarithm of the sum that the weights are divided by, where it is read elsewhere.
    """

    scores: str
    """Axes of the softmax's input, less what a sink appends."""
    rope_first: bool = False
    """Whether a query in one piece, and the key, begin with the rotated part; also a cache of both."""
    values_first: bool = False
    """Whether a head's rows of a weight for both begin with the values'."""
    stacked: bool = False
    """Whether a weight for both has all heads' rows of the keys together, and then those of the values."""
    causal: bool = False
    divides: bool = False
    """Whether the scores are divided by ``factor``, a number that is held in a tensor; else they are its multiple."""
    masks: tuple[Hiding, ...] = ()
    lengths_plus: int = 0
    """What is added to ``lengths``: the graph may hold the last position instead."""
    wraps: bool = False
    """Whether an entry of the block table below zero counts from the pool's end, as an index does."""

    @property
    def name(self) -> str:
        return NAME

    def assignment(self, who: Callable[[Value], object] = by_node) -> tuple[object, ...]:
        flags = self.prefix, self.rope_first, self.values_first, self.stacked, self.causal, self.divides
        return super().assignment(who), flags, self.masks

    def key(self) -> tuple[object, ...]:
        fixed = {axis: size for axis, size in self.sizes.items() if axis in "HNDRV"}
        scale = f"{self.scale:.9g}"  # fitted, at each instance anew
        return self.assignment(), fixed, self.lengths_plus, self.wraps, scale

    @property
    def prefix(self) -> bool:
        """Whether only as many tokens of the cache as there are queries take part."""
        return self.sizes["C"] != self.sizes["S"]

    @property
    def weights(self) -> bool:
        """Whether the region expands the latent; where it does not, the weights were absorbed by hand."""
        return "w" in self.inputs or "w_k" in self.inputs

    def operands(
        self, given: Mapping[str, X], part: Callable[[X, int, int | None, int | None], X], per_head: Callable[[X], X]
    ) -> tuple[X, X | None, X, X | None, X | None, X | None]:
        """q, q_rope, latent, k_rope, w_uk and w_uv, as the op takes them, from the tensors in their roles.

        Tensors or nodes alike: ``part(x, dim, start, stop)`` slices one, and ``per_head(w)`` gives a weight a dimension
        for its heads.
        """
        rope, first = self.sizes["D"], self.sizes["V" if self.values_first else "N"]

        def split(x: X) -> tuple[X, X]:
            """The plain and the rotated columns."""
            if self.rope_first:
                return part(x, -1, rope, None), part(x, -1, None, rope)
            return part(x, -1, None, -rope), part(x, -1, -rope, None)

        q, q_rope = split(given["q"]) if rope and "q_rope" not in given else (given["q"], given.get("q_rope"))
        latent, k_rope = split(given["cache"]) if "cache" in given else (given["latent"], given.get("k_rope"))
        keys = None if q_rope is None else k_rope
        if not self.weights:
            return q, q_rope, latent, keys, None, None
        if "w" not in given:
            return q, q_rope, latent, keys, per_head(given["w_k"]), per_head(given["w_v"])
        if self.stacked:
            w, rows = given["w"], self.sizes["H"] * first
            one, other = per_head(part(w, 0, None, rows)), per_head(part(w, 0, rows, None))
        else:
            both = per_head(given["w"])
            one, other = part(both, 1, None, first), part(both, 1, first, None)
        return q, q_rope, latent, keys, *((other, one) if self.values_first else (one, other))


LatentCandidate = Candidate[LatentAttention]
"""Its outputs are the attention's result, the scores (the softmax's input, less what a sink appends), and lse if it is
read elsewhere."""

LatentMatch = Match[LatentAttention]


@dataclass(frozen=True)
class Parts:
    """The tensors of one attention by role, masks and sinks left out, with the size behind every axis."""

    tensors: dict[str, Value]
    sizes: dict[str, int]
