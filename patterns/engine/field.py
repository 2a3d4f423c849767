"""Numbers without size: arithmetic modulo a prime, where two different functions differ at almost every point.

Every number a region holds is drawn twice, modulo ``P`` for what is added and multiplied and modulo ``R`` for what
stands in an exponent; ``P = 2 R + 1`` and both are prime, so that ``exp(x) = BASE ** x`` turns sums modulo ``R`` into
products modulo ``P``, and one may divide in both. Nothing is small here, nothing is far and nothing is rounded: a
polynomial of degree d that is not zero is zero at a random point with a chance of d / R (Schwartz and Zippel), which is
2e-6 for a thousand tokens.

A multiple of the prime is nothing, so no program may know it: each process draws one of 2,503. What it is cannot change
what is accepted but for such a chance: equal functions are equal modulo every prime.

2, 3, 5, 7, 11 and 13 are squares modulo both, and -1 is not: each square has one root that is a square itself, so that
``K ** -0.5`` and ``K ** -0.25`` are numbers here with ``(K ** -0.25) ** 2 == K ** -0.5``.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache

import torch
from torch import Tensor

STEP = 240240
"""16 * 3 * 5 * 7 * 11 * 13: what is left of P and of R after a division by it says what is a square modulo them."""

CLASSES = (16799, 63839, 82319, 109199, 129359, 147839, 174719, 238559, 240239)
"""What is left of every P as above."""


def draw() -> int:
    """A modulus of values between 2^30 and 2^31."""
    while True:
        found = (secrets.randbelow((1 << 30) // STEP - 1) + (1 << 30) // STEP + 1) * STEP + secrets.choice(CLASSES)
        if _prime(found // 2) and _prime(found):
            return found


def _prime(n: int) -> bool:
    """Of n = 3 (mod 4) below 4,759,123,141 (Miller and Rabin; Jaeschke 1993)."""
    return all(pow(base, n // 2, n) in (1, n - 1) for base in (2, 7, 61))


P = draw()
"""Modulus of values."""

R = P // 2
"""Modulus of exponents: (P - 1) / 2."""

BASE = (secrets.randbelow(P - 3) + 2) ** 2 % P
"""What ``exp(1)`` is: a square, so that its powers repeat after R."""

LN2 = secrets.randbelow(R - 3) + 2
"""What the natural logarithm of two is modulo R: ``exp2(x) = exp(LN2 x)``, and nothing else is known about it."""

ALIKE = 2.0**-50
"""How far numbers that stand for the same may be from each other: what is left of both is their rounding."""

SMOOTH = (2, 3, 5, 7, 11, 13)
"""Primes whose roots are known in both fields."""

BLOCK = 1 << 15
"""Numbers that stay near a core while several operators follow each other."""

MANY = 1 << 15
"""Different numbers of one constant that are still read one by one."""

GONE = {torch.float64: -746.0, torch.float32: -104.0}
"""From here down the exponential of a number is zero, in this dtype and all the more in narrower ones."""


def unreached(dtype: torch.dtype) -> float:
    """From here down no number of a model in this dtype is told from -inf: half its lowest (docs/soundness.md)."""
    return torch.finfo(dtype).min / 2


class Silent(Exception):
    """The field has no word for something; the message names it."""


@dataclass
class Numbers:
    """Reads literals, and remembers those that stand for nothing but their digits: sums and products of such numbers
    are rounded by the model, which is no difference between two functions.
    """

    rough: set[float] = field(default_factory=set[float])
    stands: dict[tuple[Fraction, int, int], float] = field(default_factory=dict[tuple[Fraction, int, int], float])
    """A number by what it stands for."""

    def excuse(self) -> str:
        """Which literals could be to blame for a difference; none if none could: what is all but one is not rounded."""
        found = sorted(number for number in self.rough if abs(abs(number) - 1.0) > 1e-6)
        return "the numbers " + ", ".join(f"{number:.9g}" for number in found[:3]) if found else ""

    def read(self, number: float, modulus: int) -> int:
        """A literal: what it obviously stands for (1 / 3, 1e-10, 128 ** -0.5, log 2), else its digits exactly.

        Raises Silent for what is no number, and for one that is nothing modulo the prime.
        """
        if not math.isfinite(number):
            raise Silent(f"the number {number}")
        residue = self._digits(number, modulus)
        if residue == 0 != number:
            raise Silent(f"the number {number:.17g}, which is nothing modulo {modulus}")
        return residue

    def _digits(self, number: float, modulus: int) -> int:
        if number == int(number):
            return int(number) % modulus
        found = _meaning(abs(number))
        if found is None:
            numerator, denominator = abs(number).as_integer_ratio()
            if numerator >= 1 << 24:
                self.rough.add(number)
            value = fraction(numerator, denominator, modulus)
        else:
            value = _value(*found, modulus)
            other = self.stands.setdefault(found, abs(number))
            if abs(other - abs(number)) > ALIKE * other:
                raise Silent(f"the numbers {number:.17g} and {other:.17g}, which are not the same")
        return value if number > 0 else -value % modulus

    def tensor(self, data: Tensor, modulus: int) -> Tensor:
        """A constant's numbers. NaN, which nobody wrote yet, is something different everywhere."""
        numbers = data.double() if data.is_floating_point() else data.to(torch.int64)
        if bool(((numbers == numbers.trunc()) & (numbers.abs() < modulus // 2)).all()):
            return numbers.to(torch.int64) % modulus
        shape, flat = data.shape, numbers.double().reshape(-1)
        kinds, which = flat.nan_to_num(nan=math.inf).unique(return_inverse=True)
        if len(kinds) > MANY:
            raise Silent("a constant of too many different numbers")
        unwritten = flat.isnan()
        kinds = torch.where(kinds == math.inf, 0.0, kinds) if bool(unwritten.any()) else kinds
        read = torch.tensor([self.read(number, modulus) for number in kinds.tolist()], dtype=torch.int64)[which]
        if bool(unwritten.any()):
            read = torch.where(unwritten, random(read.shape, modulus, torch.Generator().manual_seed(17)), read)
        return read.reshape(shape)


@lru_cache(maxsize=1 << 14)
def _meaning(number: float) -> tuple[Fraction, int, int] | None:
    """(f, n, e) for ``f ** (1 / n) * log(2) ** e``; None for a number that is none of these."""
    digits = Fraction(repr(number))  # what was written, if few digits were
    if digits.numerator < 10**12:
        return digits, 1, 0
    plain = _fraction(number, 1 << 34)
    if plain is not None:
        return plain, 1, 0
    for root in (2, 4):
        power = _fraction(number**root, 1 << 24)
        if power is not None and _smooth(power):
            return power, root, 0
    for exponent in (1, -1):
        factor = _fraction(number * math.log(2.0) ** -exponent, 1 << 24)
        if factor is not None:
            return factor, 1, exponent
    return None


def _fraction(number: float, largest: int) -> Fraction | None:
    """The fraction that a number is up to rounding, if numerator times denominator is at most ``largest``."""
    if not 1e-30 < number < 1e30:
        return None
    found = Fraction(number).limit_denominator(max(1, math.isqrt(int(largest / number))))
    near = abs(float(found) - number) <= 2.0**-49 * number
    return found if near and found.numerator * found.denominator <= largest else None


def _smooth(number: Fraction) -> bool:
    rest = number.numerator * number.denominator
    for prime in SMOOTH:
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _value(number: Fraction, root: int, exponent: int, modulus: int) -> int:
    value = fraction(number.numerator, number.denominator, modulus)
    half = (modulus + 1) // 4  # modulo p = 3 (mod 4), a square's root that is a square is its (p + 1) / 4-th power
    while root > 1:
        value, root = pow(value, half, modulus), root // 2
    if exponent and modulus != R:
        value *= pow(LN2 + 1, exponent, modulus)  # nothing but exponentials know log 2
    return value * pow(LN2, exponent, modulus) % modulus


def fraction(numerator: int, denominator: int, modulus: int) -> int:
    """Raises Silent where the denominator is nothing modulo ``modulus``."""
    if denominator % modulus == 0:
        raise Silent(f"a number with the denominator {denominator}")
    return numerator * pow(denominator, -1, modulus) % modulus


def random(shape: tuple[int, ...] | torch.Size | list[int], modulus: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, modulus, tuple(shape), generator=generator)


def power(base: Tensor, exponent: int, modulus: int) -> Tensor:
    """``base ** exponent`` for one integer; negative ones divide."""
    exponent %= modulus - 1
    result: Tensor | None = None
    while exponent:
        if exponent & 1:
            result = base if result is None else result * base % modulus
        exponent >>= 1
        base = base * base % modulus if exponent else base
    return torch.ones_like(base) if result is None else result


def inverse(x: Tensor, modulus: int) -> Tensor:
    """``1 / x``: one power for all of them, and three products each."""
    flat, rows = x.reshape(-1), 32
    if len(flat) <= 2 * rows:
        return power(x, modulus - 2, modulus)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % rows), value=1).view(rows, -1)
    if bool((padded == 0).any()):
        return power(x, modulus - 2, modulus)
    before = [padded[0]]
    for row in padded[1:]:
        before.append(before[-1] * row % modulus)
    rest = power(before[-1], modulus - 2, modulus)
    out = torch.empty_like(padded)
    for i in range(rows - 1, 0, -1):
        out[i] = rest * before[i - 1] % modulus
        rest = rest * padded[i] % modulus
    out[0] = rest
    return out.view(-1)[: len(flat)].view(x.shape)


@cache
def _powers() -> tuple[Tensor, Tensor]:
    """``BASE ** i`` and ``BASE ** (i << 15)`` for i below 2 ** 15."""
    tables: list[Tensor] = []
    for base in (BASE, pow(BASE, 1 << 15, P)):
        table = torch.ones(1, dtype=torch.int64)
        for bit in range(15):
            table = torch.cat([table, table * pow(base, 1 << bit, P) % P])
        tables.append(table)
    return tables[0], tables[1]


def exp(x: Tensor) -> Tensor:
    """``BASE ** x`` modulo P, of exponents modulo R."""
    low, high = _powers()
    made = torch.empty(x.shape, dtype=torch.int64)
    for part, out in zip(x.reshape(-1).split(BLOCK), made.view(-1).split(BLOCK), strict=True):
        torch.mul(low.index_select(0, part & 0x7FFF), high.index_select(0, part >> 15), out=out).fmod_(P)
    return made


def matmul(a: Tensor, b: Tensor, modulus: int) -> Tensor:
    """A product of matrices, in halves of 16 bits whose sums float64 holds exactly."""
    left = torch.cat([a >> 16, a & 0xFFFF], -2).double()
    right = torch.cat([b >> 16, b & 0xFFFF], -1).double()
    parts = (left @ right).to(torch.int64) % modulus
    m, n = a.shape[-2], b.shape[-1]
    middle = parts[..., :m, n:] + parts[..., m:, :n]
    return (parts[..., :m, :n] * ((1 << 32) % modulus) + (middle << 16) + parts[..., m:, n:]) % modulus


def unit_lower_inverse(lower: Tensor, modulus: int) -> Tensor:
    """``(I + N) ** -1`` for strictly triangular ``N``, from blocks along the diagonal, each twice as large as before::

    [A 0]-1   [    A^-1       0  ]
    [B C]   = [-C^-1 B A^-1  C^-1]
    """
    size = lower.shape[-1]
    whole = 1 << max(0, size - 1).bit_length()
    padded = torch.nn.functional.pad(lower, (0, whole - size, 0, whole - size))
    found, half = lower.new_ones(*lower.shape[:-2], whole, 1, 1), 1
    while half < whole:
        blocks = padded.unflatten(-1, (-1, 2 * half)).unflatten(-3, (-1, 2 * half)).diagonal(0, -4, -2).movedim(-1, -3)
        before, after = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corner = matmul(matmul(after, blocks[..., half:, :half], modulus), before, modulus)
        rows = torch.cat([before, torch.zeros_like(before)], -1), torch.cat([-corner % modulus, after], -1)
        found, half = torch.cat(rows, -2), 2 * half
    return found[..., 0, :size, :size]


def solve(a: Tensor, b: Tensor, modulus: int) -> Tensor:
    """``a ** -1 b`` by Gauss and Jordan; Silent where a pivot is zero, which random numbers hardly ever make."""
    size = a.shape[-1]
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    rows = torch.cat([a.expand(*lead, *a.shape[-2:]), b.expand(*lead, *b.shape[-2:])], -1).clone()
    for i in range(size):
        pivot = rows[..., i : i + 1, i : i + 1]
        if bool((pivot == 0).any()):
            raise Silent("a pivot of zero")
        own = rows[..., i : i + 1, :] * power(pivot, modulus - 2, modulus) % modulus
        rows = (rows - rows[..., i : i + 1] * own) % modulus
        rows[..., i : i + 1, :] = own
    return rows[..., size:]
