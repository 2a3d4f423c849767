"""Triton emitted from tile programs: the portable CUDA path, Ampere to Blackwell, every row and shape."""

from __future__ import annotations

from .backward_run import TritonGradients
from .mla_run import TritonDecode
from .run import TritonKernels

__all__ = ["TritonDecode", "TritonGradients", "TritonKernels"]
