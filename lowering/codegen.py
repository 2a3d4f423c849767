"""A tile program as Python source over torch calls.

Two forms of one program: *buffered* reuses memory (operands that die are overwritten, scan results go to preallocated
slots, names are dropped at their last use) and serves inference and custom-op bodies; *functional* has no in-place
operation and serves autograd, ``torch.func`` and tracing. ``x`` is a flat tensor ``[steps * lanes, rows, cols]``,
``x_n[n]`` one step's slice of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .dialects import IN_PLACE
from .emitter import TorchEmitter
from .errors import TileProgramError
from .ir import Carry, Op, OpKind, Per, Program, Value
from .schedule import DecayGroup, schedule
from .stages import SCANS, Section

_OWN_NAMES = ("rt", "torch", "tiles", "Rows", "decays", "s", "n", "lo", "hi")
"""Names of the generated function itself."""


def generate(program: Program, *, buffered: bool, rounding: Mapping[str, torch.dtype] | None = None) -> str:
    """Source of ``def run(rt)``, where ``rt`` is a :class:`~kdacompile.lowering.executor.Runtime`.

    ``rounding`` maps value names to the dtype their buffer is planned in; those values are rounded to it where they
    are made (in the functional form only, whose values are never overwritten). The operands and the product inside a
    ``gated_gram`` called x are ``x_rows`` (the columns are rounded like them) and ``x_raw``.
    """
    rounding = dict(rounding or {})
    inside = {
        f"{op.result.name}{part}" for op in program.ops if op.kind is OpKind.GATED_GRAM for part in ("_rows", "_raw")
    }
    unknown = rounding.keys() - {value.name for value in program.values()} - inside
    if unknown or (rounding and buffered):
        raise TileProgramError("rounding names no value, or the form is buffered", ", ".join(sorted(unknown)))
    return _Generator(program, buffered, rounding).source()


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
    """Text of one program: its sections in order, the scan as a loop; ``buffered`` as above."""

    def __init__(self, program: Program, buffered: bool, rounding: Mapping[str, torch.dtype]) -> None:
        super().__init__(program)
        self.buffered = buffered
        self.rounding = rounding
        self.plan = schedule(program)
        self.last_use = self._last_uses()
        self.index = 0
        self.bound: dict[Value, None] = {}  # flat values with a live name, in order
        self.owned: set[Value] = set()  # roots whose memory this program allocated
        self.skipped: set[Op] = set()

    def source(self) -> str:
        self.lines.add("def run(rt):")
        self.lines.open()
        for section in Section:
            if section in SCANS:
                carry = self.program.carry if section is Section.SCAN else self.program.reverse
                if carry is not None:
                    _Scan(self, carry, section).emit_loops()
                self.advance()
                continue
            for node in self.plan.nodes[section]:
                if isinstance(node, DecayGroup):
                    self.decay_group(node)
                elif node not in self.skipped:
                    self.emit([node])
                self.advance()
        return self.lines.text()

    # ---- liveness of flat values

    def _last_uses(self) -> dict[Value, int]:
        """By root, the place of the last node that reads it; a scan has one place."""
        last: dict[Value, int] = {}
        index = 0
        for section in Section:
            for node in self.plan.nodes[section]:
                last.update(dict.fromkeys((self.plan.root[value] for value in node.inputs), index))
                index += section not in SCANS
            index += section in SCANS
        return last

    def last(self, value: Value) -> int:
        return self.last_use.get(self.plan.root[value], -1)

    def advance(self) -> None:
        """Drop what the current node was the last to read."""
        dead = [v for v in self.bound if self.last(v) <= self.index]
        if dead and self.buffered:
            self.lines.add(f"del {', '.join(self.name(v) for v in dead)}")
        for value in dead:
            del self.bound[value]
        self.index += 1

    def overwrites(self, value: Value, op: Op) -> bool:
        """Where the memory is the program's and nothing reads it from here on."""
        root = self.plan.root[value]
        return (
            self.buffered
            and root in self.owned
            and root.type.shape == value.type.shape == op.result.type.shape
            and self.last_use[root] == self.index
            and sum(self.plan.root[other] == root for other in op.inputs) == 1
        )

    def define(self, value: Value, text: str, *, owned: bool = True) -> None:
        super().define(value, text)
        self.bound[value] = None
        if owned and self.plan.root[value] == value:
            self.owned.add(value)

    # ---- ops on flat tensors

    def on_store(self, op: Op) -> str:
        self.lines.add(f"rt.store({op.attr('port')!r}, {self.name(op.inputs[0])})")
        return ""

    def on_eye(self, op: Op) -> str:
        self.define(op.result, self.plain(op), owned=False)
        return ""

    def on_load(self, op: Op) -> str:
        """A load; a scalar factor on the loaded tile is applied while it is copied."""
        port = self.program.port(str(op.attr("port")))
        value, chain, factor = op.result, [], ""
        while not factor and len(users := self.plan.uses.get(value, [])) == 1 and value.name not in self.rounding:
            if users[0].kind not in (OpKind.CAST, OpKind.SCALE):
                break
            chain.append(users[0])
            factor = str(users[0].attr("by")) if users[0].kind is OpKind.SCALE else ""
            value = users[0].result
        if not factor:
            value, chain = op.result, []
        self.skipped.update(chain)
        call = f"rt.load({port.name!r}, {factor!r})" if factor else f"rt.load({port.name!r})"
        self.define(value, call, owned=port.per is Per.TOKENS)
        return ""

    def decay_group(self, group: DecayGroup) -> None:
        rows = "".join(f"{self.rows(op)}, " for op in group.grams)
        cols = self.name(group.grams[0].inputs[1]) if group.grams else "None"
        overwrite = self.buffered and self.plan.root[group.gate] in self.owned and self.last(group.gate) == self.index
        options = f"factor={group.factor}, overwrite={overwrite}"
        self.lines.add(f"decays = rt.decays({self.name(group.gate)}, ({rows.strip()}), {cols}, {options})")
        for slot in ("prefix", "suffix", "total"):
            for i, value in enumerate(getattr(group, slot)):
                self.define(value, f"decays.{slot}", owned=i == 0 and len(getattr(group, slot)) == 1)
        for i, op in enumerate(group.grams):
            self.define(op.result, f"decays.grams[{i}]")
        self.lines.add("del decays")

    def rows(self, op: Op) -> str:
        words = [self.name(op.inputs[0]), str(bool(op.attr("strict", False))), str(op.result in self.plan.lower_only)]
        for part, field in (("_rows", "operands"), ("_raw", "product")):
            dtype = self.rounding.get(op.result.name + part)
            words += [f"{field}={dtype}"] if dtype else []
        return f"Rows({', '.join(words)})"

    # ---- the scan

    def make_room(self, name: str, slots: str) -> None:
        """Slots for every step's value: preallocated, or a list to append to."""
        if self.buffered:
            self.lines.add(f"{name}_all = {slots}")
            self.lines.add(f"{name}_n = {name}_all.unbind(0)")
        else:
            self.lines.add(f"{name}_n = []")


