"""triton-ascend as the launching code sees it: jitted functions of a source text, and a driver that knows the device.

A function called on its grid is compiled by the real compiler for the types of what it is given, as triton does, and
executed by the simulator on the device's memory.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.ascend.npu.device import is_here, npu, on_cpu
from tests.ascend.tools import ARCH, Compiled, Tools

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    float: "fp32", int: "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Function:
    """A jitted function: its parameters, and those that are constants of its compilation."""

    device: SimulatedTriton
    name: str
    source: str
    parameters: tuple[str, ...]
    constants: frozenset[str]

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        (programs,) = grid
        return lambda **given: self.device.launch(self, programs, given)


@dataclass
class SimulatedTriton:
    """``launched``: names of kernels and grids, in order."""

    tools: Tools
    cores: int = 3
    broken: bool = False
    launched: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def load(self, name: str, source: str) -> SimpleNamespace:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        return SimpleNamespace(**{node.name: self._function(node, source) for node in functions})

    def _function(self, node: ast.FunctionDef, source: str) -> Function:
        arguments = node.args.args
        constants = frozenset(a.arg for a in arguments if a.annotation is not None)
        return Function(self, node.name, source, tuple(a.arg for a in arguments), constants)

    @property
    def driver(self) -> Any:
        properties: Any = {"num_aicore": self.cores, "num_vectorcore": 2 * self.cores}
        utils = SimpleNamespace(get_device_properties=lambda device: properties)
        return SimpleNamespace(utils=utils, get_current_target=lambda: SimpleNamespace(backend="npu", arch=ARCH))

    def launch(self, function: Function, grid: int, given: dict[str, Any]) -> None:
        """Every parameter by name and each tensor on the device; what is left over are options of the compiler."""
        if self.broken:
            raise RuntimeError("the compiler has failed")
        values = {name: given.pop(name) for name in function.parameters}
        assert set(given) == {"set_workspace_multibuffer"} and 0 < grid <= 2 * self.cores
        constants = {name: values.pop(name) for name in function.constants}
        assert all(isinstance(x, int) for x in constants.values())
        assert all(is_here(x) for x in values.values() if isinstance(x, Tensor))
        kinds = {name: _TYPES[x.dtype if isinstance(x, Tensor) else type(x)] for name, x in values.items()}
        options = {f"--{name.replace('_', '-')}={value}" for name, value in given.items()}
        compiled = self.tools.compile_text(function.source, function.name, kinds, constants, options=sorted(options))
        arguments = {name: on_cpu(x) if isinstance(x, Tensor) else x for name, x in values.items()}
        self.launched.append((function.name, grid))
        npu.does(lambda: self._execute(compiled, function.name, grid, arguments))

    def _execute(self, compiled: Compiled, name: str, grid: int, arguments: dict[str, Any]) -> None:
        self.tools.execute(compiled, name, grid, arguments)
