"""The CPU's own kernels: the token recurrence and its gradients in C, compiled once a machine. Where they cannot run,
the executor does.
"""

from __future__ import annotations

from .backward import run_recurrence_backward, runs_backward
from .compiler import left_uncompiled
from .recurrence import Launch, Prepared, bounds_of, prepare_recurrence, reads, runs_recurrence

__all__ = [
    "Launch",
    "Prepared",
    "bounds_of",
    "left_uncompiled",
    "prepare_recurrence",
    "reads",
    "run_recurrence_backward",
    "runs_backward",
    "runs_recurrence",
]
