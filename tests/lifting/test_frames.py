"""A function's variables are looked at as its frames end, by ``sys.monitoring`` or by a trace function."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kdacompile.capture.frames import FrameEnds


def inner(x: int) -> list[int]:
    table = [x] * 2
    if x == 2:
        raise ValueError
    return table


def outer(x: int) -> int:
    try:
        inner(x)
    except ValueError:
        x = 3
    return x


def yielding() -> Iterator[int]:
    y = 5
    yield y


@pytest.mark.parametrize("traced", [False, True])
def test_frames_are_seen_as_they_end(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if traced:
        monkeypatch.delattr(sys, "monitoring", raising=False)
    seen: list[tuple[str, dict[str, Any]]] = []

    def look(frame: types.FrameType) -> None:
        seen.append((frame.f_code.co_name, dict(frame.f_locals)))

    ends, before = FrameEnds(look), sys.gettrace()
    ends.watch(inner.__code__)
    for again in (False, True):
        seen.clear()
        with ends:
            with ends:
                outer(1)
            ends.watch(outer.__code__)  # told of while others run already
            ends.watch(yielding.__code__)
            outer(2)
            list(yielding())
        outer(1)
        first = [("inner", {"x": 1, "table": [1, 1]}), ("outer", {"x": 1})][: 2 if again else 1]
        raised = [("inner", {"x": 2, "table": [2, 2]}), ("outer", {"x": 3})]
        assert seen == [*first, *raised, ("yielding", {"y": 5}), ("yielding", {"y": 5})]
        assert sys.gettrace() is before
