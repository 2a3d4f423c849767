"""C source to functions, with the C compiler of the machine: once a machine, then from Inductor's cache folder.

The source includes no header of torch, so a compilation takes half a second, where Inductor's take ten. It reaches
torch's thread pool through ``torch_parallel_for``, which libtorch exports under its stable C interface.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from kdacompile import compat
from kdacompile.containment import contain
from kdacompile.store.disk import made_checked

log = logging.getLogger(__name__)

_SECONDS = 60.0  # a compilation may take before it is given up

# What torch found the CPU to be able to do -> flags, bytes of a register, registers of a strip's row (see the source).
# Not -march=native: the cache folder may be shared by machines that differ.
_TARGETS = {
    "AVX512": (("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"), 64, 4),
    "AVX2": (("-mavx2", "-mfma"), 32, 2),
}
_ANY_TARGET = ((), 16, 2)


REMEDY = "install a C compiler, or name it in CC"


class CannotCompile(Exception):
    """The C kernels are not available: why, and what helps."""

    def __init__(self, reason: str, remedy: str = REMEDY) -> None:
        super().__init__(reason)
        self.remedy = remedy


@cache
def parallel_for() -> ctypes._NamedFuncPointer:
    """``torch_parallel_for(begin, end, grain, function, context)``: at::parallel_for behind the stable C interface."""
    folder = Path(torch.__file__).parent / "lib"
    path = next((path for path in sorted(folder.glob("libtorch_cpu.*")) if path.suffix in (".so", ".dylib")), None)
    try:
        function = ctypes.CDLL(str(path)).torch_parallel_for
    except (OSError, AttributeError) as error:
        raise CannotCompile(f"this torch has no torch_parallel_for: {error}") from error
    function.argtypes = [*(ctypes.c_int64,) * 3, ctypes.c_void_p, ctypes.c_char_p]
    function.restype = ctypes.c_int
    return function


@cache
def library(source: tuple[str | bytes, ...], real: str) -> ctypes.CDLL:
    """The compiled form of ``source``, for ``real`` "float" or "double": files of this folder, and texts, one behind
    the other; the last one is a file, whose name the library bears.
    """
    folder = Path(__file__).parent
    text = b"".join((folder / part).read_bytes() if isinstance(part, str) else part for part in source)
    flags, register, registers = _TARGETS.get(torch.backends.cpu.get_cpu_capability(), _ANY_TARGET)
    sizes = (f"-DREAL={real}", f"-DVECTOR_BYTES={register}", f"-DVECTORS={registers}")
    precise = ("-DDOUBLE_PRECISION",) if real == "double" else ()
    return built(text, ("-O3", "-fno-math-errno", *flags, *sizes, *precise), Path(str(source[-1])).stem)


def built(text: bytes, flags: tuple[str, ...], name: str) -> ctypes.CDLL:
    """The library that the C compiler makes of a source; raises :class:`CannotCompile`."""
    command = [compiler_path(), "-x", "c", "-std=gnu11", "-shared", "-fPIC", *flags]
    key = hashlib.sha256(repr((text, command, platform.machine())).encode()).hexdigest()
    try:
        path = Path(compat.inductor_cache_dir(), "kdacompile", f"{name}-{key[:32]}.so")
        made = made_checked(path, lambda path: _compile(command, text, path), reuse=compat.disk_caches())
        return ctypes.CDLL(str(made))
    except OSError as error:
        raise CannotCompile(f"the library cannot be made or loaded: {error}") from error


class Loop:
    """A function of a source, compiled for one dtype, whose tasks torch's threads share."""

    source: ClassVar[tuple[str, ...]]
    function: ClassVar[str]

    def __init__(self, real: str, source: tuple[str | bytes, ...] | None = None) -> None:
        self.compiled = library(source or self.source, real)  # kept, so that it stays loaded
        self._function = ctypes.cast(getattr(self.compiled, self.function), ctypes.c_void_p)
        self._parallel_for = parallel_for()

    def run(self, tasks: int, grain: int, problem: bytes | ctypes.Array[ctypes.c_char]) -> None:
        """All tasks on ``problem``, at least ``grain`` of them on a thread."""
        if self._parallel_for(0, tasks, grain, self._function, problem):
            raise RuntimeError("torch_parallel_for failed")


class Call(Loop):
    """A function that has its tasks shared by itself: of a problem and of the addresses of this call, and 0 is success.

    ``divide``: the address of ``torch_parallel_for``, which stands in the problem.
    """

    def __init__(self, real: str, source: tuple[str | bytes, ...] | None = None) -> None:
        super().__init__(real, source)
        self.divide = ctypes.cast(self._parallel_for, ctypes.c_void_p).value or 0
        self.call: Callable[[bytes, bytes], int] = getattr(self.compiled, self.function)
        function: Any = self.call
        function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_char_p], ctypes.c_int64


L = TypeVar("L", bound=Loop)
_NAMES = {torch.float32: "float", torch.float64: "double"}
"""Dtypes the kernels are compiled for, in C."""

_ready: set[tuple[type[Loop], torch.dtype]] = set()
_leaving = threading.local()


@contextmanager
def left_uncompiled() -> Generator[None]:
    """Inside, this thread compiles nothing, and PyTorch's operators stand in for what was not compiled before: a
    compilation takes longer than the few small calls of a proof.
    """
    before, _leaving.on = getattr(_leaving, "on", False), True
    try:
        yield
    finally:
        _leaving.on = before


def may_run(loop: type[Loop], dtype: torch.dtype) -> bool:
    """Whether ``loop`` may be asked for here, see :func:`left_uncompiled`."""
    return not getattr(_leaving, "on", False) or (loop, dtype) in _ready


def loaded(loop: type[L], dtype: torch.dtype, what: str) -> L | None:
    """``loop`` for a dtype; None, and a word about what that costs, where the machine cannot compile it."""

    def load() -> L | None:
        try:
            made = loop(_NAMES[dtype])
            _ready.add((loop, dtype))
            return made
        except CannotCompile as error:
            say_slow(str(error), error.remedy)
            return None

    return contain(f"loading the CPU's kernel of {what}", load, lambda _: None) if dtype in _NAMES else None


@cache
def say_slow(reason: str, remedy: str) -> None:
    """Once a reason: what it costs that there are no C kernels, and what helps."""
    log.warning(
        "linear attention runs through PyTorch operators on this CPU, right but slower (%s); %s", reason, remedy
    )


def compiler_path() -> str:
    """The C compiler; a C++ compiler will do, and Inductor has need of one anyway.

    Raises :class:`CannotCompile`; on Windows always: the sources are GNU C, which cl does not read.
    """
    if platform.system() == "Windows":
        raise CannotCompile("the kernels are not made on Windows", "Windows' Linux subsystem has them")
    candidates = (os.environ.get("CC"), "cc", "gcc", "clang", os.environ.get("CXX"), "g++", "clang++")
    found = next((path for name in candidates if name and (path := shutil.which(name))), None)
    if found is None:
        raise CannotCompile("no C compiler")
    return found


def _compile(command: list[str], text: bytes, path: Path) -> None:
    command = [*command, "-", "-lm", "-o", str(path)]
    try:
        subprocess.run(command, input=text, capture_output=True, check=True, timeout=_SECONDS)
    except subprocess.CalledProcessError as error:
        raise CannotCompile(f"{command[0]} failed: {error.stderr.decode(errors='replace')}") from error
    except subprocess.TimeoutExpired as error:
        raise CannotCompile(f"{command[0]} took longer than {_SECONDS:.0f} s") from error
    log.debug("compiled %s with %s", path.name, command[0])
