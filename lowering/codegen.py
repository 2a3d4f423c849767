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
from .schedule import DecayGroup, Node, schedule
from .stages import Section

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
        self.scan_nodes = tuple(op for op in self.plan.nodes[Section.SCAN] if isinstance(op, Op))
        self.scan_index = len(self.plan.nodes[Section.PROLOGUE])
        self.last_use = self._last_uses()
        self.index = 0
        self.bound: dict[Value, None] = {}  # flat values with a live name, in order
        self.owned: set[Value] = set()  # roots whose memory this program allocated
        self.skipped: set[Op] = set()

    def source(self) -> str:
        self.lines.add("def run(rt):")
        self.lines.open()
        for section in Section:
            if section is Section.SCAN:
                if self.program.carry is not None:
                    self.scan(self.program.carry)
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
        last: dict[Value, int] = {}
        order: list[Node] = [*self.plan.nodes[Section.PROLOGUE], *self.scan_nodes, *self.plan.nodes[Section.EPILOGUE]]
        for position, node in enumerate(order):
            index = (
                position if position < self.scan_index else max(self.scan_index, position - len(self.scan_nodes) + 1)
            )
            for value in node.inputs:
                last[self.plan.root[value]] = index
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

    def scan(self, carry: Carry) -> None:
        local = {op.result for op in self.scan_nodes}
        read = next(op.result for op in self.scan_nodes if op.kind is OpKind.CARRY)
        outside = {v for node in self.plan.nodes[Section.EPILOGUE] for v in node.inputs if v in local}
        saved = [v for v in local_order(self.scan_nodes) if v in outside and v not in (read, carry.step)]
        steps = self._split_operands(local)
        reused = self._reused(saved)
        fresh = [value for value in saved if value not in reused]
        for value in fresh:
            self._make_room(self.name(value), f"rt.slots({value.type.rows!r}, {value.type.cols!r})")
        self._make_room(carry.name, "rt.carry_slots()")
        self.lines.add("finals = []")
        self.lines.add("for s, (lo, hi) in enumerate(rt.segments):")
        with self.lines.indented():
            slot = f", {carry.name}_n[lo + s]" if self.buffered else ""
            self.lines.add(f"{self.name(read)} = rt.carry_init({carry.init!r}, s{slot})")
            _Body(self, carry, read, fresh, steps, reused).loop()
        self.lines.add(f"rt.carry_final({carry.final!r}, finals)")
        for value in saved:
            joined = f"{self.name(value)}_all.flatten(0, 1)" if self.buffered else f"torch.cat({self.name(value)}_n)"
            self.define(value, self.name(reused[value]) if value in reused else joined)
        carries = f"{carry.name}_all" if self.buffered else f"torch.stack({carry.name}_n)"
        for value, after in ((read, False), (carry.step, True)):
            if value in outside:
                self.define(value, f"rt.carry_join({carries}, after={after})", owned=False)
        if self.buffered:
            names = [f"{name}_n" for name in (*steps.values(), carry.name)] + [f"{carry.name}_all", "finals"]
            self.lines.add(f"del {', '.join(names)}")

    def _make_room(self, name: str, slots: str) -> None:
        """Slots for every step's value: preallocated, or a list to append to."""
        if self.buffered:
            self.lines.add(f"{name}_all = {slots}")
            self.lines.add(f"{name}_n = {name}_all.unbind(0)")
        else:
            self.lines.add(f"{name}_n = []")

    def _split_operands(self, local: set[Value]) -> dict[tuple[Value, bool], str]:
        """Slice the flat operands of the scan, transposed where a product wants it, once and outside the loop."""
        steps: dict[tuple[Value, bool], str] = {}
        for op in self.scan_nodes:
            for i, value in enumerate(op.inputs):
                turned = op.kind is OpKind.DOT and i < 2 and bool(op.attr("trans_a" if i == 0 else "trans_b", False))
                if value in local or (value, turned) in steps:
                    continue
                steps[value, turned] = self.name(value) + ("_T" if turned else "")
                self.lines.add(f"{steps[value, turned]}_n = rt.split({self.name(value)}{'.mT' if turned else ''})")
        return steps

    def _reused(self, saved: list[Value]) -> dict[Value, Value]:
        """Saved results that accumulate into a flat operand nobody else reads: the operand's memory becomes theirs."""
        reused: dict[Value, Value] = {}
        for op in self.scan_nodes:
            if op.result in saved and op.kind is OpKind.DOT and len(op.inputs) == 3:
                acc = op.inputs[2]
                readers = [user for user in self.plan.uses[acc] if user in self.scan_nodes]
                if acc in self.bound and self.overwrites(acc, op) and len(readers) == 1:
                    reused[op.result] = acc
        return reused


class _Body(_Torch):
    """The loop over steps."""

    def __init__(
        self,
        gen: _Generator,
        carry: Carry,
        read: Value,
        saved: list[Value],
        steps: dict[tuple[Value, bool], str],
        reused: dict[Value, Value],
    ) -> None:
        super().__init__(gen.program, gen.lines)
        self.gen, self.carry, self.read, self.saved, self.steps, self.reused = gen, carry, read, saved, steps, reused
        self.rounding = gen.rounding
        self.merged = self._merged()

    def loop(self) -> None:
        kept = [] if self.gen.buffered else [f"{self.carry.name}_n.append({self.name(self.read)})"]
        self.lines.add("for n in range(lo, hi):")
        with self.lines.indented():
            self.emit(self.gen.scan_nodes)
            self.lines.add(f"{self.name(self.read)} = {self.name(self.carry.step)}")
        for line in (*kept, f"finals.append({self.name(self.read)})"):
            self.lines.add(line)

    def _merged(self) -> Value | None:
        """The accumulator of the carry's step if it may be formed in the step's own memory."""
        step = self.gen.program.producer(self.carry.step)
        if not self.gen.buffered or step.kind not in (OpKind.DOT, OpKind.ADD) or step != self.gen.scan_nodes[-1]:
            return None
        acc = step.inputs[2] if step.kind is OpKind.DOT and len(step.inputs) == 3 else step.inputs[0]
        made = next((op for op in self.gen.scan_nodes if op.result == acc), None)
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
            return f"{self.carry.name}_n[n + s + 1]"
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
