"""The operand table of an op: what the dataclass of its calls says about its fields.

Every tensor of a call is a field ``name: Annotated[Tensor, Operand(...)]`` (``Tensor | None`` where it may be left
out), every option a keyword-only field. The schema of the op, the checks of its arguments, its fakes and its autograd
come from this one declaration, see :mod:`kdacompile.ops.signature`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
FLOAT_NAMES = "bfloat16, float16, float32 or float64"
_ANY_FLOAT = tuple(x for x in vars(torch).values() if isinstance(x, torch.dtype) and x.is_floating_point)

Result = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what an op returns."""


class Kind(Enum):
    """The dtypes that an operand may have, and what a message calls them."""

    FLOAT = FLOAT_NAMES, FLOATS
    ANY_FLOAT = "floating point", _ANY_FLOAT
    MASK = f"bool, {FLOAT_NAMES}", (torch.bool, *FLOATS)
    INDEX = "int32 or int64", (torch.int32, torch.int64)

    def __init__(self, described: str, dtypes: tuple[torch.dtype, ...]) -> None:
        self.described, self.dtypes = described, frozenset(dtypes)


@dataclass(frozen=True)
class Operand:
    """One tensor of a call.

    ``layout``: its dimensions as a reader is told them, ``"[B, T, H, K]"``, or a function of the call that says so; a
    name stands for the same size in every operand. ``broadcast``: all dimensions but the last may be 1 instead.
    ``host``: it may lie on the CPU, wherever the others are. ``name`` and ``optional`` are the field's.
    """

    layout: str | Callable[[Any], str]
    kind: Kind = Kind.FLOAT
    broadcast: bool = False
    host: bool = False
    name: str = ""
    optional: bool = False

    @property
    def differentiable(self) -> bool:
        return self.kind is not Kind.INDEX

    def text(self, call: Any) -> str:
        """The layout in a call."""
        return self.layout if isinstance(self.layout, str) else self.layout(call)


@cache
def dimensions(layout: str) -> tuple[str, ...]:
    """The names in the brackets of a layout."""
    found = re.search(r"\[(.*?)\]", layout)
    assert found is not None, layout
    return tuple(found.group(1).split(", "))


def _hints(call: type[Any]) -> dict[str, Any]:
    """Types of a call's fields, each read where its class is written, and of these alone: Python 3.10 does not take the
    marker ``KW_ONLY`` for a type.
    """
    found: dict[str, Any] = {}
    for kind in reversed(call.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        own = {field.name: field.type for field in dataclasses.fields(kind) if field.name not in found}
        fields = type(kind.__name__, (), {"__annotations__": own, "__module__": kind.__module__})
        found |= get_type_hints(fields, include_extras=True)
    return found


@cache
def operands(call: type[Any]) -> tuple[Operand, ...]:
    """The tensors of a call, in the order of the op's arguments."""
    hints = _hints(call)
    declared: list[Operand] = []
    for field in dataclasses.fields(call):
        hint = hints[field.name]
        notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Operand)]
        optional = NoneType in get_args(get_args(hint)[0]) if notes else False
        declared += [replace(note, name=field.name, optional=optional) for note in notes]
    return tuple(declared)


OPTION_TYPES: dict[object, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType?",
}
"""How a schema writes the type of an option. A keyword-only field of another type is no option of the op."""


@cache
def options(call: type[Any]) -> dict[str, str]:
    """The options of a call by name, with their types as a schema writes them."""
    hints = _hints(call)
    named = {field.name: OPTION_TYPES.get(hints[field.name]) for field in dataclasses.fields(call) if field.kw_only}
    return {name: text for name, text in named.items() if text is not None}


def tensors(call: Any) -> tuple[Tensor | None, ...]:
    """The operands of a call, in the order of the op's arguments."""
    return tuple(getattr(call, operand.name) for operand in operands(type(call)))


def given(call: Any) -> dict[str, Tensor]:
    """The operands of a call that are there, by name."""
    return {operand.name: x for operand, x in zip(operands(type(call)), tensors(call), strict=True) if x is not None}
