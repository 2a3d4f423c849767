"""What each ATen operator means over a prime field: exact sums, products, quotients and powers.

A rule gets the operator's own arguments, with ``Residues`` where it reads numbers. Most rules are the same modulo both
primes (``field.py``); exponentials lead from one to the other, and ``-inf`` is known where numbers are exponents. What
a rule cannot say raises ``Silent``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdacompile.patterns.engine import field
from kdacompile.patterns.engine.field import GONE, LN2, Numbers, P, R, Silent, unreached


@dataclass(slots=True)
class Residues:
    """A tensor's numbers modulo a prime; ``gone`` marks those that are -inf."""

    x: Tensor
    gone: Tensor | None = None
    fill: float = -math.inf
    """The largest of those that is finite, though its exponential is zero: it replaces, and nothing is added to it."""
    log: Tensor | None = None
    """Modulo R: the numbers are ``x + log(log)``, with these modulo P. A logarithm itself no field knows."""


@dataclass(slots=True)
class Field:
    """One of the two fields, with the literals read so far."""

    modulus: int
    numbers: Numbers
    gone: float = GONE[torch.float64]
    """From here down the exponential of a number is zero in the region's widest dtype."""
    lowest: float = unreached(torch.float64)
    """From here down no number of the region is told from -inf, whatever is added to it."""

    def of(self, item: Any, *, replaces: bool = False, logs: bool = False) -> Residues:
        """An operand: a tensor's residues, or a literal; one that ``replaces`` elements may make them vanish. Only who
        asks for ``logs`` may get a logarithm.
        """
        if isinstance(item, Residues):
            if item.log is not None and not logs:
                raise Silent(A_LOGARITHM)
            return item
        if isinstance(item, (bool, int, float)):
            if self.modulus == R and (item == -math.inf or (replaces and item <= self.gone)):
                zero = torch.zeros((), dtype=torch.int64)
                return Residues(zero, zero == 0, float(item))
            return Residues(torch.tensor(self.numbers.read(float(item), self.modulus)))
        raise Silent(f"a {type(item).__name__} where a number is needed")

    def fills(self, a: Residues) -> bool:
        """Whether numbers that hide are such as a model's numbers may reach."""
        return a.fill > self.lowest

    def constant(self, data: Tensor) -> Residues:
        gone = data <= self.gone
        if not data.is_floating_point() or self.modulus != R or not bool(gone.any()):
            return Residues(self.numbers.tensor(data, self.modulus))
        fill = float(data[gone].max())
        return Residues(self.numbers.tensor(torch.where(gone, 0.0, data), self.modulus), gone, fill)


Rule = Callable[..., "Residues | list[Residues]"]


DEGREE = 1 << 20
"""The largest power that is read."""

A_LOGARITHM = "a logarithm in something other than a sum"


def _gone(f: Field, *operands: Residues) -> Tensor | None:
    """Where a sum is -inf, because a term is."""
    if any(map(f.fills, operands)):
        raise Silent("a finite number that hides is added")
    marks = [operand.gone for operand in operands if operand.gone is not None]
    if not marks:
        return None
    shape = torch.broadcast_shapes(*(operand.x.shape for operand in operands))
    found = marks[0]
    for mark in marks[1:]:
        found = found | mark
    return found.expand(shape)


def _finite(*operands: Residues) -> None:
    if any(operand.gone is not None for operand in operands):
        raise Silent("-inf in something other than a sum")
    if any(operand.log is not None for operand in operands):
        raise Silent(A_LOGARITHM)


# -- sums and products ----------------------------------------------------------------------------------------------


def add(f: Field, a: Any, b: Any, *, alpha: float = 1) -> Residues:
    a, b = f.of(a, logs=True), f.of(b, logs=True)
    if alpha != 1:
        b = neg(f, b) if alpha == -1 else mul(f, b, alpha)
    logs = [each.log for each in (a, b) if each.log is not None]
    log = logs[0] * logs[1] % P if len(logs) == 2 else logs[0] if logs else None
    return Residues((a.x + b.x).fmod_(f.modulus), _gone(f, a, b), log=log)


def sub(f: Field, a: Any, b: Any, *, alpha: float = 1) -> Residues:
    b = f.of(b, logs=True)
    if b.gone is not None:
        _finite(b)
    return add(f, a, b, alpha=-alpha)


def rsub(f: Field, a: Any, b: Any, alpha: float = 1) -> Residues:
    return sub(f, b, a, alpha=alpha)


def neg(f: Field, a: Any) -> Residues:
    a = f.of(a, logs=True)
    if a.log is None:
        return Residues((f.modulus - a.x).fmod_(f.modulus)) if a.gone is None else mul(f, a, -1)
    if a.gone is not None:
        _finite(a)
    return Residues(-a.x % f.modulus, log=field.inverse(a.log, P))


