"""Why a loop was unrolled where it was recognised all the same: what the report says beside such a match."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from kdacompile.report import source

_left: WeakSet[types.CodeType] = WeakSet()

_reasons: WeakKeyDictionary[types.CodeType, str] = WeakKeyDictionary()


def note(fn: object, reason: str) -> None:
    """Remember why calls of this function were left to Dynamo."""
    if isinstance(fn, types.FunctionType):
        _reasons[fn.__code__] = reason


def leave(fn: Callable[..., Any], reason: str) -> None:
    """Leave calls of this function to Dynamo from here on: looking at one has failed."""
    note(fn, reason)
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if isinstance(code, types.CodeType):
        _left.add(code)


def is_left(fn: Callable[..., Any]) -> bool:
    return bool(_left) and getattr(inspect.unwrap(fn), "__code__", None) in _left


def object_argument(name: str) -> str:
    """The reason for an argument of a function, ``self`` for one, that is an object."""
    return f"{name} is neither a tensor nor a plain value, and may change from call to call"


def forget(fn: object) -> None:
    if isinstance(fn, types.FunctionType):
        _reasons.pop(fn.__code__, None)


def reason(place: str) -> str:
    """Why the function around a loop ("file:line") was not replaced."""
    file, _, line = place.rpartition(":")
    loop = source.at(file, int(line))
    known = next((told for code, told in list(_reasons.items()) if _covers(code, file, int(line))), None)
    name = loop.function or "the module" if loop is not None else "the function"
    if known is not None:
        return f"{name}: {known}"
    if loop is not None and loop.method:
        return f"{name}: {object_argument('self')}"
    return f"{name}: it takes fewer than three arguments"


def _covers(code: types.CodeType, file: str, line: int) -> bool:
    return code.co_filename == file and any(line == at for _, _, at in code.co_lines())
