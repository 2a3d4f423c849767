"""Every test of lifting starts from nothing: no graph, no count, no verdict of another test or of another run."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from torch._dynamo.utils import counters

from kdacompile.capture import hook, lifting, store
from kdacompile.compat import region


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())
    monkeypatch.setattr(region, "_left_as_ever", WeakKeyDictionary())
    monkeypatch.setattr(store.compat, "inductor_cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(store.compat, "disk_caches", lambda: True)
