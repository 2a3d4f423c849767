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


class CapacityError(LoweringError, ValueError):
    """A stage keeps more on chip than its core has. Says which tile is the largest and how many bytes are too many."""

    def __init__(
        self, stage: str, memory: str, buffer: str, needed: int, available: int, tiles: tuple[tuple[str, int], ...]
    ) -> None:
        held = ", ".join(f"{name} {size:,}" for name, size in tiles)
        super().__init__(
            f"{stage} needs {needed:,} bytes of {memory} and a core has {available:,}: {needed - available:,} over. "
            f"The largest tile is {buffer}; together: {held}. A smaller chunk (C) or value tile (BV) helps"
        )
        self.stage, self.memory, self.buffer = stage, memory, buffer
        self.needed, self.available, self.over = needed, available, needed - available
