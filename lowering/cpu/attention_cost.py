"""What a prompt of MLA costs on a CPU, as Inductor compiles the model's own code and as the op runs it: an estimate.

Both are matrix products, passes over the scores, and a part of their own for every call::

    Inductor:  expand + scores + values                       in training:  3 expand + 3 scores + 3 values
    the op:    expand + scores + values of what may be seen   in training:  4 expand + 4 scores + 3 values

The op keeps neither keys and values nor scores for the backward, and computes them again; it skips what causality
hides. The constants are fitted to what ``python -m kdacompile.bench.latent_prompts`` measured, which is in
``docs/results/fits/mla-cpu.json``. They are of one machine; a decision rests on a quotient of two such estimates.
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

    def terms(self, *, op: bool) -> tuple[float, float, float, float, float]:
        """What the constants multiply: operations of products, Inductor's scores, the op's, its numbers in keys and
        values, and 1 for the op.
        """
        pairs = self.pairs(blocks=op)
        scores, values = 2.0 * pairs * (self.nope + self.rope), 2.0 * pairs * self.value
        times = (1.0, 1.0, 1.0) if not self.train else (4.0, 4.0, 3.0) if op else (3.0, 3.0, 3.0)
        products = sum(x * y for x, y in zip(times, (self.expand, scores, values), strict=True))
        numbers = float(self.batch * self.cached * self.heads * (self.nope + self.rope + self.value))
        return (products, 0.0, pairs, numbers, 1.0) if op else (products, pairs, 0.0, 0.0, 0.0)


Constants = tuple[float, ...]

FORWARD: Constants = (1.42e-11, 3.64e-09, 1.26e-09, 3.62e-09, 7.69e-05)
TRAINING: Constants = (1.47e-11, 3.82e-09, 2.09e-09, 9.4e-09, 0.00101)
"""Seconds for each of the terms."""

LEAST = 4.4e7
"""Operations in the smallest case that was measured: nothing is estimated below."""

MARGIN = 1.1
"""The quotient of two estimates from which on the op is left out: the fit is no closer."""


def loses(prompt: Prompt) -> float | None:
    """How many times as long as Inductor's own code the op takes, where that is too long; None where it is not."""
    if prompt.terms(op=False)[0] < LEAST:
        return None
    ratio = estimated_ratio(prompt)
    return ratio if ratio > MARGIN else None


def estimated_ratio(prompt: Prompt) -> float:
    """The op's time over that of Inductor's own code."""
    ours, theirs = (_seconds(prompt.terms(op=op), TRAINING if prompt.train else FORWARD) for op in (True, False))
    return ours / theirs


def _seconds(terms: Constants, constants: Constants) -> float:
    return sum(x * y for x, y in zip(constants, terms, strict=True))
