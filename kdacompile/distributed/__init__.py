"""Tokens on several GPUs: context parallelism for linear attention, MLA and the short convolutions before them.

Tensor and data parallelism need nothing of this package: the ops take DTensors sharded by batch or by heads, and
recognised models are sharded as any other (docs/distributed.md).
"""

from __future__ import annotations

from kdacompile.distributed.convolution import causal_conv1d
from kdacompile.distributed.fragments import ContextParallel

__all__ = ["ContextParallel", "causal_conv1d"]
