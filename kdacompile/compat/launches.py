"""Launching what Triton compiled, without its Python wrapper: that asks for the stream and looks for hooks every time.

``CompiledKernel.run``, ``.function`` and ``.packed_metadata`` are what ``CompiledKernel.__getitem__`` itself calls
with, and ``knobs.runtime`` has the hooks. ``compiled_parameters`` gives what Triton's launcher hands to the driver:
``make_launcher`` and ``make_tensordesc_arg`` of its NVIDIA driver. They are not documented; these were read and run in
Triton 3.6.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch._C._dynamo import guards


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], stream: int | None) -> None:
    """A compiled kernel on its grid and a stream; None leaves the stream, and telling of the launch, to Triton."""
    if stream is None:
        kernel[grid](*arguments)
    else:
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


def launch_stream(device: torch.device) -> int | None:
    """What to launch on; None to leave it to Triton, where someone, a profiler as a rule, is to be told of launches."""
    if device.type != "cuda":
        return None
    runtime = _runtime()
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    told = getattr(before, "calls", before) or getattr(after, "calls", after)
    return None if told else current_stream(device.index)


# As Triton's launcher passes them; pointers apart.
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_MAP_AT, _MAP_BYTES = 128, 128  # of a PyCUtensorMap: where the driver's CUtensorMap lies in the object


class Compiled(NamedTuple):
    """What the driver is given besides a grid and a stream.

    ``parameters``: of each the argument that an address in it belongs to, if any, its bytes, and whether they are a
    tensor map. ``dependent``: whether the kernel may start while the one before it runs.
    """

    function: int
    threads: int
    shared: int
    dependent: bool
    parameters: tuple[tuple[int | None, bytes, bool], ...]


def compiled_parameters(kernel: Any, arguments: Sequence[Any]) -> Compiled | None:
    """Of a compiled kernel with all of its arguments; None if it is of a kind, or a Triton, not known here."""
    from triton import __version__

    metadata = kernel.metadata
    plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    if not __version__.startswith("3.6.") or not plain:
        return None
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    signature = list(kernel.src.signature.values())
    if len(signature) != len(arguments):
        return None
    descriptors = iter(getattr(metadata, "tensordesc_meta", None) or ())
    parameters: list[tuple[int | None, bytes, bool]] = []
    for at, (kind, value) in enumerate(zip(signature, arguments, strict=True)):
        found = _passed(at, kind, value, descriptors)
        if found is None:
            return None
        parameters.extend(found)
    nothing = None, bytes(8), False  # the two kinds of scratch memory
    threads = 32 * metadata.num_warps
    shared, dependent = metadata.shared, bool(metadata.launch_pdl)
    return Compiled(kernel.function, threads, shared, dependent, (*parameters, nothing, nothing))


def _passed(at: int, kind: Any, value: Any, descriptors: Iterator[Any]) -> list[tuple[int | None, bytes, bool]] | None:
    """The parameters of an argument; None for a kind not known here."""
    if not isinstance(kind, str):
        return None
    if kind == "constexpr":
        return []
    if kind.startswith("*"):
        return [(at, bytes(8), False)]
    if kind.startswith("tensordesc"):
        described = next(descriptors, None)
        if described is None:
            return None
        driver = import_module("triton.backends.nvidia.driver")
        encoded, *sizes = driver.make_tensordesc_arg(value, described)
        # Held until its bytes are read.
        map_bytes = ctypes.string_at(id(encoded) + _MAP_AT, _MAP_BYTES)
        half = len(sizes) // 2
        packed = [struct.pack("i", size) for size in sizes[:half]] + [struct.pack("q", size) for size in sizes[half:]]
        return [(at, map_bytes, True), *((None, one, False) for one in packed)]
    if kind == "bf16":
        return [(None, struct.pack("f", value)[2:], False)]
    return [(None, struct.pack(_FORMATS[kind], value), False)] if kind in _FORMATS else None


@functools.cache
def _runtime() -> Any:
    return import_module("triton").knobs.runtime  # not at the top: the package is optional


empty_strided: dict[str, Callable[..., torch.Tensor]] = {
    kind: getattr(guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")
}
"""``torch.empty_strided`` of a shape, strides and a dtype by the type of device, which is the current one."""


def current_stream(device: int) -> int:
    """The handle of a device's current stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """The number of this thread's current CUDA device, once CUDA has been used."""
    return torch._C._cuda_getDevice()
