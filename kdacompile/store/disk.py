"""Files that other processes may read or write at the same time."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` so that a reader finds all of it or what stood there before; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def write_checked(path: Path, body: str) -> None:
    """Write ``body`` below its hash, for ``read_checked``. Without effect on a full or read-only disk."""
    try:
        write_whole(path, f"{_digest(body)}\n{body}")
    except OSError as error:
        log.info("%s could not be written: %s", path, error)


def read_checked(path: Path) -> str | None:
    """What ``write_checked`` wrote. None if there is none, or if a letter of it has changed since."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s could not be read and is made anew: %s", path, error)
        return None
    digest, _, body = text.partition("\n")
    if digest != _digest(body):
        log.warning("%s is not as it was written and is made anew", path)
        return None
    return body


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
