"""Hand-tuned Gluon kernels for Hopper GPUs; Triton itself is only imported when one runs."""

from .mla_run import HopperDecode
from .run import HopperKernels
from .schedules import Schedule, schedule

__all__ = ["HopperDecode", "HopperKernels", "Schedule", "schedule"]
