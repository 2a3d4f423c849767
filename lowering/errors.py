"""Typed errors of the lowering layer: a malformed tile program, and arguments an entry point cannot take."""

from __future__ import annotations


class LoweringError(Exception):
    """Base of every error raised by ``kdacompile.lowering``."""


class TileProgramError(LoweringError, ValueError):
    """A tile program is malformed. ``where`` is the text of the offending op, port or carry."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{message}: {where}" if where else message)
        self.where = where


class TileShapeError(TileProgramError):
    """Operand shapes do not fit the op."""


class TileDtypeError(TileProgramError):
    """Operand dtypes do not fit the op; tiles never change dtype without a ``cast``."""


class SingleAssignmentError(TileProgramError):
    """A value is defined twice, or an output port is stored twice."""


class UndefinedValueError(TileProgramError):
    """A value is read before it is written, or belongs to another program."""


class CarryError(TileProgramError):
    """The carry's initial value, step and combine do not agree in type, or one of them is missing."""


class ArgumentError(LoweringError, ValueError):
    """An entry point was called with shapes, dtypes or options that are outside its contract."""


class VerificationError(LoweringError, AssertionError):
    """An implementation of a program or stage failed ``verify``."""
