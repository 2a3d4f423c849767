"""What the CUDA driver is asked to launch, without one: ``python -m tests.lowering.launched FOLDER``.

Run by ``test_recorded.py`` in a process of its own, where FOLDER holds ``driver_stub.c`` compiled as Triton's driver.
Triton compiles for Hopper GPUs and launches on memory of the host; nothing runs. A remembered call must hand the driver
the same functions, grids, attributes, stream and parameters as the call itself, tensor maps included.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STREAM = 7
Launches = list[tuple[Any, ...]]


class Driver:
    """Listens to launches: of each the function, the configuration and what its parameters hold."""

    def __init__(self, folder: Path) -> None:
        library = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch._C._cuda_getCurrentRawStream = lambda device: STREAM
        from triton.backends.nvidia.driver import CudaDriver
        from triton.compiler import CompiledKernel
        from triton.runtime import driver

        self.heard: Launches = []
        self.sizes: dict[int, list[int]] = {}
        load = CompiledKernel._init_handles

        def loaded(kernel: Any) -> None:
            load(kernel)
            self.sizes.setdefault(kernel.function, _parameter_sizes(kernel.asm["ptx"]))

        setattr(CompiledKernel, "_init_handles", loaded)  # noqa: B010
        self._listener = ctypes.CFUNCTYPE(None, *(ctypes.c_void_p,) * 3)(self._hear)
        library.stub_listen(self._listener)
        driver.set_active(CudaDriver())

    def _hear(self, config: int, function: int, parameters: int) -> None:
        sizes = self.sizes[function]
        held = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        words = [bytes((ctypes.c_ubyte * min(n, 16)).from_address(at)) for at, n in zip(held, sizes, strict=True)]
        values = [tuple(int.from_bytes(word[i : i + 8], "little") for i in range(0, len(word), 8)) for word in words]
        grid = tuple((ctypes.c_uint * 7).from_address(config))  # blocks, threads, shared memory
        stream = ctypes.c_void_p.from_address(config + 32).value
        attributes = ctypes.c_uint.from_address(config + 48).value
        self.heard.append((function, grid, stream, attributes, values))

    def during(self, call: Callable[[], Any], operands: list[Tensor]) -> Launches:
        """The launches of a call; addresses outside the operands by the order in which they come up."""
        self.heard.clear()
        call()
        others: dict[int, int] = {}

        def named(value: int) -> Any:
            for number, x in enumerate(operands):
                if 0 <= value - x.data_ptr() < x.untyped_storage().nbytes():
                    return number, value - x.data_ptr()
            return value if value < 1 << 32 else ("other", others.setdefault(value, len(others)))

        return [(*what, [(named(first), *rest) for first, *rest in values]) for *what, values in self.heard]


def _parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel."""
    entry = re.search(r"\.entry[^(]*\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    blocks = [re.search(r"\.b8\s+\S+\[(\d+)\]", part) for part in entry.group(1).split(",")]
    scalars = [re.search(r"\.[usbf](\d+)", part) for part in entry.group(1).split(",")]
    return [int(b[1]) if b else int(s[1]) // 8 if s else 0 for b, s in zip(blocks, scalars, strict=True)]


def check(driver: Driver, run: Callable[[Any, Any], Any], call: Any, names: tuple[str, ...]) -> None:
    """Recorded with some operands, launched again with others."""
    from kdacompile.lowering import recorded, replay
    from kdacompile.lowering.scratch import Scratch
    from tests.lowering.test_recorded import moved

    recorded.launch_stream = lambda device: STREAM
    some, given = ({n: None if (x := getattr(call, n)) is None else moved(x) for n in names} for _ in range(2))
    recorder = recorded.Recorder(tuple(some.values()))
    known = recorder.recorded(run(replace(call, **some), recorder))
    assert known is not None
    operands = [x for x in given.values() if x is not None]
    want = driver.during(lambda: run(replace(call, **given), Scratch()), operands)
    addresses = [0 if x is None else x.data_ptr() for x in given.values()]
    have = driver.during(lambda: known.run(tuple(given.values()), addresses), operands)
    assert want and have == want, (have, want)
    kinds = {type(step) for step in known.in_programs or ()}
    assert replay.Program in kinds and recorded.Launch not in kinds, (
        kinds
    )  # or Triton's launcher was compared to itself


def main(folder: Path) -> None:
    driver = Driver(folder)
    from kdacompile.lowering.hopper.mla_run import HopperDecode
    from kdacompile.lowering.triton import run as portable
    from tests.lowering.test_hopper import kda_call
    from tests.lowering.test_recorded import LATENT, LINEAR, latent_call

    one = replace(kda_call(1), initial_state=torch.zeros(1, 2, 128, 128))
    check(driver, lambda call, scratch: portable.run_step(call, call.initial_state, scratch), one, LINEAR)
    check(driver, HopperDecode().run, latent_call(0), LATENT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
