"""A tile program as Python source over torch calls, none of them in place: autograd and ``torch.func`` follow it.

``x`` is a flat tensor ``[steps * lanes, rows, cols]``, ``x_n[n]`` one step's slice of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .emitter import TorchEmitter
from .errors import TileProgramError
from .ir import Carry, Op, OpKind, Program, Value
from .partition import sections
from .stages import SCANS, Section

_OWN_NAMES = ("rt", "torch", "tiles", "Rows", "grams", "s", "n", "lo", "hi")
"""Names of the generated function itself."""


def generate(program: Program, *, rounding: Mapping[str, torch.dtype] | None = None) -> str:
    """Source of ``def run(rt)``, where ``rt`` is a :class:`~kdacompile.lowering.executor.Runtime`.

    ``rounding`` maps value names to the dtype their buffer is planned in; those values are rounded to it where they
    are made. The operands and the product inside a ``gated_gram`` called x are ``x_rows`` (the columns are rounded like
    them) and ``x_raw``.
    """
    rounding = dict(rounding or {})
    inside = {
        f"{op.result.name}{part}" for op in program.ops if op.kind is OpKind.GATED_GRAM for part in ("_rows", "_raw")
    }
    unknown = rounding.keys() - {value.name for value in program.values()} - inside
    if unknown:
        raise TileProgramError("rounding names no value", ", ".join(sorted(unknown)))
    return _Generator(program, rounding).source()


class _Torch(TorchEmitter):
    """Values are rounded where they are made; names that the function's own would collide with are kept apart."""

    rounding: Mapping[str, torch.dtype]

    def name(self, value: Value) -> str:
        return f"{value.name}_" if value.name in _OWN_NAMES else value.name

    def define(self, value: Value, text: str) -> None:
        super().define(value, text)
        if value.name in self.rounding:
            name = self.name(value)
            self.lines.add(f"{name} = rt.round({name}, {self.rounding[value.name]})")


class _Generator(_Torch):
    """Text of one program: its sections in order, the scan as a loop.

    Gates may be given as factors, of which the program takes the logarithm. Where only their sums' exponentials are
    read, the logarithm is left out and what would be summed is multiplied: a factor of 0 is exact, and so is its
    gradient.
    """

    def __init__(self, program: Program, rounding: Mapping[str, torch.dtype]) -> None:
        super().__init__(program)
        self.rounding = rounding
        placed = sections(program)
        self.ops = {section: tuple(op for op in program.ops if placed[op] is section) for section in Section}
        self.readers: dict[Value, list[Op]] = {}
        for op in program.ops:
            for value in dict.fromkeys(op.inputs):
                self.readers.setdefault(value, []).append(op)
        self.of_logs: dict[Value, Value] = {}  # logarithms that are left out, and what they would be of
        self.products: set[Value] = set()
        self.defined: set[Value] = set()

    def source(self) -> str:
        self.lines.add("def run(rt):")
        self.lines.open()
        for section in Section:
            if section not in SCANS:
                self.emit(self.ops[section])
            elif (carry := self.program.carry if section is Section.SCAN else self.program.reverse) is not None:
                _Scan(self, carry, section).emit_loops()
        return self.lines.text()

    def define(self, value: Value, text: str) -> None:
        super().define(value, text)
        self.defined.add(value)

    # ---- ops on flat tensors

    def on_store(self, op: Op) -> str:
        self.lines.add(f"rt.store({op.attr('port')!r}, {self.name(op.inputs[0])})")
        return ""

    def on_load(self, op: Op) -> str:
        return f"rt.load({op.attr('port')!r})"

    # ---- gates

    def on_log(self, op: Op) -> str:
        if not all(map(self._only_decays, self.readers[op.result])):
            return self.plain(op)
        self.of_logs[op.result] = op.inputs[0]
        return ""

    def _only_decays(self, op: Op) -> bool:
        """Whether a reader of a gate makes decays of it and nothing else."""
        if op.kind is OpKind.GATED_GRAM:
            return True
        exponentials = all(user.kind is OpKind.EXP for user in self.readers.get(op.result, []))
        return op.kind in (OpKind.CUMSUM, OpKind.REDUCE) and exponentials

    def on_cumsum(self, op: Op) -> str:
        gate = self.of_logs.get(op.inputs[0])
        if gate is None:
            return self.plain(op)
        self.products.add(op.result)
        product = f"tiles.cumprod({self.name(gate)}, reverse={bool(op.attr('reverse', False))})"
        return f"{product}[:, -1:]" if op.kind is OpKind.REDUCE else product

    on_reduce = on_cumsum

    def on_exp(self, op: Op) -> str:
        return self.name(op.inputs[0]) if op.inputs[0] in self.products else self.plain(op)

    def on_gated_gram(self, op: Op) -> str:
        """All of one gate and one set of columns whose rows are there."""
        if op.result in self.defined:
            return ""
        alike = [each for each in self.program.ops if each.kind is op.kind and each.inputs[1:] == op.inputs[1:]]
        ready = [each for each in alike if each.inputs[0] in self.defined]
        cols, gate = op.inputs[1:]
        factor = self.of_logs.get(gate)
        rows = "".join(f"{self.rows(each)}, " for each in ready).strip()
        options = f"factor={factor is not None}"
        self.lines.add(f"grams = gated_grams(({rows}), {self.name(cols)}, {self.name(factor or gate)}, {options})")
        for i, each in enumerate(ready):
            self.define(each.result, f"grams[{i}]")
        return ""

    def rows(self, op: Op) -> str:
        words = [self.name(op.inputs[0]), str(bool(op.attr("strict", False))), str(self.only_inverted(op.result))]
        for part, field in (("_rows", "operands"), ("_raw", "product")):
            dtype = self.rounding.get(op.result.name + part)
            words += [f"{field}={dtype}"] if dtype else []
        return f"Rows({', '.join(words)})"

    def only_inverted(self, value: Value) -> bool:
        """Whether a square matrix only reaches ``unit_lower_inverse``, which reads nothing above the diagonal."""
        readers = self.readers.get(value, [])
        inverse = OpKind.UNIT_LOWER_INVERSE
        return bool(readers) and all(
            op.kind is inverse or (op.kind is OpKind.MUL and self.only_inverted(op.result)) for op in readers
        )


