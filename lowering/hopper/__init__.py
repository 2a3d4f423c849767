"""Hand-tuned Gluon kernels for Hopper GPUs; Triton itself is only imported when one runs."""

from .backward_run import HopperGradients
from .mla_run import HopperDecode
from .mla_run import entries as schedule_entries
from .mla_run import schedule as decode_schedule
from .run import HopperKernels
from .run import machine as why_not_hopper
from .schedules import Schedule, schedule

__all__ = [
    "HopperDecode",
    "HopperGradients",
    "HopperKernels",
    "Schedule",
    "decode_schedule",
    "schedule",
    "schedule_entries",
    "why_not_hopper",
]
