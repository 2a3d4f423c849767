"""The scan kernel of a chunked program: the chunks of one head and one block of V in order, the state in registers."""

from __future__ import annotations

from ..ir import Op, OpKind, Value
from .kernel import Kernel, tile_offset, tile_size


class Scan(Kernel):
    """One program per sequence, head and block of V: the chunks one after the other, the state in registers."""

    def text(self) -> str:
        carry = self.program.carry
        assert carry is not None
        ports = [str(op.attr("port")) for op in self.placement.scan if op.kind is OpKind.LOAD]
        self._begin(ports)
        state = next(op.result for op in self.placement.scan if op.kind is OpKind.CARRY)
        self.lines.add("for step in range(0, tl.cdiv(end - start, C)):")
        with self.lines.indented():
            self.lines.add("tile = (first_chunk + step) * HV + head")
            self.lines.add("first = start + step * C")
            self.lines.add("live_row = j < end - first")
            self.ports.bases(ports)
            for buffer in self.placement.crossing:
                self._load(buffer.value)
            self.emit(self.placement.scan)
            self.lines.add(f"{state.name} = {carry.step.name}")
        size, offset = "V * K", "d * V + c"
        self.lines.add(f"final_state_tile = final_state_ptr + (sequence * HV + head) * ({size}) + {offset}")
        self.lines.add(f"tl.store(final_state_tile, {state.name}, mask=(d < K) & (c < V))")
        return self.lines.text()

    def _begin(self, ports: list[str]) -> None:
        buffers = [f"{buffer.name}_buffer" for buffer in self.placement.crossing]
        read = [*ports, *(["initial_state"] if self.variant.state else [])]
        constants = "HV GROUP K V C KP VP BV DT PRECISION".split()
        self.ports.signature("scan", read, ["o", "final_state"], buffers, [], constants)
        add = self.lines.add
        add("pid = tl.program_id(0).to(tl.int64)")
        add("blocks = tl.cdiv(V, BV)")
        add("lane, block = pid // blocks, pid % blocks")
        add("sequence, head = lane // HV, lane % HV")
        if self.variant.packed:
            add("start = tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int64), 0)")
            add("end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int64), T)")
            add("first_chunk = tl.load(chunk_offsets + sequence)")
            add("batch = 0")
        else:
            add("start, end = 0, T")
            add("first_chunk = sequence * tl.cdiv(T, C)")
            add("batch = sequence")
        add("i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]")
        add("d = tl.arange(0, KP)[None, :]")
        add("c = block * BV + tl.arange(0, BV)[:, None]")
        carry = self.program.carry
        assert carry is not None
        state = next(op.result for op in self.placement.scan if op.kind is OpKind.CARRY)
        if self.variant.state:
            add("state_base = initial_state_ptr + sequence * initial_state_sn + head * initial_state_sh")
            add("state_tile = state_base + d * initial_state_sk + c * initial_state_sv")
            add(f"{state.name} = tl.load(state_tile, mask=(d < K) & (c < V), other=0.0).to(tl.float32)")
        else:
            add(f"{state.name} = tl.zeros([BV, KP], tl.float32)")

    def _load(self, value: Value) -> None:
        buffer = next(buffer for buffer in self.placement.crossing if buffer.value == value)
        if value.type.cols == 1:
            self.rows.add(value)
        widen = ".to(tl.float32)" if buffer.wide else ""
        address = f"{buffer.name}_buffer + tile * {tile_size(value)} + {tile_offset(value)}"
        self.lines.add(f"{value.name} = tl.load({address}){widen}")

    def on_carry(self, op: Op) -> str:
        return ""  # held from chunk to chunk

    def on_store(self, op: Op) -> str:
        self.ports.store_output(op.inputs[0].name)
        return ""
