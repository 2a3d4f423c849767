"""The gram kernel of a chunked program: one program per chunk and head, all that needs neither state nor inverse.

Tiles as wide as K are worked off in blocks of BK columns, so that a handful of fp32 tiles fits the registers.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Op, OpKind
from .parallel import Parallel


class Gram(Parallel):
    """Text of the kernel for products of rows and columns of one chunk: Gram matrices and what is formed from them."""

    turns = False

    def text(self) -> str:
        ops = self.placement.gram
        blocked = self._with_inputs([op for op in ops if self._is_sum(op) or self._crosses_in_blocks(op)])
        buffers = dict.fromkeys(name for op in ops if op.output for name in self.placement.tiles(op.result))
        self._begin("gram", ops, [f"{name}_buffer" for name in sorted(buffers)], "C KP DT PRECISION BK BLOCK".split())
        self._norms(blocked)
        self.emit(op for op in ops if _is_narrow(op))
        sums = [op for op in blocked if self._is_sum(op)]
        for op in sums:
            self.lines.add(f"{op.result.name} = tl.zeros([C, C], tl.float32)")
        self._emit_blocked(blocked)
        self._finish(sums)
        self.emit(op for op in ops if op.result.type.shape == ("C", "C") and op not in sums)
        return self.lines.text()

    def _is_blocked(self, op: Op) -> bool:
        return "K" in op.result.type.shape

    def _is_sum(self, op: Op) -> bool:
        """A square matrix that is a sum over K."""
        return op.result.type.shape == ("C", "C") and any("K" in value.type.shape for value in op.inputs)

    def _crosses_in_blocks(self, op: Op) -> bool:
        return self._is_blocked(op) and bool(self.placement.tiles(op.result))

    def _with_inputs(self, ops: Sequence[Op]) -> list[Op]:
        """``ops`` and the blocked ops that they read, in the program's order."""
        wanted = set(ops)
        for op in reversed(self.placement.gram):
            if op not in wanted and self._is_blocked(op) and any(op.result in other.inputs for other in wanted):
                wanted.add(op)
        return [op for op in self.placement.gram if op in wanted]

    # ---- the parts

    def _norms(self, ops: Sequence[Op]) -> None:
        """The norms of q and k over all of K, before any block of them is used."""
        loads = [op for op in ops if op.kind is OpKind.LOAD and op.attr("port") in ("q", "k")]
        if not self.variant.l2norm or not loads:
            return
        for op in loads:
            self.lines.add(f"{op.result.name}_squares = tl.zeros([C, 1], tl.float32)")
        with self._key_loop(unrolled=True):
            for op in loads:
                name = op.result.name
                self.lines.add(f"{name} = {self.ports.load(op, turned=False)}")
                self.lines.add(f"{name}_squares += tl.sum({name}.to(tl.float32) * {name}.to(tl.float32), 1)[:, None]")
        for op in loads:
            self.lines.add(f"{op.result.name}_rate = tl.rsqrt({op.result.name}_squares + l2norm_eps)")

    def _emit_blocked(self, ops: Sequence[Op]) -> None:
        """The loop over blocks of K: what is stored before what is summed, so that fewer tiles wait in registers."""
        with self._key_loop():
            if self.variant.gate == "channel":
                self.ports.gate_parameters()
            self.emit(op for op in ops if not self._is_sum(op))
            self._accumulate([op for op in ops if self._is_sum(op)])

    def _finish(self, sums: Sequence[Op]) -> None:
        """Gram matrices keep their lower triangles, scaled by a gate per token; then those that cross are stored."""
        gated = [op for op in sums if op.kind is OpKind.GATED_GRAM]
        per_token = [op for op in gated if op.inputs[2].type.cols == 1]
        if per_token:
            self.lines.add(f"decays = token_decays({per_token[0].inputs[2].name}, C, DT)")
        for op in gated:
            name, sign = op.result.name, ">" if op.attr("strict", False) else ">="
            self.lines.add(f"{name} = tl.where(i {sign} j, {name}{' * decays' if op in per_token else ''}, 0.0)")
        for op in sums:
            self._store(op.result)

    # ---- ops

    def on_cumsum(self, op: Op) -> str:
        return ""  # sums of log gates are formed where they are used

    on_reduce = on_cumsum

    def on_exp(self, op: Op) -> str:
        """exp of a sum of log gates. A tile of such is never made: see ``on_mul``."""
        made = self.program.producer(op.inputs[0])
        gate = made.inputs[0].name
        if made.kind is OpKind.REDUCE:
            return f"total_decay({gate}, C, {'BLOCK' if self._is_blocked(op) else 1})"
        if self._is_blocked(op):
            return ""
        return f"{'suffix_decay' if made.attr('reverse', False) else 'prefix_decay'}({gate}, C)"

    def on_mul(self, op: Op) -> str:
        """With a gate per channel, a tile times its decay is one function of tile and gate."""
        made = self.program.producer(op.inputs[1])
        if not self._is_blocked(op) or made.kind is not OpKind.EXP or not self._is_blocked(made):
            return self.plain(op)
        sums = self.program.producer(made.inputs[0])
        function = "decayed_to_end" if sums.attr("reverse", False) else "decayed_from_start"
        return f"{function}({op.inputs[0].name}, {sums.inputs[0].name}, C, BLOCK, DT)"

    def _accumulate(self, sums: Sequence[Op]) -> None:
        """Add a block's part to sums over K. Gram matrices with the same decays are made together."""
        done: set[Op] = set()
        for op in sums:
            if op in done:
                continue
            if op.kind is OpKind.GATED_GRAM and op.inputs[2].type.cols != 1:
                grams = [other for other in sums if other.kind is op.kind and other.inputs[1:] == op.inputs[1:]]
                done.update(grams)
                names = ", ".join(gram.result.name for gram in grams)
                operands = ", ".join(value.name for value in op.inputs)
                function = "channel_grams" if len(grams) == 2 else "channel_gram"
                self.lines.add(f"{names} = {function}({names}, {operands}, C, BLOCK, DT, PRECISION)")
                continue
            left, right, name = *map(self.narrow, op.inputs[:2]), op.result.name
            self.lines.add(f"{name} = tl.dot({left}, tl.trans({right}), {name}, input_precision=PRECISION)")


def _is_narrow(op: Op) -> bool:
    """A number a token: a column, or a row."""
    return all(dim in ("C", 1) for dim in op.result.type.shape) and op.result.type.shape != ("C", "C")
