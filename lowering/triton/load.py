"""Emitted sources as modules: Triton compiles functions whose text it can find.

The text is run as it is and kept in memory for tracebacks and for Triton, so that nothing on disk can stand in for it.
Triton's own cache is keyed by the text of a kernel and of the functions it calls.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from functools import cache
from types import ModuleType


@cache
def load_source(name: str, text: str) -> ModuleType:
    """A module of ``text``, under a name made of ``name`` and its hash."""
    module = ModuleType(f"kdacompile_generated_{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    module.__file__ = f"<{module.__name__}>"
    # inspect.getsource, which Triton calls, looks in both
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[module.__name__] = module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module
