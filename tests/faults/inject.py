"""Raising at the boundaries of our functions, told by the profiler's hook: none of them is changed for it."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import kdacompile

ROOT = Path(str(kdacompile.__file__)).parent.parent

WITHIN = ("patterns/", "kdacompile/graph/", "kdacompile/capture/", "kdacompile/rewrite/")
"""Where errors are raised: everything that recognises, proves, lifts and rewrites."""

BOUNDARY = {
    "kdacompile/capture/hook.py": ("consult", "consult_library", "_contained", "install"),
    "kdacompile/capture/widened.py": ("given_up_where_refused", "give_up"),
    "kdacompile/rewrite/compiler_pass.py": ("run",),
    "kdacompile/rewrite/held.py": ("Guarded.__call__",),
}
"""Functions that make the boundary, or are called outside of it to get back to plain torch."""

Moment = Literal["entry", "exit"]


class Injected(Exception):
    """Caught by nobody who names what he expects."""


@dataclass(frozen=True, order=True)
class Place:
    """A function: its file, from the root of the repository, and its name."""

    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}"


@dataclass(frozen=True)
class Fault:
    """An error where a function is entered for the first time, or left for the last one of its ``calls``."""

    place: Place
    moment: Moment
    calls: int

    @property
    def number(self) -> int:
        return 1 if self.moment == "entry" else self.calls

    def __str__(self) -> str:
        return f"{self.moment} {self.number} of {self.place}"


@functools.cache  # asked for every call that Python makes
def place_of(code: CodeType) -> Place | None:
    """The function some code is of, None if no error is to be raised there."""
    filename = code.co_filename
    if not filename.startswith(str(ROOT)):
        return None
    file = filename[len(str(ROOT)) + 1 :]
    if not file.startswith(WITHIN):
        return None
    name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
    return None if name.split(".<locals>")[0] in BOUNDARY.get(file, ()) else Place(file, name)


@contextmanager
def profiled(hook: Callable[[FrameType, str, Any], None]) -> Generator[None]:
    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(before)


def boundaries(run: Callable[[], object]) -> list[Fault]:
    """Every function of ours that ``run`` calls, entered and left."""
    calls: Counter[Place] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        place = place_of(frame.f_code) if event == "call" else None
        if place is not None:
            calls[place] += 1

    with profiled(count):
        run()
    moments: tuple[Moment, ...] = ("entry", "exit")
    return [Fault(place, moment, count) for place, count in sorted(calls.items()) for moment in moments]


@contextmanager
def injected(fault: Fault) -> Generator[list[str]]:
    """Raise ``Injected`` at one boundary, once; the list says where that has happened."""
    raised: list[str] = []
    event = {"entry": "call", "exit": "return"}[fault.moment]
    seen = 0

    def maybe(frame: FrameType, happening: str, _: Any) -> None:
        nonlocal seen
        if raised or happening != event or place_of(frame.f_code) != fault.place:
            return
        seen += 1
        if seen == fault.number:
            raised.append(str(fault))
            raise Injected(str(fault))

    with profiled(maybe):
        yield raised
