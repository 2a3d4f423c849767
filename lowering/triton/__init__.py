"""Triton emitted from tile programs: the portable CUDA path, Ampere to Blackwell, every row and shape."""

from __future__ import annotations

from .mla_run import TritonDecode
from .run import TritonKernels

__all__ = ["TritonDecode", "TritonKernels"]
