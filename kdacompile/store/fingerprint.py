"""A hash of our own source: what decides what is rewritten and how it runs."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import torch


@functools.cache
def source_fingerprint() -> str:
    """A hash of every file that decides what is rewritten and how it runs, and of torch's version."""
    import kdacompile
    from kdacompile import lowering, patterns

    digest = hashlib.sha256()
    for package in (kdacompile, patterns, lowering):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()