def mul(f: Field, a: Any, b: Any) -> Residues:
    gone = None
    for one, other in ((a, b), (b, a)):
        if isinstance(other, (int, float)) and other > 0 and isinstance(one, Residues) and not f.fills(one):
            _vanishes(f, one, other)
            gone = one.gone
    a, b = f.of(a), f.of(b)
    if gone is None:
        _finite(a, b)
    return Residues((a.x * b.x).fmod_(f.modulus), gone)  # neither is negative: nobody has to look at signs


def div(f: Field, a: Any, b: Any, *, rounding_mode: str | None = None) -> Residues:
    if rounding_mode is not None:
        raise Silent("a division that rounds")
    a = f.of(a)
    if isinstance(b, (int, float)) and b > 0 and not f.fills(a):
        _vanishes(f, a, 1 / b)
        return Residues(a.x * pow(f.numbers.read(float(b), f.modulus), -1, f.modulus) % f.modulus, a.gone)
    return _over(f, a, f.of(b))


def _over(f: Field, a: Residues, b: Residues) -> Residues:
    _finite(a, b)
    return Residues(a.x * field.inverse(b.x, f.modulus) % f.modulus)


def reciprocal(f: Field, a: Any) -> Residues:
    return _over(f, f.of(1), f.of(a))


def square(f: Field, a: Any) -> Residues:
    return mul(f, a, a)


def addcmul(f: Field, a: Any, b: Any, c: Any, *, value: float = 1) -> Residues:
    return add(f, a, mul(f, b, c), alpha=value)


def addcdiv(f: Field, a: Any, b: Any, c: Any, *, value: float = 1) -> Residues:
    return add(f, a, div(f, b, c), alpha=value)


def lerp(f: Field, start: Any, end: Any, weight: Any) -> Residues:
    return add(f, start, mul(f, weight, sub(f, end, start)))


def pow_(f: Field, base: Any, exponent: Any) -> Residues:
    """``x ** n`` for whole n. What is raised to data is ``exponential``."""
    if isinstance(exponent, (int, float)):
        if exponent != int(exponent):
            raise Silent(f"a power of {exponent:g}")
        _low(abs(exponent))
        base = f.of(base)
        _finite(base)
        return Residues(field.power(base.x, int(exponent), f.modulus))
    if isinstance(exponent, Tensor) and bool((exponent == exponent.trunc()).all()):
        _low(float(exponent.double().abs().max()) if exponent.numel() else 0)
        base = f.of(base)
        _finite(base)
        return Residues(powers(base.x, exponent.to(torch.int64), f.modulus))
    raise Silent("powers that a tensor gives")


def _low(degree: float) -> None:
    """No power that a random number would mistake for another: ``x ** P == x`` modulo P."""
    if degree > DEGREE:
        raise Silent(f"a power of degree {degree:g}")


def powers(base: Tensor, exponent: Tensor, modulus: int) -> Tensor:
    """Element by element, bit by bit; what is common to all of them below zero is divided by."""
    least = int(exponent.min()) if exponent.numel() else 0
    if least < 0:
        rest = powers(base, exponent - least, modulus)
        return rest * field.power(base, least, modulus) % modulus
    result = torch.ones(torch.broadcast_shapes(base.shape, exponent.shape), dtype=torch.int64)
    while bool(exponent.any()):
        result = torch.where(exponent & 1 == 1, result * base % modulus, result)
        base, exponent = base * base % modulus, exponent >> 1
    return result


def raised_to(f: Field, base: float | Tensor, x: Residues) -> Residues:
    """``c ** x`` modulo P, of exponents modulo R."""
    data = torch.as_tensor(base, dtype=torch.float64)
    x = f.of(x)
    if not bool((data > 0).all()):
        raise Silent("a power of a number that is not positive")
    _vanishes(f, x, float(data.log().min()))
    rate = f.numbers.tensor(data.log(), R)
    return exponential(f, Residues(x.x * rate % R, x.gone))


def _vanishes(f: Field, x: Residues, rate: float) -> None:
    """What hides as an exponent of e does so times ``rate``."""
    if x.gone is not None and not x.fill * rate <= f.gone:
        raise Silent(f"a number that hides, times {rate:g} in an exponent")


def exponential(f: Field, x: Any, rate: float | int = 1) -> Residues:
    """``exp(rate x)`` modulo P, of exponents modulo R. ``rate`` is modulo R."""
    x = f.of(x, logs=rate == 1)
    made = field.exp(x.x if rate == 1 else x.x * rate % R)
    made = made if x.log is None else made * x.log % P
    return Residues(made if x.gone is None else torch.where(x.gone, 0, made))


