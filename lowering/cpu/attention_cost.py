"""What MLA whose keys and values are expanded costs on a CPU, with Inductor and as the op.

Both are matrix products, passes over the scores and over what is read, and a part of their own for every call. In
training::

    Inductor:  3 expand + 3 scores + 3 values
    the op:    4 expand + 4 scores + 3 values of what may be seen

The op keeps neither keys and values nor scores for the backward, and computes them again; it skips what causality
hides. ``python -m kdacompile.bench.latent_prompts`` measured what the constants are fitted to
(``docs/results/fits/mla-cpu.json``).

Without gradients the op took 0.2 to 0.7 times as long as Inductor's code in every case there in fp32. What it loses at
is calls so small that it costs more to make them than to compute: ``WORTH``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..attention_rows import ROWS
from .costs import Constants, Kind, Priced


@dataclass(frozen=True)
class Prompt(Priced):
    """Sizes of a call: batch, queries, cached tokens, heads; widths of keys without the rotated part, of that part, of
    values, of the latent.
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

    seconds: ClassVar[dict[Kind, Constants]] = {
        (False, True): (6.06e-12, 1.18e-09, 2.72e-11, 6.1e-05, 4.82e-12, 4.94e-10, 1.88e-10, 4.83e-05, 0.0),
        (True, False): (1.11e-11, 2.81e-09, 6.39e-10, 0.000229, 7.29e-12, 4.25e-09, 1.73e-09, 0.000486, 9.67e-09),
        (True, True): (6.05e-12, 4.85e-09, 0.0, 0.000468, 9.43e-12, 4.29e-09, 2.03e-09, 0.000587, 4.72e-09),
    }

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

    def terms(self, *, op: bool) -> tuple[float, ...]:
        """Operations of products, scores, numbers in weights, and 1, of Inductor and of the op, and the op's numbers in
        keys and values.
        """
        pairs = self.pairs(blocks=op)
        scores, values = 2.0 * pairs * (self.nope + self.rope), 2.0 * pairs * self.value
        times = (1.0, 1.0, 1.0) if not self.train else (4.0, 4.0, 3.0) if op else (3.0, 3.0, 3.0)
        products = sum(x * y for x, y in zip(times, (self.expand, scores, values), strict=True))
        numbers = float(self.batch * self.cached * self.heads * (self.nope + self.rope + self.value))
        weights = float(self.heads * (self.nope + self.value) * self.rank)
        own, none = (products, pairs, weights, 1.0), (0.0, 0.0, 0.0, 0.0)
        return (*none, *own, numbers) if op else (*own, *none, 0.0)


WORTH = 2e6
"""Operations of the model's own code below which it is faster than an op, without gradients. Layers of small models
(``python -m tests.models.small_layers``) took 1.02 to 1.20 times as long with it at up to 1.7 million, and attention
of other sizes (4 heads of 32, R = 64) 0.7 to 0.8 times at 2.1 and 4.7 million.
"""


def is_too_small(prompt: Prompt) -> bool:
    """Whether making the call of an op takes longer than it saves."""
    return not prompt.train and prompt.operations < WORTH
