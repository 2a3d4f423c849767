"""The CPU's own kernels: the token recurrence and its gradients in C, compiled once a machine. Where they cannot run,
the executor does.
"""

from __future__ import annotations

from .backward import run_recurrence_backward, runs_backward
from .recurrence import Launch, bounds_of, prepare_recurrence, runs_recurrence

__all__ = ["Launch", "bounds_of", "prepare_recurrence", "run_recurrence_backward", "runs_backward", "runs_recurrence"]
