"""Emitted sources as modules: Triton compiles functions it can find in a file.

The file's name is a hash of its text, in a folder that persists, so that tracebacks stay readable and Triton's own
cache, which is keyed by the text of a kernel and of the functions it calls, finds what an earlier process compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

_PREFIX = "kdacompile_generated_"


def cache_folder() -> Path:
    """Where generated sources are kept: ``KDACOMPILE_CACHE_DIR``, else the user's cache folder."""
    chosen = os.environ.get("KDACOMPILE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kdacompile"


@cache
def load_source(name: str, text: str) -> ModuleType:
    """Import ``text``, written once under a name made of ``name`` and its hash."""
    module_name = f"{_PREFIX}{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = _write(f"{module_name}.py", text)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # inspect.getsource, which Triton calls, looks there
    spec.loader.exec_module(module)
    return module


def _write(file_name: str, text: str) -> Path:
    """The file with ``text``; moved into place whole, since other processes may be doing the same."""
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"kdacompile-{_user()}"):
        path = folder / file_name
        try:
            if path.exists() and path.read_bytes() == text.encode():
                return path
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
                file.write(text.encode())
            Path(file.name).replace(path)
        except OSError:
            continue  # a read-only home: the temporary folder will do
        return path
    raise OSError(f"cannot write generated kernels to {cache_folder()}; set KDACOMPILE_CACHE_DIR")


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "user"