class _Scan:
    """The scan of one carry: its operands cut into steps, the loops over sequences and steps, and what is kept.

    The carry that walks from the end goes through sequences and steps in the opposite order; what a step finds is then
    what the others have as the carry behind it.
    """

    def __init__(self, gen: _Generator, carry: Carry, section: Section) -> None:
        self.gen, self.carry, self.lines = gen, carry, gen.lines
        self.reverse = section is Section.REVERSE
        self.nodes = tuple(op for op in gen.plan.nodes[section] if isinstance(op, Op))
        self.local = {op.result for op in self.nodes}
        self.read = next(op.result for op in self.nodes if op.kind is OpKind.CARRY)
        self.outside = {v for node in gen.plan.nodes[Section.EPILOGUE] for v in node.inputs if v in self.local}
        ends = (self.read, carry.step)
        self.saved = [v for v in local_order(self.nodes) if v in self.outside and v not in ends]
        self.reused = self._reused()
        self.fresh = [value for value in self.saved if value not in self.reused]

    def emit_loops(self) -> None:
        gen, carry = self.gen, self.carry
        steps = self._split_operands()
        for value in self.fresh:
            gen.make_room(gen.name(value), f"rt.slots({value.type.rows!r}, {value.type.cols!r})")
        gen.make_room(carry.name, f"rt.carry_slots({carry.init!r})")
        self.lines.add("finals = []")
        sequences = "enumerate(rt.segments)"
        sequences = f"reversed(list({sequences}))" if self.reverse else sequences
        self.lines.add(f"for s, (lo, hi) in {sequences}:")
        with self.lines.indented():
            first = f", {carry.name}_n[{'hi' if self.reverse else 'lo'} + s]" if gen.buffered else ""
            self.lines.add(f"{gen.name(self.read)} = rt.carry_init({carry.init!r}, s{first})")
            _Body(self, steps).loop()
        if self.reverse:
            lists = [] if gen.buffered else [f"{name}_n" for name in (*map(gen.name, self.fresh), carry.name)]
            for name in ("finals", *lists):
                self.lines.add(f"{name}.reverse()")
        self.lines.add(f"rt.carry_final({carry.final!r}, finals)")
        self._join()
        if gen.buffered:
            names = [f"{name}_n" for name in (*steps.values(), carry.name)] + [f"{carry.name}_all", "finals"]
            self.lines.add(f"del {', '.join(names)}")

    def _join(self) -> None:
        """Name what the epilogue reads of all steps."""
        gen, name = self.gen, self.carry.name
        for value in self.saved:
            each = gen.name(value)
            joined = f"{each}_all.flatten(0, 1)" if gen.buffered else f"torch.cat({each}_n)"
            gen.define(value, gen.name(self.reused[value]) if value in self.reused else joined)
        carries = f"{name}_all" if gen.buffered else f"torch.stack({name}_n)"
        for value, after in ((self.read, self.reverse), (self.carry.step, not self.reverse)):
            if value in self.outside:
                gen.define(value, f"rt.carry_join({carries}, after={after})", owned=False)

    def _split_operands(self) -> dict[tuple[Value, bool], str]:
        """Slice the flat operands of the scan, transposed where a product wants it, once and outside the loop."""
        steps: dict[tuple[Value, bool], str] = {}
        for op in self.nodes:
            for i, value in enumerate(op.inputs):
                turned = op.kind is OpKind.DOT and i < 2 and bool(op.attr("trans_a" if i == 0 else "trans_b", False))
                if value in self.local or (value, turned) in steps:
                    continue
                steps[value, turned] = self.gen.name(value) + ("_T" if turned else "")
                self.lines.add(f"{steps[value, turned]}_n = rt.split({self.gen.name(value)}{'.mT' if turned else ''})")
        return steps

    def _reused(self) -> dict[Value, Value]:
        """Saved results that accumulate into a flat operand nobody else reads: the operand's memory becomes theirs."""
        gen, reused = self.gen, dict[Value, Value]()
        for op in self.nodes:
            if op.result in self.saved and op.kind is OpKind.DOT and len(op.inputs) == 3:
                acc = op.inputs[2]
                readers = [user for user in gen.plan.uses[acc] if user in self.nodes]
                if acc in gen.bound and gen.overwrites(acc, op) and len(readers) == 1:
                    reused[op.result] = acc
        return reused