class _Scan(_Torch):
    """The scan of one carry: its operands cut into steps, the loops over sequences and steps, and what is kept.

    The carry that walks from the end goes through sequences and steps in the opposite order; what a step finds is then
    what the others have as the carry behind it.
    """

    def __init__(self, gen: _Generator, carry: Carry, section: Section) -> None:
        super().__init__(gen.program, gen.lines)
        self.gen, self.carry, self.rounding = gen, carry, gen.rounding
        self.reverse = section is Section.REVERSE
        self.nodes = gen.ops[section]
        self.local = dict.fromkeys(op.result for op in self.nodes)
        self.read = next(op.result for op in self.nodes if op.kind is OpKind.CARRY)
        outside = {value for op in gen.ops[Section.EPILOGUE] for value in op.inputs}
        self.joined = [value for value in (self.read, carry.step) if value in outside]
        self.saved = [value for value in self.local if value in outside and value not in self.joined]
        self.steps: dict[tuple[Value, bool], str] = {}

    def emit_loops(self) -> None:
        name, read = self.carry.name, self.name(self.read)
        self._split_operands()
        lists = [f"{each}_n" for each in (*map(self.name, self.saved), name)]
        for each in (*lists, "finals"):
            self.lines.add(f"{each} = []")
        sequences = "enumerate(rt.segments)"
        self.lines.add(f"for s, (lo, hi) in {f'reversed(list({sequences}))' if self.reverse else sequences}:")
        with self.lines.indented():
            self.lines.add(f"{read} = rt.carry_init({self.carry.init!r}, s)")
            self.lines.add(f"for n in {'reversed(range(lo, hi))' if self.reverse else 'range(lo, hi)'}:")
            with self.lines.indented():
                self.emit(self.nodes)
                self.lines.add(f"{read} = {self.name(self.carry.step)}")
            for each in (f"{name}_n", "finals"):
                self.lines.add(f"{each}.append({read})")
        for each in ("finals", *lists) if self.reverse else ():
            self.lines.add(f"{each}.reverse()")
        self.lines.add(f"rt.carry_final({self.carry.final!r}, finals)")
        for value in self.saved:
            self.lines.add(f"{self.name(value)} = torch.cat({self.name(value)}_n)")
        for value in self.joined:  # what a step finds, or leaves
            after = (value == self.read) == self.reverse
            self.gen.define(value, f"rt.carry_join(torch.stack({name}_n), after={after})")

    def _split_operands(self) -> None:
        """Slice the flat operands of the scan, transposed where a product wants it, once and outside the loop."""
        for op in self.nodes:
            for i, value in enumerate(op.inputs):
                turned = op.kind is OpKind.DOT and i < 2 and bool(op.attr("trans_a" if i == 0 else "trans_b", False))
                if value in self.local or (value, turned) in self.steps:
                    continue
                steps = self.steps[value, turned] = self.name(value) + ("_T" if turned else "")
                self.lines.add(f"{steps}_n = rt.split({self.name(value)}{'.mT' if turned else ''})")

    def operand(self, value: Value, op: Op) -> str:
        step = self.steps.get((value, False))
        return self.name(value) if step is None else f"{step}_n[n]"

    def factor(self, value: Value, op: Op, side: str) -> str:
        turned = self.steps.get((value, True)) if op.attr(f"trans_{side}", False) else None
        return super().factor(value, op, side) if turned is None else f"{turned}_n[n]"

    def on_carry(self, op: Op) -> str:
        self.lines.add(f"{self.carry.name}_n.append({self.name(self.read)})")
        return ""

    def define(self, value: Value, text: str) -> None:
        super().define(value, text)
        if value in self.saved:
            self.lines.add(f"{self.name(value)}_n.append({self.name(value)})")
