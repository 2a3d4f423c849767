"""Multi-head latent attention (MLA): what the semantic op computes, and what is claimed about a region.

    k_s = [W_UK c_s | r_s]      v_s = W_UV c_s
    o_t = softmax_s(scale * q_t . k_s + mask_ts) v

``c_s`` is one latent per token, ``r_s`` one rotated key per token that all heads share; what expands the latent
(kv_b_proj) has no bias. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. The equation in code is
``oracle.py``; ``walk.py`` finds where it could be, ``roles.py`` says what plays which role, and
nothing is believed before the proof.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine.match import Binding, Candidate, Match
from kdacompile.patterns.engine.placement import Placement

NAME = "mla"

AXES = {
    "q": "BTHK",
    "q_rope": "BTHD",
    "latent": "BCR",
    "k_rope": "BCD",
    "cache": "BCE",
    **dict.fromkeys(("mask", "mask_2", "mask_3"), "BHTS"),
    "sinks": "H",
    "lengths": "B",
    "block_table": "BM",
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

VANISHING = -1e4
"""A mask's number from which on nothing can be seen of a token: the least negative one that models use."""


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
    """What hidden scores become: -inf, or a number so low that only a row hidden as a whole can tell. Of a mask that is
    added: -inf if it adds nothing else, 0 if nobody knows."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Binding):
    """The claim "this region is MLA with these roles". There is no state: the cache is an input like any other."""

    scores: str
    """Axes of the softmax's input, less what a sink appends."""
    rope_first: bool = False
    """Whether a query in one piece, and the key, begin with the rotated part; also a cache of both."""
    values_first: bool = False
    """Whether a head's rows of a weight for both begin with the values'."""
    stacked: bool = False
    """Whether a weight for both has all heads' rows of the keys together, and then those of the values."""
    causal: bool = False
    masks: tuple[Hiding, ...] = ()
    lengths_plus: int = 0
    """What is added to ``lengths``: the graph may hold the last position instead."""
    wraps: bool = False
    """Whether an entry of the block table below zero counts from the pool's end, as an index does."""

    @property
    def name(self) -> str:
        return NAME

    def assignment(self) -> tuple[object, ...]:
        flags = self.prefix, self.rope_first, self.values_first, self.stacked, self.causal
        return super().assignment(), flags, self.masks

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

    def split_cache(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The latent and the rotated key, ``[B, S, R]`` and ``[B, S, D]``."""
        if "cache" not in given:
            return given["latent"], given.get("k_rope")
        cache, rope = given["cache"], self.sizes["D"]
        return (cache[..., rope:], cache[..., :rope]) if self.rope_first else (cache[..., :-rope], cache[..., -rope:])

    def split_weights(self, given: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """w_uk ``[H, N, R]`` and w_uv ``[H, V, R]`` from the weights as the model has them."""
        if not self.weights:
            return None, None
        heads, first = self.sizes["H"], self.sizes["V" if self.values_first else "N"]
        if "w" not in given:
            w_k, w_v = (per_head(given[role], heads) for role in ("w_k", "w_v"))
            return w_k, w_v
        if self.stacked:
            parts = given["w"][: heads * first], given["w"][heads * first :]
            one, other = (per_head(part, heads) for part in parts)
        else:
            rows = per_head(given["w"], heads)
            one, other = rows[:, :first], rows[:, first:]
        return (other, one) if self.values_first else (one, other)

    def split_queries(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The queries' plain and rotated parts, ``[B, T, H, N]`` and ``[B, T, H, D]``."""
        q, rope = given["q"], self.sizes["D"]
        if "q_rope" in given or not rope:
            return q, given.get("q_rope")
        return (q[..., rope:], q[..., :rope]) if self.rope_first else (q[..., :-rope], q[..., -rope:])


LatentCandidate = Candidate[LatentAttention]
"""Its outputs are the attention's result and the scores: the softmax's input, less what a sink appends."""

LatentMatch = Match[LatentAttention]


def per_head(weight: Tensor, heads: int) -> Tensor:
    """A weight with a dimension for its heads."""
    return weight if weight.dim() == 3 else weight.unflatten(0, (heads, -1))


@dataclass(frozen=True)
class Parts:
    """The tensors of one attention by role, masks and sinks left out, with the size behind every axis."""

    tensors: dict[str, Value]
    sizes: dict[str, int]
