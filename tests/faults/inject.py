"""Raising at the boundaries of our functions, told by the profiler's hook: none of them is changed for it."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import kdacompile

ROOT = Path(str(kdacompile.__file__)).parent.parent

WITHIN = (
    "patterns/", "kdacompile/graph/", "kdacompile/capture/", "kdacompile/search/", "kdacompile/rewrite/",
    "lowering/cpu/",
)  # fmt: skip
"""Where errors are raised: everything that recognises, proves, lifts and rewrites, and chooses a kernel of the CPU."""

BOUNDARY = {
    "kdacompile/capture/hook.py": ("consult", "consult_library", "_contained", "install"),
    "kdacompile/capture/lifting.py": ("Lifts.__init__",),
    "kdacompile/capture/open_lengths.py": ("given_up_where_refused", "give_up"),
    "kdacompile/capture/tables.py": ("Guarded.__call__",),
    "kdacompile/search/compiler_pass.py": ("run", "Analysis.__init__"),
    "lowering/cpu/compiler.py": ("Loop.run",),
    "lowering/cpu/recurrence.py": (
        "bounds_of",
        "prepare_recurrence.<locals>.launch",
        "Prepared.run",
        "Prepared.run_on",
    ),
}
"""Functions that make the boundary, or are called outside of it: when the package is imported, to get back to plain
torch, to check what a caller gives, and where a kernel has been chosen and runs, since it may write.
"""

Moment = Literal["entry", "exit"]

_PATIENCE = 300  # seconds that a child may take


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

    @property
    def boundary(self) -> str:
        """Where, whichever call it is: how often a function is called may differ from one run to the next."""
        return f"{self.moment} of {self.place}"

    def __str__(self) -> str:
        return f"{self.moment} {self.number} of {self.place}"


@functools.cache  # asked for every call that Python makes
def place_of(code: CodeType) -> Place | None:
    """The function some code is of, None if no error is to be raised there."""
    filename = code.co_filename
    if not filename.startswith(str(ROOT)):
        return None
    file = filename[len(str(ROOT)) + 1 :]
    if file.startswith(("kdacompile/patterns/", "kdacompile/lowering/")):  # where they are installed
        file = file.removeprefix("kdacompile/")
    if not file.startswith(WITHIN):
        return None
    name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
    return None if {name, name.split(".<locals>")[0]} & set(BOUNDARY.get(file, ())) else Place(file, name)


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
def striking(faults: Iterable[Fault], strike: Callable[[Fault], None]) -> Generator[None]:
    """Call ``strike`` at each of these boundaries; what it raises is raised there, and ends the watch."""
    events = {"call": "entry", "return": "exit"}
    wanted = {(fault.place, fault.moment): fault for fault in faults}
    seen: Counter[tuple[Place, str]] = Counter()

    def maybe(frame: FrameType, happening: str, _: Any) -> None:
        place = place_of(frame.f_code) if happening in events else None
        if place is None or (key := (place, events[happening])) not in wanted:
            return
        seen[key] += 1
        if seen[key] == wanted[key].number:
            strike(wanted[key])

    with profiled(maybe):
        yield


@contextmanager
def injected(fault: Fault) -> Generator[list[str]]:
    """Raise ``Injected`` at one boundary, once; the list says where that has happened."""
    raised: list[str] = []

    def strike(fault: Fault) -> None:
        raised.append(str(fault))
        raise Injected(str(fault))

    with striking([fault], strike):
        yield raised


def in_children(
    faults: Sequence[Fault], attempt: Callable[[], str], processes: int, tell: Callable[[Fault, str], None]
) -> None:
    """``tell`` what ``attempt`` says with each of these faults, as soon as it is known. ``attempt`` is run once: at
    every boundary a child of this process takes over from there, raises, and tells what came of it. So what happens
    before the boundary is shared, and what comes after runs without the watch. "DIED": a child told nothing;
    "unreached": the call of a function that was meant did not come.
    """
    mine: list[Fault] = []
    children: dict[int, Fault] = {}
    unreached = set(faults)

    def wait() -> None:
        child, status = os.wait()
        fault = children.pop(child)
        if status:
            tell(fault, f"DIED with status {status}")

    def strike(fault: Fault) -> None:
        unreached.discard(fault)
        if len(children) == processes:
            wait()
        if child := os.fork():
            children[child] = fault
            return
        signal.alarm(_PATIENCE)
        sys.unraisablehook = lambda _: None  # Python says so where it drops an error: in a generator that is closed
        mine.append(fault)
        raise Injected(str(fault))

    status = 1
    try:
        with striking(faults, strike):
            result = attempt()
        if mine:
            tell(mine[0], result)
            status = 0
    finally:
        if mine:
            os._exit(status)
    while children:
        wait()
    for fault in sorted(unreached, key=str):
        tell(fault, "unreached")
