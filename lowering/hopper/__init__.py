"""Hand-tuned Gluon kernels for Hopper GPUs; Triton itself is only imported when one runs."""

from .run import HopperKernels, Schedule, schedule

__all__ = ["HopperKernels", "Schedule", "schedule"]
