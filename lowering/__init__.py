"""Lowering: tile programs, their stages, and the targets that run them."""

from __future__ import annotations

from .errors import ArgumentError, LoweringError, TileProgramError
from .linear_attention import linear_attention_program
from .run import run_linear_attention, run_linear_attention_step, run_step_in_pool
from .run_backward import run_linear_attention_backward

__all__ = [
    "ArgumentError",
    "LoweringError",
    "TileProgramError",
    "linear_attention_program",
    "run_linear_attention",
    "run_linear_attention_backward",
    "run_linear_attention_step",
    "run_step_in_pool",
]
