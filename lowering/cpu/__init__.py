"""The CPU's own kernel: the token recurrence in C, compiled once a machine. Where it cannot run, the executor does."""

from __future__ import annotations

from .recurrence import run_recurrence, runs_recurrence

__all__ = ["run_recurrence", "runs_recurrence"]
