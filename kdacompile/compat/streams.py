"""CUDA streams by their handles, which cost a tenth of what torch's stream objects do."""

from __future__ import annotations

import torch


def current_stream(device: int) -> int:
    """The handle of a device's current stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """The number of this thread's current CUDA device, once CUDA has been used."""
    return torch._C._cuda_getDevice()
