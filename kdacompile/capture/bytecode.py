"""What a function's own instructions do with a value that one of them leaves on the stack.

Offsets are those of ``frame.f_lasti``. What cannot be followed counts as anything.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

_PUSHES = frozenset(
    "LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_CONST "
    "LOAD_SMALL_INT LOAD_GLOBAL LOAD_DEREF PUSH_NULL".split()
)
_ON_TOP = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
"""What replaces the top of the stack."""
_NOTHING = frozenset("CACHE NOP RESUME EXTENDED_ARG KW_NAMES PRECALL".split())
_NAMED = frozenset(("CALL_KW", "CALL_FUNCTION_KW"))
"""Calls with the names of arguments on top."""
_CALLS = _NAMED | frozenset("CALL CALL_METHOD CALL_FUNCTION".split())
_LOADS = frozenset("LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW".split())
_PAIRS = frozenset(("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"))
_ON_WHAT_THEY_TAKE = ("BINARY", "BUILD", "COMPARE", "UNARY", "CALL")
"""Beginnings of what leaves one value in the place of those on top, and the others where they are."""
_FIXED = frozenset(("LOAD_GLOBAL", *_ON_TOP))
"""What leaves the same function wherever a function's identity is the same, or a method of a value."""


def taker(code: types.CodeType, made: int, above: int = 0) -> int | None:
    """The call that takes for an argument what the instruction at ``made`` leaves on the stack, below ``above`` values.

    None where instructions before that could look at it, keep it, or go elsewhere.
    """
    for at in dis.get_instructions(code):
        if at.offset <= made or at.opname in _NOTHING:
            continue
        if at.opname in _CALLS:
            return at.offset if above - (at.opname in _NAMED) < (at.arg or 0) else None
        if at.opname not in _PUSHES and (at.opname not in _ON_TOP or above == 0):
            return None
        above += dis.stack_effect(at.opcode, at.arg)
    return None


def takers(code: types.CodeType, made: int) -> frozenset[int] | None:
    """The calls that take it from the variable it is put into: each a call of a global function or of a method.

    None where it is put into none, into one that holds anything else as well, or where one of its readers is no call.
    """
    following = (at for at in dis.get_instructions(code) if at.offset > made and at.opname not in _NOTHING)
    stored = next(following, None)
    if stored is None or stored.opname != "STORE_FAST":
        return None
    name = stored.argval
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    if name in code.co_varnames[:arguments]:
        return None
    found = [*_readers(code, name, stored.offset)]
    calls = frozenset(offset for offset in found if offset is not None)
    return calls if None not in found else None


def _readers(code: types.CodeType, name: str, stored: int) -> Iterator[int | None]:
    """The calls that take a variable; None for whatever else is done with it, but at ``stored``."""
    fixed = frozenset(_calls_of_fixed_functions(code))
    for at in dis.get_instructions(code):
        names: tuple[Any, ...] = at.argval if isinstance(at.argval, tuple) else (at.argval,)
        if "FAST" not in at.opname or name not in names or at.offset == stored:
            continue
        call = None
        if at.opname in _LOADS or (at.opname in _PAIRS and names[0] != names[1]):
            call = taker(code, at.offset, above=int(at.opname in _PAIRS and names[0] == name))
        yield call if call in fixed else None


def _calls_of_fixed_functions(code: types.CodeType) -> Iterator[int]:
    stack: list[str] = []
    for at in dis.get_instructions(code):
        if at.opname in _CALLS:
            count = (at.arg or 0) + (at.opname in _NAMED)
            below = stack[-count - 2 : len(stack) - count]
            if not _FIXED.isdisjoint(below[-1:] if at.opname.startswith("CALL_FUNCTION") else below):
                yield at.offset
        if at.opname in _NOTHING:
            continue
        effect = dis.stack_effect(at.opcode, at.arg, jump=False)
        if at.opname in _ON_TOP and stack:
            stack[-1] = at.opname
            stack += [""] * effect
        elif at.opname in _PUSHES:
            stack += [at.opname if at.opname == "LOAD_GLOBAL" else ""] * effect
        else:
            left = min(len(stack), len(stack) + effect) - 1 if at.opname.startswith(_ON_WHAT_THEY_TAKE) else 0
            stack = [*stack[: max(0, left)], *[""] * (len(stack) + effect - max(0, left))]
