"""What Triton's autotuner is about to try, compiled side by side: a peer that tunes itself is ready in seconds.

The autotuner compiles one configuration, times it, and goes on to the next, on one core; a peer has some hundred of
them for each of its kernels. What it times, and what it chooses, are as before.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def compile_side_by_side() -> None:
    """From now on, in this process. Nothing where Triton is missing, or compiles no kernels in the background."""
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
    except ImportError:  # before Triton 3.5
        return
    tuners: Any = Autotuner
    choose = tuners.prune_configs

    def chosen(tuner: Any, given: dict[str, Any]) -> list[Any]:
        """The configurations of a call for which none has been chosen: it is asked for them once, before it times any.

        Those that do not compile are left to the autotuner, which knows what to do about them.
        """
        configurations = choose(tuner, given)
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for configuration in configurations:
                tuner.fn.run(**tuner.nargs, **(given | {"warmup": True}), **configuration.all_kwargs())
        return configurations

    tuners.prune_configs = chosen
