"""Looking at a function's variables as its frames end.

By ``sys.monitoring``, which tells of the function's own code alone; before Python 3.12, or where others hold its tools,
by a trace function, which is told of every call that anything makes.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

_TOOLS = (3, 4)
"""Ids of ``sys.monitoring`` that it leaves to whoever wants one."""


class FrameEnds:
    """A context in which ``look`` is given every frame of some code as it ends, or yields; it may be entered again
    within itself.
    """

    def __init__(self, look: Callable[[types.FrameType], None]) -> None:
        self._look = look
        self.codes: dict[int, types.CodeType] = {}
        """What is looked at, by id."""
        self._monitoring: Any = getattr(sys, "monitoring", None)
        self._tool: int | None = None
        self._before: Any = None
        self._depth = 0

    def watch(self, code: types.CodeType) -> None:
        """Code to be looked at, from now on if the context has been entered."""
        self.codes[id(code)] = code
        if self._tool is not None:
            self._ask(code, self._ends)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._tool = self._free_tool()
        if self._tool is None:
            self._before = sys.gettrace()
            sys.settrace(self._entered)
            return
        self._listen(self._ended)
        for code in self.codes.values():
            self._ask(code, self._ends)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        if self._tool is None:
            sys.settrace(self._before)
            return
        for code in self.codes.values():
            self._ask(code, 0)
        self._listen(None)
        self._monitoring.free_tool_id(self._tool)
        self._tool = None

    # -- by sys.monitoring

    def _free_tool(self) -> int | None:
        if self._monitoring is None:
            return None
        tool = next((tool for tool in _TOOLS if self._monitoring.get_tool(tool) is None), None)
        if tool is not None:
            self._monitoring.use_tool_id(tool, "kdacompile")
        return tool

    @property
    def _ends(self) -> int:
        events = self._monitoring.events
        return events.PY_RETURN | events.PY_YIELD

    def _listen(self, callback: Callable[..., None] | None) -> None:
        """For all events; an exception is told of in every frame that it ends."""
        events = self._monitoring.events
        for event in (events.PY_RETURN, events.PY_YIELD, events.PY_UNWIND):
            self._monitoring.register_callback(self._tool, event, callback)
        self._monitoring.set_events(self._tool, 0 if callback is None else events.PY_UNWIND)

    def _ask(self, code: types.CodeType, events: int) -> None:
        self._monitoring.set_local_events(self._tool, code, events)

    def _ended(self, code: types.CodeType, *_: object) -> None:
        if id(code) in self.codes:
            self._look(sys._getframe(1))

    # -- by a trace function

    def _entered(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if id(frame.f_code) not in self.codes:
            return None
        frame.f_trace_lines = False
        return self._left

    def _left(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._look(frame)
        return self._left
