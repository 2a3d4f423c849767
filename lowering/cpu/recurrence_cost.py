"""What linear attention over a sequence costs on a CPU, with Inductor and as the op.

An estimate from what the code does and from the sizes of the states::

    Inductor:  a call + products + multiplications in them and in solves + numbers of other operators
    the op:    a call + tokens of all heads + numbers of all states, one for every token

The op walks over the tokens. Code that multiplies queries with keys does less for a few tokens than a walk over their
states, so that the prompt's length decides, beside the keys' width. ``python -m kdacompile.bench.recurrent_prompts``
measured what the constants are fitted to (``docs/results/fits/recurrence-cpu.json``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .costs import Constants, Kind, Priced


@dataclass(frozen=True)
class Region(Priced):
    """What code does that is linear attention: products of matrices, multiplications in them and in triangular solves,
    numbers that its other operators make. And what the recurrence goes through: tokens of all heads, B x T x H, and
    numbers of a state, K x V.
    """

    products: int
    multiplied: int
    solved: int
    numbers: int
    rows: int
    state: int
    delta: bool = False

    seconds: ClassVar[dict[Kind, Constants]] = {
        (False, False): (1.76e-05, 4.72e-06, 2.5e-11, 7.59e-11, 1.21e-10, 2.74e-05, 5.01e-08, 4.08e-11, 4.75e-11),
        (False, True): (9.56e-06, 2.45e-05, 6e-12, 7.39e-11, 1.49e-10, 2.86e-05, 7.02e-08, 4.62e-11, 5.64e-11),
        (True, False): (0.00017, 0.0, 8.31e-11, 2.31e-10, 8.59e-10, 0.000283, 4.14e-07, 1.51e-10, 2.07e-10),
        (True, True): (0.000201, 6.39e-05, 1.53e-11, 2.9e-10, 1.14e-09, 0.000365, 4.37e-07, 1.6e-10, 2.19e-10),
    }

    def terms(self, *, op: bool) -> tuple[float, ...]:
        states = self.rows * self.state
        if op:
            return (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, self.rows, *((0.0, states) if self.delta else (states, 0.0)))
        return (1.0, self.products, self.multiplied, self.solved, self.numbers, 0.0, 0.0, 0.0, 0.0)


FEW = 48
"""Operators."""


def is_estimated(operators: int, tokens: int) -> bool:
    """Whether code does few things, or less than one for every four tokens, as what was measured: a loop over tokens
    starts more kernels than it makes numbers of.
    """
    return operators <= FEW or 4 * operators <= tokens
