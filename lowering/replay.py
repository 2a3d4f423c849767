"""Launching a run of remembered kernels in one call of C (``replay.c``), which changes addresses and nothing else.

Triton's launcher converts some forty Python objects a kernel and encodes every tensor map anew. Here all parameters of
a launch are bytes, as the driver takes them, and places in them where addresses go. A program is launches one after
the other, each 8 bytes aligned: a header, the places, where each parameter begins, and the parameters.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kdacompile.compat.launches import Compiled, compiled_parameters
from kdacompile.containment import contain

from .cpu.compiler import CannotCompile, built

log = logging.getLogger(__name__)

_HEADER = struct.Struct("@Q10I")
_PLACE = struct.Struct("@Iiq")
_MAP_BYTES = 64  # a multiple of which tensor maps begin at


class Program(NamedTuple):
    """``launches`` of them; ``kernels`` keeps their functions loaded."""

    text: bytes
    launches: int
    kernels: tuple[Any, ...]

    def run(self, addresses: Sequence[int], stream: int) -> None:
        replay = _replay()
        assert replay is not None
        error = replay(self.text, self.launches, _packing(len(addresses))(*addresses), stream)
        if error:
            raise RuntimeError(f"the CUDA driver refused a launch: error {error}")


@cache
def _packing(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"@{count}Q").pack


Place = tuple[int, int, int]
"""Of an argument: its position, the source that its address lies in, the bytes before."""
Described = tuple[Any, tuple[int, ...], Sequence[Any], Sequence[Place]]
"""A compiled kernel, its grid, all of its arguments, and the places of those that are, or describe, addresses."""


def program_of(launches: Sequence[Described]) -> Program | None:
    """The launches as one program; None if one is of a kind that is left to Triton, or nothing here can launch."""
    if not launches or _replay() is None:
        return None
    parts: list[bytes] = []
    for kernel, grid, arguments, places in launches:
        compiled = compiled_parameters(kernel, arguments)
        if compiled is None or 0 in grid:
            return None
        parts.append(_text(compiled, grid, places))
    return Program(b"".join(parts), len(parts), tuple(kernel for kernel, *_ in launches))


def _text(compiled: Compiled, grid: tuple[int, ...], places: Sequence[Place]) -> bytes:
    values, begins, of_argument = bytearray(), list[int](), dict[int, tuple[int, bool]]()
    for argument, value, is_map in compiled.parameters:
        step = _MAP_BYTES if is_map else 8
        values.extend(bytes(-len(values) % step))
        if argument is not None:
            of_argument[argument] = len(values), is_map
        begins.append(len(values))
        values.extend(value)
    values.extend(bytes(-len(values) % 8))
    packed: list[bytes] = []
    for argument, source, before in places:
        if argument in of_argument:  # what is a constant of the kernel is not passed
            at, is_map = of_argument[argument]
            packed.append(_PLACE.pack(at, ~source if is_map else source, before))
    sizes = (len(begins), len(packed), len(values), 0)
    header = _HEADER.pack(compiled.function, *grid, compiled.threads, compiled.shared, compiled.dependent, *sizes)
    begins += [0] * (len(begins) % 2)
    return b"".join((header, *packed, struct.pack(f"@{len(begins)}I", *begins), values))


@cache
def _replay() -> Any:
    """``replay`` of the source; None where it cannot be compiled, or there is no driver that can do this."""

    def load() -> Any:
        try:
            library = built((Path(__file__).parent / "replay.c").read_bytes(), ("-O2",), "replay")
        except CannotCompile as error:
            log.info("remembered calls are launched by Triton's launcher: %s", error)
            return None
        library.replay.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
        return library.replay if library.load() else None

    return contain("loading what launches remembered calls", load, lambda _: None)
