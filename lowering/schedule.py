"""From a program to the order the torch executor runs by.

Ops on the same gate are drawn together into one :class:`DecayGroup`: the exponentials of its cumulative sums and its
gated Gram matrices all come from one doubling tree (see ``decay.py``), which never forms the sums themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .ir import Op, OpKind, Program, Value
from .partition import sections
from .stages import Section


@dataclass
class DecayGroup:
    """Everything computed from one gate. ``factor``: ``gate`` holds exp(g), whose logarithm the program takes."""

    gate: Value
    factor: bool
    prefix: list[Value] = field(default_factory=list)
    suffix: list[Value] = field(default_factory=list)
    total: list[Value] = field(default_factory=list)
    grams: list[Op] = field(default_factory=list)

    @property
    def inputs(self) -> tuple[Value, ...]:
        operands = [value for op in self.grams for value in op.inputs[:2]]
        return (self.gate, *dict.fromkeys(operands))

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (*self.prefix, *self.suffix, *self.total, *(op.result for op in self.grams))


Node = Op | DecayGroup


@dataclass(frozen=True)
class Schedule:
    """Nodes per section in order, and the square matrices of which nobody reads what is above the diagonal."""

    nodes: dict[Section, tuple[Node, ...]]
    lower_only: frozenset[Value]


def schedule(program: Program) -> Schedule:
    placed = sections(program)
    uses: dict[Value, list[Op]] = {}
    for op in program.ops:
        for value in dict.fromkeys(op.inputs):
            uses.setdefault(value, []).append(op)
    groups, absorbed = _decay_groups(program, uses)
    nodes: dict[Section, list[Node]] = {section: [] for section in Section}
    for op in program.ops:
        if op in groups:
            nodes[placed[op]].append(groups[op])
        if op not in absorbed:
            nodes[placed[op]].append(op)
    lower_only = frozenset(
        op.result
        for op in program.ops
        if op.kind in (OpKind.GATED_GRAM, OpKind.MASK) and _only_inverted(op.result, uses)
    )
    return Schedule({s: tuple(n) for s, n in nodes.items()}, lower_only)


def _only_inverted(value: Value, uses: dict[Value, list[Op]]) -> bool:
    """Whether a square matrix only reaches ``unit_lower_inverse``, which reads nothing above the diagonal."""
    readers = uses.get(value, [])
    through = (OpKind.MUL, OpKind.UNIT_LOWER_INVERSE)
    return bool(readers) and all(
        op.kind in through and (op.kind is OpKind.UNIT_LOWER_INVERSE or _only_inverted(op.result, uses))
        for op in readers
    )


def _decay_groups(program: Program, uses: dict[Value, list[Op]]) -> tuple[dict[Op, DecayGroup], set[Op]]:
    """Groups by the op at which they run, and the ops they stand for."""
    groups: dict[Op, DecayGroup] = {}
    absorbed: set[Op] = set()
    gates = dict.fromkeys(op.inputs[2] for op in program.ops if op.kind is OpKind.GATED_GRAM)
    gates.update(dict.fromkeys(op.inputs[0] for op in program.ops if op.kind is OpKind.CUMSUM))
    for gate in gates:
        group, members = _group(program, gate, uses)
        order = [op for op in program.ops if op in members]
        if all(op.kind is OpKind.LOG for op in order):
            continue  # its sums are read as they are
        position = {value: i for i, op in enumerate(program.ops) for value in [op.output] if value is not None}
        ready = max(position[value] for value in group.inputs)
        first = next(op for op in order if op.kind is not OpKind.LOG)
        index = program.ops.index(first)
        needed = min(
            program.ops.index(op) for op in program.ops if op not in members and set(op.inputs) & set(group.outputs)
        )
        if ready > index:  # operands come later than the first member: run where the last one is ready
            index = ready + 1
            first = program.ops[index]
        if index <= needed:
            groups[first] = group
            absorbed |= members
    return groups, absorbed


def _group(program: Program, gate: Value, uses: dict[Value, list[Op]]) -> tuple[DecayGroup, set[Op]]:
    group = DecayGroup(gate, False)
    members: set[Op] = set()
    slots = {OpKind.CUMSUM: group.prefix, OpKind.REDUCE: group.total}
    for op in uses[gate]:
        if op.kind is OpKind.GATED_GRAM and op.inputs[2] == gate:
            if not group.grams or group.grams[0].inputs[1] == op.inputs[1]:
                group.grams.append(op)
                members.add(op)
        elif op.kind in slots and all(user.kind is OpKind.EXP for user in uses.get(op.result, [])):
            slot = group.suffix if op.attr("reverse", False) else slots[op.kind]
            slot += [user.result for user in uses[op.result]]
            members |= {op, *uses[op.result]}
    made_by = program.producer(gate)
    if made_by.kind is OpKind.LOG and all(op in members for op in uses[gate]):
        group.gate, group.factor = made_by.inputs[0], True
        members.add(made_by)
    return group, members
