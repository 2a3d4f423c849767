"""What launching asks about a tensor's device, and about how torch is to compute there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .configs import Device


def unsupported(x: Tensor) -> str | None:
    """Why no emitted kernel runs where ``x`` is, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if x.is_cuda and device_of(x.device).capability < (8, 0):
        return "GPUs before Ampere have neither bf16 nor TF32 tensor cores"
    return None


@cache
def device_of(device: torch.device) -> Device:
    return Device.of(device)


@cache
def synchronous(device: torch.device) -> dict[str, str]:
    """The option of launches that keeps products on the tensor cores' synchronous instructions, which Ampere has.

    For Hopper's asynchronous ones ptxas up to 13.0, 12.8 of which comes with Triton 3.6, makes wrong code of kernels
    like these: operands overwritten before they are read, reads beyond shared memory (Triton's issues 11366 and 11781).
    """
    return {"arch": "sm80"} if device.type == "cuda" and device_of(device).capability >= (9, 0) else {}


def on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def precision() -> str:
    """How fp32 products round: as accurate as fp32, or TF32 where the user asked torch for that."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
