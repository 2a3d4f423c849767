"""What the kernels that are parallel over chunks and heads share: where their chunk lies, and its tiles in buffers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ..ir import Op, OpKind, Value
from .kernel import Kernel, tile_offset, tile_size
from .placement import is_wide


class Parallel(Kernel):
    """One program per chunk and head."""

    def _begin(self, kernel: str, ops: Sequence[Op], buffers: Sequence[str], constants: Sequence[str]) -> None:
        """The signature, and where the chunk lies in the ports."""
        ports = [str(op.attr("port")) for op in ops if op.kind is OpKind.LOAD]
        scalars = ["scale"] if "q" in ports else []
        self.ports.signature(kernel, ports, [], list(buffers), scalars, ["HV", "GROUP", "K", "V", *constants])
        add = self.lines.add
        add("pid = tl.program_id(0).to(tl.int64)")
        add("chunk, head = pid // HV, pid % HV")
        if self.variant.packed:
            add("if chunk >= tl.load(chunk_offsets + N):")
            add("    return")
            add("sequence, start, end = locate_chunk(cu_seqlens, chunk_offsets, chunk, N, T)")
            add("batch = 0")
            add("first = start + (chunk - tl.load(chunk_offsets + sequence)) * C")
        else:
            add("steps = tl.cdiv(T, C)")
            add("batch, end = chunk // steps, T")
            add("first = (chunk % steps) * C")
        add("i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]")
        add("live = i < end - first")
        if any(is_wide(op.result) for op in ops):
            add("live_row = j < end - first")
        self.ports.bases(ports)
        if "g" in ports and self.variant.gate != "channel":
            self.ports.gate_parameters()

    @contextmanager
    def _key_loop(self, *, unrolled: bool = False) -> Generator[None, None, None]:
        self.lines.add(f"for first_key in {'tl.static_range' if unrolled else 'range'}(0, KP, BK):")
        with self.lines.indented():
            self.lines.add("d = first_key + tl.arange(0, BK)[None, :]")
            yield

    def define(self, value: Value, text: str) -> None:
        super().define(value, text)
        self._store(value)

    def _store(self, value: Value) -> None:
        for name in self.placement.tiles(value):
            turned = value.type.cols == 1 and value.type.rows != 1
            tile = f"tl.trans({value.name})" if turned else value.name
            self.lines.add(f"{name}_tile = {name}_buffer + pid * {tile_size(value)} + {tile_offset(value)}")
            self.lines.add(f"tl.store({name}_tile, {tile}.to({name}_buffer.dtype.element_ty))")

    def _load(self, value: Value) -> None:
        """What an earlier kernel left."""
        name = dict(self.placement.passed)[value]
        self.lines.add(f"{value.name} = tl.load({name}_buffer + pid * {tile_size(value)} + {tile_offset(value)})")