def exponential2(f: Field, x: Any) -> Residues:
    _vanishes(f, f.of(x), math.log(2.0))
    return exponential(f, x, LN2)


def softmax(f: Field, x: Any, dim: int, *_: Any) -> Residues:
    """Modulo P, of exponents modulo R."""
    made, total = _shares(f, x, dim)
    return Residues(made * field.inverse(total, P) % P)


def _shares(f: Field, x: Any, dim: Any, *, keepdim: bool = True) -> tuple[Tensor, Tensor]:
    """``exp(x)`` and its sum, modulo P; none of those compared may be hidden by a number that others could reach."""
    x = f.of(x, logs=True)
    if f.fills(x):
        raise Silent("a finite number that hides is compared with others")
    made = exponential(f, x).x
    return made, made.sum(dim, keepdim=keepdim) % P


def logsumexp(f: Field, x: Any, dim: Any, keepdim: bool = False) -> Residues:
    _exponents(f)
    total = _shares(f, x, dim, keepdim=keepdim)[1]
    return Residues(torch.zeros_like(total), log=total)


def log_softmax(f: Field, x: Any, dim: int, *_: Any) -> Residues:
    _exponents(f)
    total = field.inverse(_shares(f, x, dim)[1], P)
    x = f.of(x)
    return Residues(x.x, x.gone, x.fill, total.expand(x.x.shape))


def _exponents(f: Field) -> None:
    if f.modulus != R:
        raise Silent("a logarithm that does not end in an exponential")


def largest(f: Field, x: Any, dim: Any = None, keepdim: bool = False) -> Residues:
    """The largest element is some number, of these elements its own: where it matters which, nothing fits."""
    if not (dim is None or isinstance(dim, (int, list, tuple))):
        raise Silent("the larger of two")
    x = f.of(x).x
    places = torch.arange(1, x.numel() + 1).view(x.shape)
    seed = int((x * (places * 2654435761 % 65521) % f.modulus).sum()) % (1 << 31)
    dims = sorted(each % max(1, x.dim()) for each in ([dim] if isinstance(dim, int) else list(dim or range(x.dim()))))
    seed = (seed * 31 + sum(1 << each for each in dims)) % (1 << 31)
    shape = x.sum(dims, keepdim=keepdim).shape
    return Residues(field.random(shape, f.modulus, torch.Generator().manual_seed(seed)))


def largest_and_where(f: Field, x: Any, dim: Any = None, keepdim: bool = False) -> list[Residues]:
    """``max``; where the largest is no field knows."""
    return [largest(f, x, dim, keepdim)]


