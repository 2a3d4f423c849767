"""For all tests: what Dynamo would do for someone who watches it, and nobody does here."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

# Torch-private: where Dynamo measures how long a new graph's guards take, for its log.
from torch._dynamo import guards

# pytest listens to every logger that does not propagate, and torch writes its structured trace (each graph as text,
# several times a compilation) once this one has a listener: a tenth of the time of a small test. With TORCH_TRACE set
# it is written all the same.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(scope="session", autouse=True)
def guards_are_not_timed() -> Iterator[None]:
    """Flushing the processor's caches first takes 30 ms a graph, a sixth of what the tests of small graphs take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield
