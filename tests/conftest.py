"""For all tests: nothing is timed here, so Dynamo need not time its guards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# Torch-private: where Dynamo measures how long a new graph's guards take, for its log.
from torch._dynamo import guards


@pytest.fixture(scope="session", autouse=True)
def guards_are_not_timed() -> Iterator[None]:
    """Flushing the processor's caches first takes 30 ms a graph, a sixth of what the tests of small graphs take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield
