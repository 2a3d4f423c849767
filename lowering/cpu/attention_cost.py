"""What MLA costs on a CPU, as Inductor compiles the model's own code and as the op runs it: an estimate.

In training both are matrix products, passes over the scores, and a part of their own for every call::

    Inductor:  3 expand + 3 scores + 3 values
    the op:    4 expand + 4 scores + 3 values of what may be seen

The op keeps neither keys and values nor scores for the backward, and computes them again; it skips what causality
hides. The constants are fitted to what ``python -m kdacompile.bench.latent_prompts`` measured, which is in
``docs/results/fits/mla-cpu.json``. They are of one machine; a decision rests on a quotient of two such estimates.

Without gradients the op took 0.2 to 0.5 times as long as Inductor's code in every case there. What it loses at is calls
so small that it costs more to make them than to compute: ``WORTH``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..attention_rows import ROWS


@dataclass(frozen=True)
class Prompt:
    """Sizes of a call whose keys and values are expanded: batch, queries, cached tokens, heads; widths of keys without
    the rotated part, of that part, of values, of the latent. ``train``: forward and backward.
    """

    batch: int
    tokens: int
    cached: int
    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    causal: bool = False
    train: bool = False

    @property
    def expand(self) -> float:
        return 2.0 * self.batch * self.cached * self.heads * (self.nope + self.value) * self.rank

    def pairs(self, *, blocks: bool) -> float:
        """Scores that are computed: all, or in blocks of queries those that causality leaves."""
        seen = self.tokens * self.cached
        if blocks and self.causal:
            hidden = sum(self.tokens - min(at + ROWS, self.tokens) for at in range(0, self.tokens, ROWS))
            seen -= hidden * min(ROWS, self.tokens)
        return float(self.batch * self.heads * seen)

    @property
    def operations(self) -> float:
        """Of the products of the model's own code, forward."""
        return self.expand + 2.0 * self.pairs(blocks=False) * (self.nope + self.rope + self.value)

    def terms(self, *, op: bool) -> tuple[float, float, float, float, float]:
        """What the constants multiply, forward and backward: operations of products, Inductor's scores, the op's, its
        numbers in keys and values, and 1 for the op.
        """
        pairs = self.pairs(blocks=op)
        scores, values = 2.0 * pairs * (self.nope + self.rope), 2.0 * pairs * self.value
        times = (4.0, 4.0, 3.0) if op else (3.0, 3.0, 3.0)
        products = sum(x * y for x, y in zip(times, (self.expand, scores, values), strict=True))
        numbers = float(self.batch * self.cached * self.heads * (self.nope + self.rope + self.value))
        return (products, 0.0, pairs, numbers, 1.0) if op else (products, pairs, 0.0, 0.0, 0.0)


Constants = tuple[float, ...]

TRAINING: Constants = (1.09e-11, 5.02e-09, 3.22e-10, 1.33e-09, 0.00126)
"""Seconds for each of the terms."""

LEAST = 4.4e7
"""Operations, forward, in the smallest case that was measured in training: nothing is estimated below."""

MARGIN = 1.1
"""The quotient of two estimates from which on the op is left out: the fit is no closer."""

WORTH = 2e6
"""Operations of the model's own code below which it is faster than an op, without gradients. Layers of small models
(``python -m tests.models.small_layers``) took 1.02 to 1.20 times as long with it at up to 1.7 million, and attention
of other sizes (4 heads of 32, R = 64) 0.7 to 0.8 times at 2.1 and 4.7 million.
"""


def loses(prompt: Prompt) -> float | None:
    """How many times as long as Inductor's own code the op takes in training, where that is too long; else None."""
    if not prompt.train or prompt.operations < LEAST:
        return None
    ratio = estimated_ratio(prompt)
    return ratio if ratio > MARGIN else None


def is_too_small(prompt: Prompt) -> bool:
    """Whether making the call of an op takes longer than it saves."""
    return not prompt.train and prompt.operations < WORTH


def estimated_ratio(prompt: Prompt) -> float:
    """The op's time over that of Inductor's own code, in training."""
    ours, theirs = (sum(x * y for x, y in zip(TRAINING, prompt.terms(op=op), strict=True)) for op in (True, False))
    return ours / theirs