class _Body(_Torch):
    """The loop over steps."""

    def __init__(self, scan: _Scan, steps: dict[tuple[Value, bool], str]) -> None:
        super().__init__(scan.gen.program, scan.gen.lines)
        self.gen, self.carry, self.read, self.saved = scan.gen, scan.carry, scan.read, scan.fresh
        self.nodes, self.reused, self.reverse, self.steps = scan.nodes, scan.reused, scan.reverse, steps
        self.rounding = scan.gen.rounding
        self.merged = self._merged()

    def loop(self) -> None:
        kept = [] if self.gen.buffered else [f"{self.carry.name}_n.append({self.name(self.read)})"]
        self.lines.add(f"for n in {'reversed(range(lo, hi))' if self.reverse else 'range(lo, hi)'}:")
        with self.lines.indented():
            self.emit(self.nodes)
            self.lines.add(f"{self.name(self.read)} = {self.name(self.carry.step)}")
        for line in (*kept, f"finals.append({self.name(self.read)})"):
            self.lines.add(line)

    def _merged(self) -> Value | None:
        """The accumulator of the carry's step if it may be formed in the step's own memory."""
        step = self.gen.program.producer(self.carry.step)
        if not self.gen.buffered or step.kind not in (OpKind.DOT, OpKind.ADD) or step != self.nodes[-1]:
            return None
        acc = step.inputs[2] if step.kind is OpKind.DOT and len(step.inputs) == 3 else step.inputs[0]
        made = next((op for op in self.nodes if op.result == acc), None)
        if made is None or made.kind not in IN_PLACE or acc in self.saved:
            return None
        return acc

    def operand(self, value: Value, op: Op) -> str:
        step = self.steps.get((value, False))
        return self.name(value) if step is None else f"{step}_n[n]"

    def factor(self, value: Value, op: Op, side: str) -> str:
        turned = self.steps.get((value, True)) if op.attr(f"trans_{side}", False) else None
        return super().factor(value, op, side) if turned is None else f"{turned}_n[n]"

    def overwrites(self, value: Value, op: Op) -> bool:
        """The accumulators of the step and of what is reused."""
        if op.result != self.carry.step or self.merged is None:
            return op.result in self.reused and value == op.inputs[-1]
        return value == self.merged

    def into(self, op: Op) -> str:
        if not self.gen.buffered:
            return ""
        if op.result in (self.carry.step, self.merged):
            return f"{self.carry.name}_n[n + s{'' if self.reverse else ' + 1'}]"
        return f"{self.name(op.result)}_n[n]" if op.result in self.saved else ""

    def on_carry(self, op: Op) -> str:
        if not self.gen.buffered:
            self.lines.add(f"{self.carry.name}_n.append({self.name(self.read)})")
        return ""

    def define(self, value: Value, text: str) -> None:
        super().define(value, text)
        if value in self.saved and not self.gen.buffered:
            self.lines.add(f"{self.name(value)}_n.append({self.name(value)})")


def local_order(nodes: tuple[Op, ...]) -> list[Value]:
    return list(dict.fromkeys(op.result for op in nodes))
