"""What a function's own instructions do with a value that one of them leaves on the stack."""

from __future__ import annotations

import dis
import types

_PUSHES = frozenset(
    "LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_BORROW LOAD_FAST_LOAD_FAST LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_CONST "
    "LOAD_SMALL_INT LOAD_GLOBAL LOAD_DEREF PUSH_NULL".split()
)
"""One value or two on top of the stack."""
_ON_TOP = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
"""What replaces the top of the stack."""
_NOTHING = frozenset("CACHE NOP RESUME EXTENDED_ARG KW_NAMES PRECALL".split())
_CALLS = frozenset("CALL CALL_KW CALL_METHOD CALL_FUNCTION CALL_FUNCTION_KW".split())


def goes_straight(code: types.CodeType, made: int, taken: int) -> bool:
    """Whether what the instruction at ``made`` leaves on the stack lies there until the call at ``taken`` takes it.

    False where instructions between the two could look at it, keep it, or go elsewhere, and where that is not known.
    Offsets are those of ``frame.f_lasti``.
    """
    above = 0
    for instruction in dis.get_instructions(code):
        if not made < instruction.offset <= taken:
            continue
        name = instruction.opname
        if instruction.offset == taken:
            return name in _CALLS
        if name in _PUSHES:
            above += 1
        elif name not in _NOTHING and (name not in _ON_TOP or above == 0):
            return False
    return False
