"""The CPU's own kernels: the token recurrence and its gradients in C, compiled once a machine. Where they cannot run,
the executor does.
"""

from __future__ import annotations

from .backward import run_recurrence_backward, runs_backward
from .compiler import left_uncompiled
from .recurrence import Launch, Repeated, bounds_of, in_form, prepare_recurrence, runs_recurrence

__all__ = [
    "Launch",
    "Repeated",
    "bounds_of",
    "in_form",
    "left_uncompiled",
    "prepare_recurrence",
    "run_recurrence_backward",
    "runs_backward",
    "runs_recurrence",
]
