"""The Ascend tools as the tests see them: compile a kernel, run what the compiler made of it.

The tools live in an environment of their own, made by ``make test-ascend`` (see environment.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdacompile.lowering.ascend.kernel import Kernel, Kind
from kdacompile.lowering.ascend.launch import Launch

ROOT = Path(__file__).parents[2]
ARCH = "Ascend910B3"
NEXT_ARCH = "Ascend910_9599"
_IO = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Edit = tuple[str, str, int]  # pattern, replacement, which match (-1: all)


class ToolError(RuntimeError):
    """The tools refused a request; the text is theirs."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel. ``facts`` as :class:`tests.ascend.simulator.Facts`, as a dictionary; ``device`` is what the
    compiler took the device to have."""

    folder: str
    facts: dict[str, Any]
    device: dict[str, int]


class Tools:
    """A process in the tools' environment that answers requests one by one."""

    def __init__(self, environment: Path, work: Path) -> None:
        self._work = work
        self._cache = environment / "kernels"
        self._cache.mkdir(exist_ok=True)
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [str(environment / "bin" / "python"), "-m", "tests.ascend.toolchain"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=variables)

    def close(self) -> None:
        self._process.communicate()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ToolError("the tools' process ended; its error is above")
        answer = json.loads(line)
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer

    def compile(
        self,
        kernel: Kernel,
        constants: dict[str, int],
        *,
        io: torch.dtype = torch.bfloat16,
        arch: str = ARCH,
        options: Sequence[str] = (),
    ) -> Compiled:
        signature = {a.name: _signature(a.kind, io) for a in kernel.arguments}
        used = {name: constants[name] for name in kernel.constants}
        asked = [*(f"--{name.replace('_', '-')}={n}" for name, n in kernel.options.items()), *options]
        return self.compile_text(kernel.source, kernel.name, signature, used, arch=arch, options=asked)

    def compile_text(
        self,
        source: str,
        name: str,
        signature: Mapping[str, str],
        constants: Mapping[str, int],
        *,
        arch: str = ARCH,
        options: Sequence[str] = (),
    ) -> Compiled:
        """One kernel of a source text; the signature has Triton's types."""
        answer = self.ask(
            do="compile", source=source, kernel=name, signature=dict(signature), constants=dict(constants),
            arch=arch, options=list(options), cache=str(self._cache),
        )  # fmt: skip
        return Compiled(answer["folder"], answer["facts"], answer["device"])

    def run(
        self,
        compiled: Compiled,
        launch: Launch,
        *,
        order: Sequence[str] = ("AIC", "AIV0", "AIV1"),
        seed: int | None = None,
        edits: Sequence[Edit] = (),
    ) -> None:
        """Run a launch in the simulator; its tensors are written in place, but views with gaps, which are only read."""
        self.execute(compiled, launch.kernel.name, launch.grid, launch.arguments, order, seed, edits)

    def execute(
        self,
        compiled: Compiled,
        kernel: str,
        grid: int,
        arguments: Mapping[str, Tensor | int | float],
        order: Sequence[str] = ("AIC", "AIV0", "AIV1"),
        seed: int | None = None,
        edits: Sequence[Edit] = (),
    ) -> None:
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        path = self._work / "arrays.npz"
        np.savez(path, **{name: _numpy(x) for name, x in tensors.items()})
        self.ask(
            do="run",
            folder=compiled.folder,
            kernel=kernel,
            grid=grid,
            workspace_bytes=compiled.facts["workspace_bytes"],
            arguments=[name if name in tensors else value for name, value in arguments.items()],
            kinds={name: "bf16" for name, x in tensors.items() if x.dtype is torch.bfloat16},
            arrays=str(path),
            order=list(order),
            seed=seed,
            edits=[list(edit) for edit in edits],
        )
        with np.load(path) as stored:
            for name, x in tensors.items():
                if not x.is_contiguous():
                    continue
                found = torch.from_numpy(stored[name])
                x.copy_(found.view(torch.bfloat16).view(x.shape) if x.dtype is torch.bfloat16 else found.view(x.shape))


def _signature(kind: Kind, io: torch.dtype) -> str:
    pointers = {Kind.IO: f"*{_IO[io]}", Kind.F32: "*fp32", Kind.I32: "*i32", Kind.NUMBER: "fp32", Kind.COUNT: "i32"}
    return pointers[kind]


def _numpy(x: Tensor) -> Any:
    """The elements from the tensor's address on: those of a view with gaps up to the end of its memory."""
    rest = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    x = x.detach().reshape(-1) if x.is_contiguous() else x.detach().as_strided((rest,), (1,))
    return x.view(torch.uint16).numpy() if x.dtype is torch.bfloat16 else x.numpy()


@dataclass
class SimulatedDevice:
    """A launcher that compiles each kernel with the real compiler and runs it in the simulator.

    ``edits`` by kernel name change what runs; ``order`` is that of the cores, ``seed`` any other one. Uninitialised
    outputs are poisoned.
    """

    tools: Tools
    order: Sequence[str] = ("AIC", "AIV0", "AIV1")
    seed: int | None = None
    edits: dict[str, Sequence[Edit]] = field(default_factory=dict[str, Sequence[Edit]])
    compiled: dict[str, Compiled] = field(default_factory=dict[str, Compiled])

    def __call__(self, launch: Launch) -> None:
        io = next(x.dtype for x in launch.arguments.values() if isinstance(x, Tensor) and x.dtype in _IO)
        pointers = {a.name for a in launch.kernel.arguments if a.kind is Kind.IO}
        io = next((x.dtype for n, x in launch.arguments.items() if n in pointers and isinstance(x, Tensor)), io)
        compiled = self.tools.compile(launch.kernel, dict(launch.constants), io=io)
        self.compiled[launch.kernel.name] = compiled
        self.tools.run(compiled, launch, order=self.order, seed=self.seed, edits=self.edits.get(launch.kernel.name, ()))
