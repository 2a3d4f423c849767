"""The kernels behind the gram kernel of a program with the delta term: the inverse of a chunk, and its products."""

from __future__ import annotations

from ..errors import TileProgramError
from ..ir import Op, OpKind, Value
from .parallel import Parallel
from .placement import is_wide


class Inverse(Parallel):
    """One program per chunk and head: ``M = (I + A)^-1``, its columns scaled if the program scales them."""

    def text(self) -> str:
        inverse, *rest = self.placement.inverse
        scaled = rest[0] if rest else None
        if inverse.kind is not OpKind.UNIT_LOWER_INVERSE or len(rest) > 1 or (scaled and not _scales(scaled, inverse)):
            raise TileProgramError("no kernel for these ops on an inverse", " ".join(map(str, self.placement.inverse)))
        names = [inverse.inputs[0].name, (scaled or inverse).result.name]
        names += [scaled.inputs[1].name] if scaled else []
        self.ports.signature(
            "inverse", [], [], [f"{name}_buffer" for name in names], [], "HV C INVERSE_PRECISION".split()
        )
        self.lines.add("pid = tl.program_id(0).to(tl.int64)")
        if self.variant.packed:
            self.lines.add("if pid // HV >= tl.load(chunk_offsets + N):")
            self.lines.add("    return")
        tiles = [f"{name}_buffer + pid * ({size})" for name, size in zip(names, ("C * C", "C * C", "C"), strict=False)]
        tiles += [] if scaled else [tiles[0]]
        self.lines.add(f"unit_lower_inverse({', '.join(tiles)}, C, {scaled is not None}, INVERSE_PRECISION)")
        return self.lines.text()


def _scales(op: Op, inverse: Op) -> bool:
    return op.kind is OpKind.MUL and op.inputs[0] == inverse.output and op.inputs[1].type.shape == (1, "C")


class Apply(Parallel):
    """One program per chunk and head: the products with the inverse, from tiles that earlier kernels left.

    A tile that is overwritten by its product has been read by all warps by then.
    """

    def text(self) -> str:
        ops, passed = self.placement.apply, dict(self.placement.passed)
        read = list(dict.fromkeys(value for op in ops for value in op.inputs if value in passed))
        made = [name for op in ops if op.output for name in self.placement.tiles(op.result)]
        buffers = dict.fromkeys([*(passed[value] for value in read), *made])
        names = [f"{name}_buffer" for name in sorted(buffers)]
        self._begin("apply", ops, names, "C KP VP BV DT PRECISION BK".split())
        for value in read:
            if value.type.shape == ("C", "C"):
                self._load(value)
        with self._key_loop():
            for value in read:
                if "K" in value.type.shape:
                    self._load(value)
            self.emit(op for op in ops if "K" in op.result.type.shape)
        self.lines.add("for first_column in range(0, V, BV):")
        with self.lines.indented():
            self.lines.add("c = first_column + tl.arange(0, BV)[:, None]")
            self.emit(op for op in ops if is_wide(op.result))
        return self.lines.text()

    def _store(self, value: Value) -> None:
        if any(name == value.name for _, name in self.placement.passed):
            self.lines.add("tl.debug_barrier()")
        super()._store(value)
