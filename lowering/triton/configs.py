"""Schedules by shape: no autotuning, so the first call compiles each kernel once.

Measured on an H200 (see the bench); the rules are about registers and shared memory, so they carry over to other GPUs
with those of the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_CHUNK, MAX_CHUNK = 16, 64

# On Hopper the prologue runs on two warps, too few for wgmma: with four or eight, Triton 3.6 compiles its chain of
# products wrong for some block sizes (seen in W; the same family of errors is why FLA keeps such kernels to two warps).


@dataclass(frozen=True)
class Device:
    """What a schedule needs to know of a GPU: multiprocessors, and shared memory a block may ask for, in bytes."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type != "cuda":  # Triton's interpreter
            return cls((9, 0), 132, 232448)
        found = torch.cuda.get_device_properties(device)
        return cls((found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin)


@dataclass(frozen=True)
class Config:
    """Block sizes and warps of the two kernels; ``columns`` is the block of V of each, ``keys`` of K."""

    chunk: int
    prologue_keys: int
    prologue_columns: int
    prologue_warps: int
    scan_columns: int
    scan_warps: int
    scan_stages: int


def padded(width: int) -> int:
    """The power of two that a width is padded to; a tensor core's tile has at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def choose(
    device: Device, *, key_width: int, value_width: int, lanes: int, length: int, item: int, chunk_size: int
) -> Config:
    """The schedule of a shape. ``lanes``: sequences times heads; ``item``: bytes of a buffer's element."""
    keys, values = padded(key_width), padded(value_width)
    widest = MAX_CHUNK if keys * item <= 256 else 32  # a [chunk, K] tile in fp32 is 32 registers of each thread
    wish = min(chunk_size or widest, widest, max(length, 1))
    chunk = max(MIN_CHUNK, 1 << (wish - 1).bit_length())
    columns = min(values, _scan_columns(device, values, lanes, keys, item))
    stage = item * (chunk * (3 * keys + chunk) + chunk * columns) + 4 * keys
    stages = max(1, min(3, device.shared_memory // stage))
    if stages == 3 and 3 * stage > device.shared_memory - 8192:  # room for what products exchange
        stages = 2
    return Config(
        chunk=chunk,
        prologue_keys=min(keys, 32),
        prologue_columns=min(values, 64),
        prologue_warps=2 if device.capability[0] == 9 else 4,
        scan_columns=columns,
        scan_warps=8 if columns * keys >= 128 * 128 else 4,
        scan_stages=stages,
    )


def _scan_columns(device: Device, values: int, lanes: int, keys: int, item: int) -> int:
    """The widest block of V that still gives every multiprocessor about half a program."""
    widest = 128 if keys * item <= 256 else 64
    for columns in (128, 64):
        if columns <= widest and lanes * (values // columns) * 4 >= 3 * device.multiprocessors:
            return columns
    return 64 if lanes * (values // 64) * 4 >= device.multiprocessors else 32


def step_columns(device: Device, *, keys: int, values: int, lanes: int) -> int:
    """The block of V of the one-token kernel: small states are cut finer, so that all of the machine loads them."""
    for columns in (64, 32, 16):
        if columns <= values and columns * keys <= 8192 and lanes * (values // columns) >= 2 * device.multiprocessors:
            return columns
    return 16
