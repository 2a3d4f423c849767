"""For all tests: an error of ours is raised, not contained; and Dynamo does nothing for someone who watches it."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
from collections.abc import Iterator

import pytest
import torch

# Torch-private: where Dynamo measures how long a new graph's guards take, for its log.
from torch._dynamo import guards

from kdacompile import containment

os.environ[containment.RAISE] = "1"  # processes that tests start inherit it

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


@pytest.fixture(scope="module", autouse=True)
def compiled_graphs_go_with_their_module() -> Iterator[None]:
    """What a module compiled is not kept to the end: a process of the tests grew to 2.5 GB."""
    yield
    torch._dynamo.reset()


def pytest_collection_finish() -> None:
    """torch and transformers are not searched for garbage again at every compilation: 3 % of the tests' time."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """A process that does not end after its tests says where it stands, and fails; so does a single test, see
    ``faulthandler_timeout`` in pyproject.toml."""
    faulthandler.dump_traceback_later(300, exit=True, file=sys.__stderr__ or sys.stderr)
