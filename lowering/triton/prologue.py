"""The prologue kernel of a chunked program: one program per chunk and head, everything that does not read the state.

Tiles as wide as K are worked off in blocks of BK columns, so that a handful of fp32 tiles fits the registers: a first
loop makes the Gram matrices, summed over the blocks, and what else needs no inverse; a second one what does, from
tiles that the first one left in memory (see ``placement.py``).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ..ir import Op, OpKind, Value
from .kernel import Kernel, tile_offset, tile_size
from .placement import is_wide


class Prologue(Kernel):
    def text(self) -> str:
        ops = self.placement.prologue
        start = next((n for n, op in enumerate(ops) if op.kind is OpKind.UNIT_LOWER_INVERSE), len(ops))
        early = self._with_inputs([op for op in ops[:start] if self._is_sum(op) or self._crosses_in_blocks(op)])
        late = [op for op in ops[start:] if self._is_blocked(op)]
        wide = [op for op in ops if is_wide(op.result)]
        self._begin([str(op.attr("port")) for op in ops if op.kind is OpKind.LOAD])
        self._norms(early)
        self._emit([op for op in ops if _is_column(op)])
        sums = [op for op in early if self._is_sum(op)]
        for op in sums:
            self.lines.add(f"{op.result.name} = tl.zeros([C, C], tl.float32)")
        self._emit_blocked(early)
        self._finish(sums)
        self._emit([op for op in ops if op.result.type.shape == ("C", "C") and op not in sums])
        self._pass_squares()
        if late:
            with self._key_loop():
                self._reload([value for value, _ in self.placement.passed if "K" in value.type.shape])
                self._emit(late)
        if wide:
            self.lines.add("for first_column in range(0, V, BV):")
            with self.lines.indented():
                self.lines.add("c = first_column + tl.arange(0, BV)[:, None]")
                self._emit(wide)
        return self.lines.text()

    def _is_blocked(self, op: Op) -> bool:
        return "K" in op.result.type.shape

    def _is_sum(self, op: Op) -> bool:
        """A square matrix that is a sum over K."""
        return op.result.type.shape == ("C", "C") and any("K" in value.type.shape for value in op.inputs)

    def _crosses_in_blocks(self, op: Op) -> bool:
        return self._is_blocked(op) and bool(self._tiles(op.result))

    def _tiles(self, value: Value) -> list[str]:
        """The buffers that a value is stored to."""
        names = [buffer.name for buffer in self.placement.crossing if buffer.value == value]
        return list(dict.fromkeys(names + [name for passing, name in self.placement.passed if passing == value]))

    def _with_inputs(self, ops: Sequence[Op]) -> list[Op]:
        """``ops`` and the blocked ops that they read, in the program's order."""
        wanted = set(ops)
        for op in reversed(self.placement.prologue):
            if op not in wanted and self._is_blocked(op) and any(op.result in other.inputs for other in wanted):
                wanted.add(op)
        return [op for op in self.placement.prologue if op in wanted]

    # ---- the parts

    def _begin(self, ports: list[str]) -> None:
        buffers = [f"{buffer.name}_buffer" for buffer in self.placement.buffers]
        self.ports.signature("prologue", ports, buffers, ["scale"] if "q" in ports else [])
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
        if any(is_wide(op.result) for op in self.placement.prologue):
            add("live_row = j < end - first")
        self.ports.bases(ports)
        if "g" in ports and self.variant.gate != "channel":
            self.ports.gate_parameters()

    def _norms(self, ops: Sequence[Op]) -> None:
        """The norms of q and k over all of K, before any block of them is used."""
        loads = [op for op in ops if op.kind is OpKind.LOAD and op.attr("port") in ("q", "k")]
        if not self.variant.l2norm or not loads:
            return
        for op in loads:
            self.lines.add(f"{op.result.name}_squares = tl.zeros([C, 1], tl.float32)")
        with self._key_loop():
            for op in loads:
                name = op.result.name
                self.ports.load(op, turned=False)
                self.lines.add(f"{name} = {name}.to(tl.float32)")
                self.lines.add(f"{name}_squares += tl.sum({name} * {name}, 1)[:, None]")
        for op in loads:
            self.lines.add(f"{op.result.name}_rate = tl.rsqrt({op.result.name}_squares + l2norm_eps)")

    @contextmanager
    def _key_loop(self) -> Generator[None, None, None]:
        self.lines.add("for first_key in range(0, KP, BK):")
        with self.lines.indented():
            self.lines.add("d = first_key + tl.arange(0, BK)[None, :]")
            yield

    def _emit_blocked(self, ops: Sequence[Op]) -> None:
        with self._key_loop():
            if self.variant.gate == "channel":
                self.ports.gate_parameters()
            self._emit(ops)
        self.lazy.clear()

    def _finish(self, sums: Sequence[Op]) -> None:
        """A gate per token scales the sums over K; then those that cross are stored."""
        gated = [op for op in sums if op.kind is OpKind.GATED_GRAM and op.inputs[2].type.cols == 1]
        if gated:
            self.lines.add(f"decays = token_decays({self.ref(gated[0].inputs[2])}, C, DT)")
        for op in gated:
            sign = ">" if op.attr("strict", False) else ">="
            self.lines.add(f"{op.result.name} = tl.where(i {sign} j, {op.result.name} * decays, 0.0)")
        for op in sums:
            self._store(op.result)

    # ---- ops

    def _emit(self, ops: Sequence[Op]) -> None:
        emitted: set[Op] = set()
        for op in ops:
            if op in emitted:
                continue
            if self._is_sum(op):
                emitted.update(self._accumulate(op, ops))
                continue
            if op.kind is OpKind.LOAD:
                self.ports.load(op, turned=is_wide(op.result))
            elif op.kind is OpKind.CAST:
                self.ports.prepare(op, turned=is_wide(op.result))
            elif op.kind is OpKind.EXP:
                self._decay(op)
            elif op.kind not in (OpKind.CUMSUM, OpKind.REDUCE):
                self.lines.add(f"{op.result.name} = {self.simple(op)}")
            self._store(op.result)

    def _decay(self, op: Op) -> None:
        """exp of a sum of log gates; a tile is computed at its first reader, so that none waits in registers."""
        made = self.program.producer(op.inputs[0])
        if made.kind is OpKind.REDUCE:
            text = f"total_decay({self.ref(made.inputs[0])})"
        else:
            assert made.kind is OpKind.CUMSUM, op
            function = "suffix_decay" if made.attr("reverse", False) else "prefix_decay"
            text = f"{function}({self.ref(made.inputs[0])}, C, DT)"
        if self._is_blocked(op):
            self.lazy[op.result] = text
        else:
            self.lines.add(f"{op.result.name} = {text}")

    def _accumulate(self, op: Op, ops: Sequence[Op]) -> list[Op]:
        """Add a block's part to a sum over K. Gram matrices with the same decays are made together."""
        if op.kind is OpKind.GATED_GRAM and op.inputs[2].type.cols != 1:
            grams = [other for other in ops if other.kind is OpKind.GATED_GRAM and other.inputs[1:] == op.inputs[1:]]
            names = ", ".join(gram.result.name for gram in grams)
            operands = ", ".join(self.ref(value) for value in op.inputs)
            function = "channel_grams" if len(grams) == 2 else "channel_gram"
            self.lines.add(f"{names} = {function}({names}, {operands}, C, BLOCK, DT, PRECISION)")
            return grams
        left, right = (self.operand(value) for value in op.inputs[:2])
        name = op.result.name
        self.lines.add(f"{name} = tl.dot({left}, tl.trans({right}), {name}, input_precision=PRECISION)")
        return [op]

    def _store(self, value: Value) -> None:
        for name in self._tiles(value):
            turned = value.type.cols == 1 and value.type.rows != 1
            tile = f"tl.trans({self.ref(value)})" if turned else self.ref(value)
            self.lines.add(f"{name}_tile = {name}_buffer + pid * {tile_size(value)} + {tile_offset(value)}")
            self.lines.add(f"tl.store({name}_tile, {tile}.to({name}_buffer.dtype.element_ty))")

    def _pass_squares(self) -> None:
        """Wait until all warps have stored what passes through memory; then load the square ones."""
        if not self.placement.passed:
            return
        self.lines.add("tl.debug_barrier()")
        self._reload([value for value, _ in self.placement.passed if value.type.shape == ("C", "C")])

    def _reload(self, values: Sequence[Value]) -> None:
        names = dict(self.placement.passed)
        for value in values:
            tile = f"{names[value]}_buffer + pid * {tile_size(value)} + {tile_offset(value)}"
            self.lines.add(f"{value.name} = tl.load({tile})")


def _is_column(op: Op) -> bool:
    return all(dim in ("C", 1) for dim in op.result.type.shape) and op.result.type.shape != ("C", "C")
