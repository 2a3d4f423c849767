"""Dynamo's internals: the compiled function itself, which ``capture`` may replace as it may the functions it calls.

Dynamo has no call to look at there: it steps through the function's instructions. Before the first of them, something
may be put in the place of all.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from kdacompile.compat import region
from kdacompile.compat.dynamo import CallSite

_NO_PLAIN_FUNCTION = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Root(CallSite):
    """The outermost frame of a region, as if its function was called there with what it was given."""

    def __init__(self, tx: Any) -> None:
        super().__init__(None, tx, [], {})
        code: types.CodeType = tx.f_code
        self.function = types.FunctionType(code, tx.f_globals, code.co_name, None, tx.closure)

    def read_arguments(self) -> dict[str, Any]:
        """Have the arguments in ``args`` and ``kwargs``; returns what they are, by name."""
        code: types.CodeType = self.tx.f_code
        named = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        starred = list(code.co_varnames[len(named) :])
        values = {name: self.tx.f_locals[name] for name in named}
        self.args = [self._argument(name) for name in named[: code.co_argcount]]
        self.kwargs = {name: self._argument(name) for name in named[code.co_argcount :]}
        if code.co_flags & inspect.CO_VARARGS:
            name = starred.pop(0)
            self.args += self._argument(name).realize().items
            values |= {f"{name}.{place}": item for place, item in enumerate(self.tx.f_locals[name])}
        if code.co_flags & inspect.CO_VARKEYWORDS:
            self._argument(starred[0]).realize()  # which guards that there are none
            values |= {starred[0]: self.tx.f_locals[starred[0]]} if self.tx.f_locals[starred[0]] else {}
        return values

    def _argument(self, name: str) -> Any:
        """Dynamo's variable for an argument, which stands in a cell where functions within this one read it."""
        variable = self.tx.symbolic_locals[name]
        return self.tx.output.side_effects.load_cell(variable) if name in self.tx.cellvars() else variable

    def widen_region(self, cause: object, *, holds: bool = False) -> None:
        super().widen_region(self.tx.f_code, holds=holds)  # the function is another object in every attempt

    def guard_cell(self, fn: types.FunctionType, index: int) -> bool:
        from torch._dynamo.source import LocalSource

        if fn is not self.function:
            return False
        source = LocalSource(fn.__code__.co_freevars[index], is_derefed_cell_contents=True)
        self._build(self.tx.closure[index].cell_contents, source)
        return True

    def guard_defaults(self, fn: types.FunctionType) -> None:
        """Nothing: all arguments are given, and guarded."""


Consult = Callable[[Root], Any]


def on_compiled_function(consult: Consult) -> None:
    """Have ``consult`` see each function that is compiled itself before Dynamo looks at its first instruction; what it
    returns, unless None, is what the function returns. Installed once a process.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    usual = InstructionTranslator.run

    @functools.wraps(usual)
    def run(self: Any) -> None:
        if _is_plain_function(self.f_code) and _last_return(self) is not None:
            self.step = functools.partial(_begin, self, consult)  # Dynamo looks it up for each instruction
        usual(self)

    InstructionTranslator.run = run  # type: ignore[method-assign]


def _is_plain_function(code: types.CodeType) -> bool:
    """True for a function of the user's, not what is left of one behind a graph break."""
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_flags & _NO_PLAIN_FUNCTION
    return bool(is_function) and not code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


def _last_return(tx: Any) -> int | None:
    return max((place for place, each in enumerate(tx.instructions) if each.opname == "RETURN_VALUE"), default=None)


def _begin(tx: Any, consult: Consult) -> bool:
    """Dynamo's first steps, which make cells of variables, and then the return of what ``consult`` has found, if it has
    found something.
    """
    if any(each.opname == "RESUME" for each in tx.instructions[tx.instruction_pointer :]):
        return type(tx).step(tx)
    del tx.step
    tx.starts_line(tx.f_code.co_firstlineno)  # until Python 3.10 no instruction stands there
    with region.careful():
        found = consult(Root(tx))
    if found is not None:
        tx.push(found)
        tx.instruction_pointer = _last_return(tx)
    return tx.step()
