"""The torch executor: the CPU lowering of every tile program, and the reference of every kernel.

A program is compiled once into Python source (see ``codegen.py``): what is free of the carry is a handful of torch
calls on all lanes and steps at once, and only the ops the next carry waits for run step by step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from . import tiles
from .codegen import generate
from .decay import Rows, gated_grams
from .emitter import python_function
from .errors import ArgumentError
from .ir import Dim, Per, Program
from .layout import Layout, tiles_to_tokens, tokens_to_tiles


class Runtime:
    """What one execution of generated code works with."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor | None],
        scalars: Mapping[str, float],
        layout: Layout,
        dims: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.program = program
        self.tensors = tensors
        self.scalars = scalars
        self.layout = layout
        self.dims = dims
        self.dtype = dtype
        self.device = device
        self.segments = layout.segments
        self.outputs: dict[str, Tensor] = {}

    def size(self, dim: Dim) -> int:
        return dim if isinstance(dim, int) else self.dims[dim]

    def load(self, name: str) -> Tensor:
        port = self.program.port(name)
        x = self.tensors[name]
        if x is None:
            raise ArgumentError(f"input {name} of program {self.program.name} is missing")
        if port.per is Per.TOKENS:
            x = x if x.dim() == 4 else x.unsqueeze(-1)
            return tokens_to_tiles(x, self.layout, fill=port.fill, dtype=self.dtype)
        rows, cols = port.type.shape
        x = x.transpose(0, 1) if port.per is Per.STEP else x
        return x.reshape(-1, self.size(rows), self.size(cols)).to(self.dtype)

    def store(self, name: str, x: Tensor) -> None:
        port = self.program.port(name)
        if port.per is Per.TOKENS:
            self.outputs[name] = tiles_to_tokens(x, self.layout)
        else:
            shape = (self.layout.steps, self.layout.batch, self.layout.heads, *x.shape[1:])
            self.outputs[name] = x.reshape(shape).transpose(0, 1).contiguous()

    def eye(self, dim: str) -> Tensor:
        size = self.size(dim)
        eye = torch.eye(size, dtype=self.dtype, device=self.device)
        return eye.expand(self.layout.steps * self.layout.lanes, size, size)

    def round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(self.dtype)

    # ---- the scan

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.layout.steps == 1:
            return (x,)
        return x.unflatten(0, (self.layout.steps, self.layout.lanes)).unbind(0)

    def carry_init(self, name: str, segment: int) -> Tensor:
        """The carry at the start of a segment."""
        init = self.tensors.get(name)
        if init is not None:
            init = init.flatten(0, 1) if len(self.segments) == 1 else init[segment]
            return init.to(self.dtype)
        shape = (self.layout.lanes, *(self.size(dim) for dim in self.program.port(name).type.shape))
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def carry_final(self, name: str, finals: list[Tensor]) -> None:
        """Store the carry after every segment: [B, heads, K, V], or [sequences, heads, K, V] for packed ones."""
        x = finals[0].clone() if len(finals) == 1 else torch.stack(finals)
        self.outputs[name] = x.view(-1, self.layout.heads, *x.shape[-2:])

    def carry_join(self, carries: Tensor, *, after: bool) -> Tensor:
        """The carry before (or ``after``) every step, flat."""
        if len(self.segments) == 1:
            return carries.narrow(0, int(after), self.layout.steps).flatten(0, 1)
        index = [n + s + after for s, (lo, hi) in enumerate(self.segments) for n in range(lo, hi)]
        return carries.index_select(0, torch.tensor(index, device=self.device)).flatten(0, 1)


class Executable:
    """A program compiled for torch. Call it with the tensors of its input ports."""

    def __init__(self, program: Program, rounding: Mapping[str, torch.dtype] | None = None) -> None:
        self.program = program
        source = generate(program, rounding=rounding)
        self._run = python_function(source, program.name, torch=torch, tiles=tiles, Rows=Rows, gated_grams=gated_grams)

    def __call__(
        self,
        tensors: Mapping[str, Tensor | None],
        layout: Layout,
        *,
        dims: Mapping[str, int],
        dtype: torch.dtype,
        scalars: Mapping[str, float] | None = None,
    ) -> dict[str, Tensor]:
        device = next(x.device for x in tensors.values() if x is not None)
        rt = Runtime(self.program, tensors, scalars or {}, layout, dims, dtype, device)
        self._run(rt)
        return rt.outputs
