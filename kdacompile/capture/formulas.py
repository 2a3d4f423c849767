"""Numbers that know the formula that made them, and tell who runs them what is done with them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

Formula = Any
"""A number; ("read", place, dim, turn) for a size that was asked for; (operator, formula, formula); or OPAQUE."""

OPAQUE = "opaque"
"""A number of which only its values are known, as of a loop index."""


def is_opaque(formula: Formula) -> bool:
    return formula is OPAQUE or (isinstance(formula, tuple) and formula[0] == OPAQUE)


class Listener(Protocol):
    """What a number tells (``concolic.Concolic``)."""

    def is_asking(self) -> bool:
        """True if the function's own code made this call, and not a library's."""
        ...

    def compare(self, relation: str, gap: Formula, value: float) -> None:
        """Two numbers are compared; ``gap`` is the formula of their difference and ``value`` its value."""

    def divide(self, formula: Formula, divisor: int) -> None:
        """A number is divided and rounded down, or the remainder taken."""

    def use(self, number: Size, what: str) -> None:
        """A number goes where its formula is lost."""


class Size(int):
    """A whole number and the formula that made it."""

    formula: Formula
    listener: Listener

    @staticmethod
    def of(value: int, formula: Formula, listener: Listener) -> Size:
        number = Size(value)
        number.formula, number.listener = formula, listener
        return number

    def plain(self) -> int:
        return int.__int__(self)

    def __hash__(self) -> int:
        if self.listener.is_asking():
            self.listener.use(self, "looks a size up")
        return int.__hash__(self)

    def __bool__(self) -> bool:
        self.listener.compare("ne", self.formula, self.plain())
        return self.plain() != 0

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other


def formula_of(number: Any) -> Formula:
    return number.formula if isinstance(number, Size) else number


def plain(number: Any) -> Any:
    return number.plain() if isinstance(number, Size) else number


def _combined(name: str, left: Any, right: Any, listener: Listener) -> Formula:
    """The formula of ``left name right``; constants are worked out, and what is opaque stays so.

    What is opaque remembers the product of its divisors: ("opaque", 31 * 31) for ``t // 31 // 31``.
    """
    one, other = formula_of(left), formula_of(right)
    opaque = next((each for each in (one, other) if is_opaque(each)), None)
    constant = not isinstance(one, tuple) and not isinstance(other, tuple) and opaque is None
    if name in ("floordiv", "mod"):
        divisor = abs(plain(right))
        inner = one[1] if isinstance(one, tuple) and one[0] == OPAQUE else 1
        if opaque is not None or constant:
            listener.divide(OPAQUE, inner * divisor)
            return (OPAQUE, inner * divisor) if opaque is not None else _value(name, left, right)
        listener.divide(one, divisor)
    if constant:
        return _value(name, left, right)
    return opaque if opaque is not None else (name, one, other)


def _value(name: str, left: Any, right: Any) -> Any:
    return getattr(operator, name)(plain(left), plain(right))


def _arithmetic(name: str, *, reflected: bool = False) -> Callable[[Size, Any], Any]:
    def arithmetic(self: Size, other: Any) -> Any:
        if isinstance(other, Tensor):
            return NotImplemented
        if not isinstance(other, int):
            self.listener.use(self, "computes with fractions" if isinstance(other, float) else "repeats a list")
            plain = self.plain()
            return _value(name, other, plain) if reflected else _value(name, plain, other)
        left, right = (other, self) if reflected else (self, other)
        value = _value(name, left, right)
        return Size.of(value, _combined(name, left, right, self.listener), self.listener)

    return arithmetic


def _comparison(relation: str) -> Callable[[Size, Any], Any]:
    def compare(self: Size, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        gap = _combined("sub", self, other, self.listener)
        self.listener.compare(relation, gap, self.plain() - plain(other))
        return _value(relation, self, other)

    return compare


def _lost(name: str, what: str) -> Callable[..., Any]:
    """A method of whole numbers whose result has no formula."""
    compute = getattr(int, name)

    def lost(self: Size, *others: Any) -> Any:
        self.listener.use(self, what)
        for other in others:
            if isinstance(other, Size):
                self.listener.use(other, what)
        return compute(self.plain(), *map(plain, others))

    return lost


def _negated(self: Size) -> Size:
    return Size.of(-self.plain(), _combined("sub", 0, self, self.listener), self.listener)


_LOST = {
    "computes with fractions": "__truediv__ __rtruediv__ __float__ __round__ __trunc__ __floor__ __ceil__",
    "computes powers or bits": "__pow__ __rpow__ __lshift__ __rlshift__ __rshift__ __rrshift__ __and__ __rand__ __or__ "
    "__ror__ __xor__ __rxor__ __invert__ bit_length bit_count to_bytes as_integer_ratio conjugate",
    "turns a size into text": "__str__ __repr__ __format__",
    "takes a size as a plain number": "__int__ __index__ __abs__",
}
for _what, _methods in _LOST.items():
    for _name in _methods.split():
        setattr(Size, _name, _lost(_name, _what))
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Size, f"__{_name}__", _arithmetic(_name))
    setattr(Size, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Size, f"__{_name}__", _comparison(_name))
for _name in ("real", "numerator"):
    setattr(Size, _name, property(_lost("__int__", "takes a size as a plain number")))
Size.__neg__ = _negated  # type: ignore[method-assign]
Size.__pos__ = lambda self: self  # type: ignore[method-assign]
