"""Sizes that are captured open: noted, which starts the capture anew, and remembered on disk.

A second process then begins with what the first one learnt, and its first attempt is the last. All that a region can be
told by before it is captured is its code and the kinds of modules it is called with; a size that is left open without
need is no error, only a graph for more sizes than one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat import sizes
from kdacompile.settings import Settings
from kdacompile.store.disk import read_checked, source_fingerprint, write_checked

log = logging.getLogger(__name__)


def open_up(found: Iterable[tuple[fx.Node, tuple[int, ...]]], settings: Settings) -> None:
    """Have these dimensions of a graph's inputs captured open; does not return if that takes another capture.

    To be called while Dynamo captures the graph or hands it to its backend.
    """
    news = sizes.note(sizes.as_open(found))
    if not news:
        return
    path = _path(settings)
    if path is not None:
        write_checked(path, json.dumps([*_load(path), *news]))
    raise sizes.capture_again("kdacompile: a size that will change is captured open")


def recall(settings: Settings) -> None:
    """Open what was opened in this region by an earlier process, when its capture begins."""
    path = _path(settings)
    news = [] if path is None else sizes.note(_load(path))
    if not sizes.inputs().isdisjoint(each.source for each in news):
        raise sizes.capture_again("kdacompile: a size that an earlier process has opened is captured open")


def _path(settings: Settings) -> Path | None:
    """Where the sizes of the region that this thread captures are kept; None if they are not."""
    region = sizes.region() if compat.disk_caches() else ""
    if not region:
        return None
    policy = (settings.lift, settings.disable, torch.is_grad_enabled())
    digest = hashlib.sha256("\n".join([region, repr(policy), source_fingerprint()]).encode())
    return Path(compat.inductor_cache_dir()) / "kdacompile" / "opened" / f"{digest.hexdigest()[:32]}.json"


def _load(path: Path) -> list[sizes.Open]:
    body = read_checked(path)
    return [] if body is None else [sizes.Open(source, rank, tuple(dims)) for source, rank, dims in json.loads(body)]
