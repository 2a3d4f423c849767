"""A tile program as Python source over torch calls.

Two forms of one program: *buffered* reuses memory (operands that die are overwritten, scan results go to preallocated
slots, names are dropped at their last use) and serves inference and custom-op bodies; *functional* has no in-place
operation and serves autograd, ``torch.func`` and tracing. ``x`` is a flat tensor ``[steps * lanes, rows, cols]``,
``x_n[n]`` one step's slice of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .dialects import IN_PLACE, TORCH
from .errors import TileProgramError
from .ir import Carry, Op, OpKind, Per, Program, Value
from .schedule import DecayGroup, Node, schedule
from .stages import Section

_COMMUTES = (OpKind.ADD, OpKind.MUL)


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


def expression(op: Op, refs: list[str], out: str = "") -> str:
    """One op as a torch call on ``refs``, into ``out`` if given (elementwise ops and products only)."""
    into = f", out={out}" if out else ""
    if op.kind is not OpKind.DOT:
        return TORCH.text(op, refs, into=into)
    a, b = (f"{ref}.mT" if op.attr(f"trans_{i}", False) else ref for i, ref in zip("ab", refs[:2], strict=True))
    negate = bool(op.attr("negate", False))
    if len(refs) == 3:
        return f"torch.baddbmm({refs[2]}, {a}, {b}{', alpha=-1' if negate else ''}{into})"
    return f"torch.bmm({a}, {b}{into})" + (".neg()" if negate else "")


class _Generator:
    """Text of one program: its sections in order, the scan as a loop; ``buffered`` as above."""

    def __init__(self, program: Program, buffered: bool, rounding: Mapping[str, torch.dtype]) -> None:
        self.program = program
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
        self.lines: list[str] = []

    def source(self) -> str:
        self.emit("def run(rt):", 0)
        for section in Section:
            if section is Section.SCAN:
                if self.program.carry is not None:
                    self.scan(self.program.carry)
                self.advance()
                continue
            for node in self.plan.nodes[section]:
                self.flat(node)
                self.advance()
        return "\n".join(self.lines) + "\n"

    def emit(self, line: str, depth: int = 1) -> None:
        self.lines.append("    " * depth + line)

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
            self.emit(f"del {', '.join(_name(v) for v in dead)}")
        for value in dead:
            del self.bound[value]
        self.index += 1

    def dies(self, value: Value, op: Op) -> bool:
        """Whether ``op`` may overwrite ``value``: the memory is the program's and nothing reads it from here on."""
        root = self.plan.root[value]
        return (
            self.buffered
            and root in self.owned
            and root.type.shape == value.type.shape == op.result.type.shape
            and self.last_use[root] == self.index
            and sum(self.plan.root[other] == root for other in op.inputs) == 1
        )

    def define(self, value: Value, text: str, *, owned: bool = True) -> None:
        self.emit(f"{_name(value)} = {text}")
        self.bound[value] = None
        if owned and self.plan.root[value] == value:
            self.owned.add(value)
        if value.name in self.rounding:
            self.emit(f"{_name(value)} = rt.round({_name(value)}, {self.rounding[value.name]})")

    # ---- ops on flat tensors

    def flat(self, node: Node) -> None:
        if isinstance(node, DecayGroup):
            self.decay_group(node)
        elif node in self.skipped:
            return
        elif node.kind is OpKind.STORE:
            self.emit(f"rt.store({node.attr('port')!r}, {_name(node.inputs[0])})")
        elif node.kind is OpKind.LOAD:
            self.load(node)
        else:
            text = self.in_place(node) or expression(node, [_name(v) for v in node.inputs])
            self.define(node.result, text, owned=node.kind is not OpKind.EYE)

    def load(self, op: Op) -> None:
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

    def decay_group(self, group: DecayGroup) -> None:
        rows = "".join(f"{self.rows(op)}, " for op in group.grams)
        cols = _name(group.grams[0].inputs[1]) if group.grams else "None"
        overwrite = self.buffered and self.plan.root[group.gate] in self.owned and self.last(group.gate) == self.index
        options = f"factor={group.factor}, overwrite={overwrite}"
        self.emit(f"decays = rt.decays({_name(group.gate)}, ({rows.strip()}), {cols}, {options})")
        for slot in ("prefix", "suffix", "total"):
            for i, value in enumerate(getattr(group, slot)):
                self.define(value, f"decays.{slot}", owned=i == 0 and len(getattr(group, slot)) == 1)
        for i, op in enumerate(group.grams):
            self.define(op.result, f"decays.grams[{i}]")
        self.emit("del decays")

    def rows(self, op: Op) -> str:
        words = [_name(op.inputs[0]), str(bool(op.attr("strict", False))), str(op.result in self.plan.lower_only)]
        for part, field in (("_rows", "operands"), ("_raw", "product")):
            dtype = self.rounding.get(op.result.name + part)
            words += [f"{field}={dtype}"] if dtype else []
        return f"Rows({', '.join(words)})"

    def in_place(self, op: Op) -> str:
        """The op as an overwrite of a dying operand, or ''."""
        refs = [_name(v) for v in op.inputs]
        if op.kind is OpKind.DOT and len(refs) == 3 and self.dies(op.inputs[2], op):
            return expression(op, refs).replace(f"torch.baddbmm({refs[2]}, ", f"{refs[2]}.baddbmm_(")
        if op.kind is OpKind.MASK and self.dies(op.inputs[0], op):
            return f"tiles.lower_({refs[0]}, strict={bool(op.attr('strict', False))})"
        if op.kind in IN_PLACE and self.dies(op.inputs[0], op):
            return f"{refs[0]}.{IN_PLACE[op.kind]}({', '.join(refs[1:])})"
        if op.kind in _COMMUTES and self.dies(op.inputs[1], op):
            return f"{refs[1]}.{IN_PLACE[op.kind]}({refs[0]})"
        return ""

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
            self._make_room(_name(value), f"rt.slots({value.type.rows!r}, {value.type.cols!r})")
        self._make_room(carry.name, "rt.carry_slots()")
        self.emit("finals = []")
        self.emit("for s, (lo, hi) in enumerate(rt.segments):")
        slot = f", {carry.name}_n[lo + s]" if self.buffered else ""
        self.emit(f"{_name(read)} = rt.carry_init({carry.init!r}, s{slot})", 2)
        self.emit("for n in range(lo, hi):", 2)
        body = _Body(self, carry, read, fresh, steps, reused)
        for op in self.scan_nodes:
            body.step(op)
        body.close()
        self.emit(f"rt.carry_final({carry.final!r}, finals)")
        for value in saved:
            joined = f"{_name(value)}_all.flatten(0, 1)" if self.buffered else f"torch.cat({_name(value)}_n)"
            self.define(value, _name(reused[value]) if value in reused else joined)
        carries = f"{carry.name}_all" if self.buffered else f"torch.stack({carry.name}_n)"
        for value, after in ((read, False), (carry.step, True)):
            if value in outside:
                self.define(value, f"rt.carry_join({carries}, after={after})", owned=False)
        if self.buffered:
            names = [f"{name}_n" for name in (*steps.values(), carry.name)] + [f"{carry.name}_all", "finals"]
            self.emit(f"del {', '.join(names)}")

    def _make_room(self, name: str, slots: str) -> None:
        """Slots for every step's value: preallocated, or a list to append to."""
        if self.buffered:
            self.emit(f"{name}_all = {slots}")
            self.emit(f"{name}_n = {name}_all.unbind(0)")
        else:
            self.emit(f"{name}_n = []")

    def _split_operands(self, local: set[Value]) -> dict[tuple[Value, bool], str]:
        """Slice the flat operands of the scan, transposed where a product wants it, once and outside the loop."""
        steps: dict[tuple[Value, bool], str] = {}
        for op in self.scan_nodes:
            for i, value in enumerate(op.inputs):
                turned = op.kind is OpKind.DOT and i < 2 and bool(op.attr("trans_a" if i == 0 else "trans_b", False))
                if value in local or (value, turned) in steps:
                    continue
                steps[value, turned] = _name(value) + ("_T" if turned else "")
                self.emit(f"{steps[value, turned]}_n = rt.split({_name(value)}{'.mT' if turned else ''})")
        return steps

    def _reused(self, saved: list[Value]) -> dict[Value, Value]:
        """Saved results that accumulate into a flat operand nobody else reads: the operand's memory becomes theirs."""
        reused: dict[Value, Value] = {}
        for op in self.scan_nodes:
            if op.result in saved and op.kind is OpKind.DOT and len(op.inputs) == 3:
                acc = op.inputs[2]
                readers = [user for user in self.plan.uses[acc] if user in self.scan_nodes]
                if acc in self.bound and self.dies(acc, op) and len(readers) == 1:
                    reused[op.result] = acc
        return reused


