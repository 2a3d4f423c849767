"""How long is searched without finding anything: processor time of this thread, so that a busy machine gives up no
sooner than an idle one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator
from contextlib import contextmanager
from threading import local


class OutOfTime(Exception):
    """Nothing was found for as long as was allowed."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"gave up after {seconds:g} s of processor time without a match (kda.deadline)")
        self.reason = str(self)


class _Clock(local):
    seconds: float | None = None
    ends: float = 0.0


_clock = _Clock()


@contextmanager
def within(seconds: float) -> Generator[None]:
    """Have :func:`check` raise ``OutOfTime`` after so many seconds; within another of these, after that one's."""
    if _clock.seconds is not None:
        yield
        return
    _clock.seconds = seconds
    restart()
    try:
        with uncollected():
            yield
    finally:
        _clock.seconds = None


@contextmanager
def uncollected() -> Generator[None]:
    """Meanwhile nobody looks for garbage in cycles: every look goes through all that a program with torch has loaded,
    which took an eighth of what the proof of Kimi Linear's function did.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def restart() -> None:
    """Something was found: the time begins anew."""
    if _clock.seconds is not None:
        _clock.ends = time.thread_time() + _clock.seconds


def check() -> None:
    """To be called in every loop of a search, never while a graph is being changed."""
    if _clock.seconds is not None and time.thread_time() > _clock.ends:
        raise OutOfTime(_clock.seconds)
