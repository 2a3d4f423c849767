"""Files that other processes may read or write at the same time: written whole, and checked before they are trusted.

Some of them are code (the text of a replacement, a compiled library). So a file counts only if it is what was written,
byte for byte, and if nobody but its owner, who is this user or root, could have written it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SUM = ".sha256"
"""What the name of the file ends in that holds the hash of another."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write so that a reader finds all of it or what stood there before; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)  # noqa: SIM115 - closed before it is moved
    try:
        with file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(file.name, path)
    except OSError:
        Path(file.name).unlink(missing_ok=True)
        raise


def write_checked(path: Path, body: str) -> None:
    """Write ``body`` below its hash, for ``read_checked``. Without effect on a full or read-only disk."""
    try:
        write_whole(path, f"{_digest(path, body.encode())}\n{body}")
    except OSError as error:
        log.info("%s could not be written: %s", path, error)


def read_checked(path: Path) -> str | None:
    """What ``write_checked`` wrote under this name. None if there is none, or if it cannot be trusted."""
    content = _trusted(path)
    if content is None:
        return None
    digest, _, body = content.partition(b"\n")
    if digest != _digest(path, body).encode():
        log.warning("%s is not as it was written and is made anew", path)
        return None
    try:
        return body.decode()
    except UnicodeDecodeError as error:  # written like this, by whatever
        log.warning("%s could not be read and is made anew: %s", path, error)
        return None


def made_checked(path: Path, make: Callable[[Path], None], *, reuse: bool = True) -> Path:
    """``path``, a file that ``make`` makes where it is told to: now, unless it stands there as it was made before.

    Its hash stands beside it, and is written last. Raises OSError.
    """
    beside = path.with_name(path.name + SUM)
    if reuse and os.path.exists(path):
        content = _trusted(path)
        if content is not None and read_checked(beside) == _digest(path, content):
            return path
        log.warning("%s is not as it was made and is made anew", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        make(made)
        made.chmod(made.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
        digest = _digest(path, made.read_bytes())
        made.replace(path)
    write_checked(beside, digest)
    return path


def _trusted(path: Path) -> bytes | None:
    """What a file holds. None if there is none, it cannot be read, or another user could have written it."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or _may_be_anothers(about):
                log.warning("%s is no file, or belongs to or is writable by another user, and is made anew", path)
                return None
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        log.warning("%s could not be read and is made anew: %s", path, error)
        return None


def _without_waiting(path: str, flags: int) -> int:
    """Opened at once, though a pipe may stand there that nobody writes into."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag


def _may_be_anothers(about: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):  # Windows has other rights
        return False
    return about.st_uid not in (os.getuid(), 0) or bool(about.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _digest(path: Path, content: bytes) -> str:
    """Of the name as well: a whole file under another's name is not what was written there."""
    return hashlib.sha256(path.name.encode() + b"\n" + content).hexdigest()


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