class _Body:
    """The lines inside the loop over steps."""

    def __init__(
        self,
        gen: _Generator,
        carry: Carry,
        read: Value,
        saved: list[Value],
        steps: dict[tuple[Value, bool], str],
        reused: dict[Value, Value],
    ) -> None:
        self.gen, self.carry, self.read, self.saved, self.steps, self.reused = gen, carry, read, saved, steps, reused
        self.slot = f"{carry.name}_n[n + s + 1]"
        self.merged = self._merged()

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

    def ref(self, value: Value, turned: bool = False) -> str:
        if (value, turned) in self.steps:
            return f"{self.steps[value, turned]}_n[n]"
        return _name(value) + (".mT" if turned else "")

    def step(self, op: Op) -> None:
        if op.kind is OpKind.CARRY:
            if not self.gen.buffered:
                self.gen.emit(f"{self.carry.name}_n.append({_name(self.read)})", 3)
            return
        dot = op.kind is OpKind.DOT
        refs = [
            self.ref(v, dot and i < 2 and bool(op.attr("trans_a" if i == 0 else "trans_b", False)))
            for i, v in enumerate(op.inputs)
        ]
        plain = Op(op.kind, op.inputs, op.output, tuple(a for a in op.attrs if a[0] not in ("trans_a", "trans_b")))
        self.gen.emit(f"{_name(op.result)} = {self._text(plain, refs)}", 3)
        if op.result.name in self.gen.rounding:
            name = _name(op.result)
            self.gen.emit(f"{name} = rt.round({name}, {self.gen.rounding[op.result.name]})", 3)
        if op.result in self.saved and not self.gen.buffered:
            self.gen.emit(f"{_name(op.result)}_n.append({_name(op.result)})", 3)

    def _text(self, op: Op, refs: list[str]) -> str:
        if not self.gen.buffered:
            return expression(op, refs)
        if op.result in self.reused or (op.result == self.carry.step and self.merged is not None):
            if op.kind is OpKind.ADD:
                return f"{refs[0]}.add_({refs[1]})"
            return expression(op, refs).replace(f"torch.baddbmm({refs[2]}, ", f"{refs[2]}.baddbmm_(")
        if op.result == self.carry.step or op.result == self.merged:
            return expression(op, refs, self.slot)
        return expression(op, refs, f"{_name(op.result)}_n[n]" if op.result in self.saved else "")

    def close(self) -> None:
        self.gen.emit(f"{_name(self.read)} = {_name(self.carry.step)}", 3)
        if not self.gen.buffered:
            self.gen.emit(f"{self.carry.name}_n.append({_name(self.read)})", 2)
        self.gen.emit(f"finals.append({_name(self.read)})", 2)


def local_order(nodes: tuple[Op, ...]) -> list[Value]:
    return list(dict.fromkeys(op.result for op in nodes))


def _name(value: Value) -> str:
    """The value's name; run-time names of the generated function are kept apart by an underscore."""
    return (
        f"{value.name}_"
        if value.name in ("rt", "torch", "tiles", "Rows", "decays", "s", "n", "lo", "hi")
        else value.name
    )
