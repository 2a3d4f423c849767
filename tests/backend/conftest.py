from __future__ import annotations

from collections.abc import Iterator

import pytest

# Torch-private: switches Inductor's caches on disk off.
from torch._inductor import config as inductor_config


@pytest.fixture(autouse=True)
def no_disk_caches() -> Iterator[None]:
    """A result cached by an earlier run would hide what the pass does now."""
    with inductor_config.patch(force_disable_caches=True):
        yield
