"""Schedules by shape: no autotuning, so the first call compiles each kernel once.

Measured on an H200 (see the bench); the rules are about registers and shared memory, so they carry over to other GPUs
with those of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import torch
from packaging.version import Version

MIN_CHUNK, MAX_CHUNK = 16, 64

# With fewer channels the keys of 64 tokens are far from independent, and a chunk's products are sums that cancel: with
# K = 16 and no decay the 16-bit hand-overs then leave an error of 5.2e-3 to 5.7e-3, in chunks of 32 at most 4.8e-3.
FEW_KEYS = 32

# In gradients through pairs of tokens of the same 16 a lower log gate counts as this (backward_blocks.py).
GATE_LIMIT = -8.6

# The compiler whose four-warp kernels were checked on a Hopper GPU, see _few_warps.
VERIFIED_TRITON = (3, 6)

# Scan time of a chunk in units of its narrowest block, by block of V (H200, K = 128): what a wave of programs costs.
_SCAN_COSTS = {128: 1.5, 64: 1.2, 32: 1.0}


@dataclass(frozen=True)
class Device:
    """What a schedule needs to know of a GPU: multiprocessors, and shared memory a block may ask for, in bytes.

    ``triton``: major and minor version of the compiler.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    triton: tuple[int, int] = VERIFIED_TRITON

    @classmethod
    def of(cls, device: torch.device) -> Device:
        if device.type != "cuda":  # Triton's interpreter
            return cls((9, 0), 132, 232448)
        found = torch.cuda.get_device_properties(device)
        room = found.shared_memory_per_block_optin
        return cls((found.major, found.minor), found.multi_processor_count, room, _compiler())


@dataclass(frozen=True)
class Config:
    """Block sizes, warps and stages of the kernels; ``keys`` are those of a block of K, ``columns`` those of V."""

    chunk: int
    gram_keys: int
    gram_warps: int
    gram_stages: int
    apply_keys: int
    apply_columns: int
    apply_warps: int
    scan_columns: int
    scan_warps: int
    scan_stages: int

    def launch(self, kernel: str) -> tuple[dict[str, int], dict[str, int]]:
        """A kernel's block sizes by the names of its arguments, and how it is compiled."""
        if kernel == "gram":
            return {"BK": self.gram_keys}, {"num_warps": self.gram_warps, "num_stages": self.gram_stages}
        if kernel == "inverse":
            return {}, {"num_warps": 1}
        if kernel == "apply":
            blocks = {"BK": self.apply_keys, "BV": self.apply_columns}
            return blocks, {"num_warps": self.apply_warps, "num_stages": 1}
        return {"BV": self.scan_columns}, {"num_warps": self.scan_warps, "num_stages": self.scan_stages}


def padded(width: int) -> int:
    """The power of two that a width is padded to; a tensor core's tile has at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def choose(
    device: Device,
    *,
    key_width: int,
    value_width: int,
    lanes: int,
    length: int,
    item: int,
    chunk_size: int = 0,
    bounded: bool = False,
    limited: bool = False,
) -> Config:
    """The schedule of a shape.

    ``lanes``: sequences times heads; ``item``: bytes of a buffer's element; ``bounded``: of a gate per channel, see
    decays.py.
    """
    keys, values = padded(key_width), padded(value_width)
    # Of more than 128 channels, or in fp32, the tiles of longer chunks do not fit the registers.
    widest = MAX_CHUNK if item == 2 and FEW_KEYS <= key_width <= 128 else 32
    wish = min(chunk_size or widest, widest, max(length, 1))
    chunk = max(MIN_CHUNK, 1 << (wish - 1).bit_length())
    columns = _scan_columns(device, values, lanes, keys, item)
    room = device.shared_memory - 8192  # for what products exchange
    while chunk > MIN_CHUNK and _scan_bytes(chunk, keys, columns, item) > room:
        chunk //= 2
    warps = 2 if _few_warps(device, chunk, item) else 4
    return Config(
        chunk=chunk,
        # Of 16 keys with two warps, a bounded gate's tiles fit the registers, with four another's.
        gram_keys=16 if bounded or limited else min(keys, 32),
        gram_warps=2 if bounded else 4 if limited else warps,
        gram_stages=1 if limited else 2,
        apply_keys=min(keys, 128 if item == 2 else 32),
        apply_columns=min(values, 128 if item == 2 else 32),
        apply_warps=warps,
        scan_columns=columns,
        scan_warps=8 if columns * keys >= 128 * 128 else 4,
        scan_stages=max(1, min(3, room // _scan_bytes(chunk, keys, columns, item))),
    )


def _scan_bytes(chunk: int, keys: int, columns: int, item: int) -> int:
    """What one step of the scan loads."""
    return item * chunk * (3 * keys + chunk + columns) + 4 * keys


def _few_warps(device: Device, chunk: int, item: int) -> bool:
    """Whether to stay with two warps: too few for the asynchronous tensor cores of Hopper and Blackwell.

    With four, Triton compiles products for those, which it has got wrong before (3.6 on Hopper, for some blocks of K;
    FLA keeps such kernels to two warps for the same family of errors). Chunks of 64 in 16 bits are right, by test, with
    3.6 on Hopper; what has not been tested gets two.
    """
    verified = device.capability[0] == 9 and device.triton == VERIFIED_TRITON and chunk == 64 and item == 2
    return device.capability[0] in (9, 10) and not verified


def _compiler() -> tuple[int, int]:
    found = triton_version()
    assert found is not None  # kernels that are launched were compiled
    return found.major, found.minor


def triton_version() -> Version | None:
    """The version of the compiler that is installed; None where there is none."""
    try:
        return Version(metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return None


def _scan_columns(device: Device, values: int, lanes: int, keys: int, item: int) -> int:
    """The block of V with the cheapest waves of programs, one to a multiprocessor (their tiles fill it)."""
    widest = 128 if keys * item <= 256 else 64

    def cost(columns: int) -> float:
        return -(-lanes * max(1, values // columns) // device.multiprocessors) * _SCAN_COSTS[columns]

    fitting = [columns for columns in _SCAN_COSTS if columns <= min(widest, values)]
    return min(fitting, key=cost, default=16)


def step_columns(device: Device, *, keys: int, values: int, lanes: int) -> int:
    """The block of V of the one-token kernel: small states are cut finer, so that all of the machine loads them."""
    for columns in (64, 32, 16):
        if columns <= values and columns * keys <= 8192 and lanes * (values // columns) >= 2 * device.multiprocessors:
            return columns
    return 16