def sum_(f: Field, a: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Residues:
    a = f.of(a)
    _finite(a)
    dims = [dim] if isinstance(dim, int) else list(dim or range(a.x.dim()))
    return Residues(a.x.sum(dims, keepdim=keepdim) % f.modulus)


def prod(f: Field, a: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Residues:
    a = f.of(a)
    _finite(a)
    x = a.x.reshape(-1) if dim is None else a.x.movedim(dim, -1)
    if not x.shape[-1]:
        x = x.new_ones(*x.shape[:-1], 1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = torch.cat([x[..., :half] * x[..., half : 2 * half] % f.modulus, x[..., 2 * half :]], -1)
    return Residues(x[..., 0] if dim is None or not keepdim else x.movedim(-1, dim))


def cumsum(f: Field, a: Any, dim: int, **_: Any) -> Residues:
    a = f.of(a)
    if f.fills(a):
        raise Silent("a finite number that hides is added")
    gone = None if a.gone is None else a.gone.expand(a.x.shape).int().cumsum(dim) > 0
    return Residues(a.x.cumsum(dim) % f.modulus, gone)


def cumprod(f: Field, a: Any, dim: int, **_: Any) -> Residues:
    a = f.of(a)
    _finite(a)
    x, reach = a.x.movedim(dim, -1), 1
    while reach < x.shape[-1]:
        x = torch.cat([x[..., :reach], x[..., reach:] * x[..., :-reach] % f.modulus], -1)
        reach *= 2
    return Residues(x.movedim(-1, dim))


def matmul(f: Field, a: Any, b: Any) -> Residues:
    """Of matrices, or of vectors: a row on the left, a column on the right."""
    a, b = f.of(a), f.of(b)
    _finite(a, b)
    left = a.x[None] if a.x.dim() == 1 else a.x
    right = b.x[:, None] if b.x.dim() == 1 else b.x
    made = field.matmul(left, right, f.modulus)
    made = made[..., 0] if b.x.dim() == 1 else made
    return Residues(made[0] if a.x.dim() == 1 else made)


def addmm(f: Field, a: Any, b: Any, c: Any, *, beta: float = 1, alpha: float = 1) -> Residues:
    product = matmul(f, b, c)
    return add(f, a if beta == 1 else mul(f, a, beta), product, alpha=alpha)


# -- selections and placements --------------------------------------------------------------------------------------


def _both(f: Field, a: Any, b: Any, pick: Callable[[Tensor, Tensor], Tensor]) -> Residues:
    """Some elements of one tensor and some of another."""
    a, b = f.of(a, replaces=True), f.of(b, replaces=True)
    gone = None
    if a.gone is not None or b.gone is not None:
        gone = pick(*(torch.zeros((), dtype=torch.bool) if t.gone is None else t.gone for t in (a, b)))
    return Residues(pick(a.x, b.x), gone, max(a.fill, b.fill))


def where(f: Field, chosen: Tensor, a: Any, b: Any) -> Residues:
    return _both(f, a, b, lambda one, other: torch.where(chosen, one, other))


def masked_fill(f: Field, a: Any, mask: Tensor, value: Any) -> Residues:
    return _both(f, a, value, lambda one, other: torch.where(mask, other, one))


def tril(f: Field, a: Any, diagonal: int = 0) -> Residues:
    return _triangle(f.of(a), torch.tril, diagonal)


def triu(f: Field, a: Any, diagonal: int = 0) -> Residues:
    return _triangle(f.of(a), torch.triu, diagonal)


def _triangle(a: Residues, part: Callable[[Tensor, int], Tensor], diagonal: int) -> Residues:
    gone = None if a.gone is None else part(a.gone.expand(a.x.shape), diagonal)
    return Residues(part(a.x, diagonal), gone, a.fill)


def constant_pad_nd(f: Field, a: Any, pad: Sequence[int], value: float = 0) -> Residues:
    a, border = f.of(a), f.of(value, replaces=True)
    x = torch.nn.functional.pad(a.x, list(pad), value=int(border.x))
    if a.gone is None and border.gone is None:
        return Residues(x)
    inside = torch.zeros_like(a.x, dtype=torch.bool) if a.gone is None else a.gone.expand(a.x.shape)
    gone = torch.nn.functional.pad(inside, list(pad), value=border.gone is not None)
    return Residues(x, gone, max(a.fill, border.fill))


def scatter(f: Field, a: Any, dim: int, index: Tensor, source: Any, **options: Any) -> Residues:
    if options:
        raise Silent("a scatter that computes")
    if isinstance(source, Residues):
        return _both(f, a, source, lambda one, other: one.scatter(dim, index, other))
    filler = f.of(source, replaces=True)
    return _both(f, a, filler, lambda one, other: one.scatter(dim, index, other.expand(index.shape)))


# -- systems of equations -------------------------------------------------------------------------------------------


def solve_triangular(
    f: Field, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Residues:
    _finite(a, b)
    matrix, right = (a.x, b.x) if left else (a.x.mT, b.x.mT)
    if upper == left:  # turned round, upper is lower
        matrix, right = matrix.flip(-2, -1), right.flip(-2)
    found = _lower_solve(matrix, right, f.modulus, unit=unitriangular)
    if upper == left:
        found = found.flip(-2)
    return Residues(found if left else found.mT)


def _lower_solve(a: Tensor, b: Tensor, modulus: int, *, unit: bool) -> Tensor:
    strict = a.tril(-1)
    if not unit:
        scale = field.inverse(a.diagonal(0, -2, -1), modulus)[..., None]
        strict, b = strict * scale % modulus, b * scale % modulus
    return field.matmul(field.unit_lower_inverse(strict, modulus), b, modulus)


def solve_ex(f: Field, a: Any, b: Any, *, left: bool = True, **_: Any) -> list[Residues]:
    _finite(a, b)
    vector = b.x.dim() == 1 or (b.x.dim() == a.x.dim() - 1 and b.x.shape == a.x.shape[:-1])
    right = b.x[..., None] if vector else b.x
    found = field.solve(a.x, right, f.modulus) if left else field.solve(a.x.mT, right.mT, f.modulus).mT
    return [Residues(found[..., 0] if vector else found)]


def inv_ex(f: Field, a: Any, **_: Any) -> list[Residues]:
    _finite(a)
    return [Residues(field.solve(a.x, torch.eye(a.x.shape[-1], dtype=torch.int64).expand_as(a.x), f.modulus))]


def lu_factor_ex(f: Field, a: Any, **_: Any) -> list[Residues]:
    """The matrix itself: nothing but ``lu_solve`` may read the factors, whose pivots depend on sizes."""
    return [a]


def lu_solve(f: Field, a: Any, pivots: Any, b: Any, *, left: bool = True, adjoint: bool = False) -> Residues:
    matrix = Residues(a.x.mT) if adjoint else a
    return solve_ex(f, matrix, b, left=left)[0]
