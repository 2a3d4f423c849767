"""The buffer plan: every tensor that crosses a stage, in which dtype and why, how long, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice, permutations

from ..ir import DType, OpKind, Value
from ..stages import Buffer, Scope, Task
from ..target import Target, Unit
from .hazards import Order
from .split import Graph, PlacedRun

_MOST_PACKINGS = 5040  # all orders of seven buffers
_LINEAR = (OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.SCALE, OpKind.NEG, OpKind.MASK, OpKind.TRANSPOSE)


class Rule:
    """Which dtype a value crosses in.

    What Vec makes for a product is narrow already: its cast is part of the program. A sum that Cube hands up is fp32
    and stays so for the reasons named here; where every reader rounds it to the inputs' dtype anyway, it crosses in it.
    """

    def __init__(self, graph: Graph, target: Target, *, narrow: bool, narrow_update: bool) -> None:
        self.graph, self.narrow, self.narrow_update = graph, narrow and target.outputs == "auto", narrow_update
        self.operands_in_memory = target.own_operands == "global"
        self.cube_narrows = target.narrows

    def dtype(self, value: Value) -> tuple[DType, str]:
        if value.type.dtype is DType.IO:
            return DType.IO, ""
        if not self.narrow:
            return DType.ACC, "as made"
        if 1 in value.type.shape:
            return DType.ACC, "one number a row: nothing to gain"
        if not self.cube_narrows and self.graph.made[value].unit is Unit.CUBE:
            return DType.ACC, "stored as it was summed"
        reason = self._why_wide(value)
        return (DType.ACC, reason) if reason else (DType.IO, "")

    def _why_wide(self, value: Value) -> str:
        for task in self.graph.readers(value):
            reason = self._reader_needs(task, value)
            if reason:
                return reason
        return ""

    def _reader_needs(self, task: Task, value: Value) -> str:
        """Why ``task`` needs ``value`` wide, or nothing where it (or what it makes) is rounded anyway."""
        if task.op.kind is OpKind.CAST:
            return ""
        if task.op.kind is OpKind.DOT and task.inputs[2:] == (value,) and task.output not in self.graph.last:
            return self._why_wide(task.output)  # a sum goes on from it
        others = [v for v in task.inputs if v != value]
        if task.output in self.graph.last:
            if task.op.kind is OpKind.ADD and self.narrow_update:
                return ""
            return "goes into the fp32 master state"
        if any(v in self.graph.next for v in others):
            return "scales the fp32 master state"
        if task.op.kind is OpKind.DOT:
            return "multiplied as it is"
        if task.op.kind is OpKind.UNIT_LOWER_INVERSE:
            return "the triangular inverse amplifies its error"
        if task.op.kind is OpKind.GATED_GRAM or task.op.kind in _LINEAR:
            return self._why_wide(task.output)
        return f"{task.op.kind.value} of a rounded number is not a rounded {task.op.kind.value}"


def buffers(graph: Graph, runs: Sequence[PlacedRun], rule: Rule, tiles: int) -> list[Buffer]:
    """Every buffer of a plan, ports first; workspaces have no addresses yet."""
    home: dict[Task, PlacedRun] = {}
    for run in runs:
        for task in run.tasks:
            home.setdefault(task, run)
    crossing = (_crossing(task, run, home, graph, rule, tiles) for task, run in home.items())
    return _ports(graph, runs, home) + [buffer for buffer in crossing if buffer is not None]


def lies_beside(task: Task) -> bool:
    """Whether Cube puts what it makes beside what is in a tensor already."""
    return task.unit is Unit.CUBE and task.op.kind is OpKind.CAST and len(task.inputs) > 1


def is_cheap(graph: Graph, task: Task) -> bool:
    """Made from the caller's tensors by next to nothing: a stage that wants it makes it again."""
    from_ports = all(v not in graph.made and v not in graph.next for v in task.inputs)
    return from_ports and task.unit is Unit.VEC and task.op.kind in (OpKind.SCALE, OpKind.TRANSPOSE)


def _crossing(
    task: Task, run: PlacedRun, home: Mapping[Task, PlacedRun], graph: Graph, rule: Rule, tiles: int
) -> Buffer | None:
    value = task.output
    if value in graph.last:
        return _state(value, run, home, graph, tiles)
    readers = [t for t in graph.readers(value) if home[t] is run or task not in home[t].tasks]
    elsewhere = tuple(dict.fromkeys(home[t].name for t in readers if home[t] is not run))
    columns = tiles if "V" in value.type.shape else 1
    if all(home[t].section is run.section and t.unit is task.unit for t in readers):
        operand = any(t.op.kind is OpKind.DOT and value in t.inputs[:2] for t in readers)
        operand = (operand or task.part == "left") and not lies_beside(task)
        if not elsewhere and not (run.unit is Unit.CUBE and operand):
            return None
        in_memory = (
            operand and run.unit is Unit.CUBE and rule.operands_in_memory and task.part != "join"
        )  # that takes its blocks' place
        return Buffer(
            value.name,
            value.type.shape,
            value.type.dtype,
            "group",
            Scope.LOCAL,
            run.name,
            elsewhere or (run.name,),
            "",
            columns,
            lifetime=_lifetime(task, run, readers, home) if in_memory else None,
        )
    dtype, reason = rule.dtype(value)
    if any(home[t].section is not run.section for t in readers):
        return Buffer(value.name, value.type.shape, dtype, "step", Scope.TENSOR, run.name, elsewhere, reason, columns)
    return Buffer(
        value.name,
        value.type.shape,
        dtype,
        "group",
        Scope.WORKSPACE,
        run.name,
        elsewhere,
        reason,
        columns,
        lifetime=_lifetime(task, run, [t for t in readers if home[t].unit is not run.unit], home),
    )


def _state(value: Value, run: PlacedRun, home: Mapping[Task, PlacedRun], graph: Graph, tiles: int) -> Buffer:
    """The carry: resident where it is stepped, unless another section reads it as it is."""
    carried = graph.last[value]
    readers = tuple(t for v in (value, carried) for t in graph.readers(v))
    elsewhere = tuple(dict.fromkeys(home[t].name for t in readers if home[t].section is not run.section))
    scope = Scope.TENSOR if elsewhere else Scope.CARRY
    layout = "step" if elsewhere else "group"
    reason = "the master state never leaves as anything less"
    return Buffer(carried.name, value.type.shape, DType.ACC, layout, scope, run.name, elsewhere, reason, tiles)


def _lifetime(task: Task, run: PlacedRun, readers: Sequence[Task], home: Mapping[Task, PlacedRun]) -> tuple[int, int]:
    """First write and last read as positions in the section's order of tasks; one past its end is the next step's."""
    period = 1 + max(r.start + len(r.tasks) - 1 for r in home.values() if r.section is run.section)

    def when(t: Task) -> int:
        return home[t].start + home[t].tasks.index(t) - period * home[t].shift.get(t.name, 0)

    first, last = when(task), max(when(t) for t in readers)
    lift = -(first // period) * period
    return (first + lift, last + lift)


def _ports(graph: Graph, runs: Sequence[PlacedRun], home: Mapping[Task, PlacedRun]) -> list[Buffer]:
    """The caller's tensors, with the stages that read or write them."""
    program = graph.program
    found: list[Buffer] = []
    for op in program.ops:
        if op.kind is OpKind.LOAD:
            port = program.port(str(op.attr("port")))
            readers = tuple(run.name for run in runs if any(op.result in t.inputs for t in run.tasks))
            found.append(Buffer(port.name, port.type.shape, port.type.dtype, port.per.value, Scope.PORT, "", readers))
        elif op.kind is OpKind.STORE:
            port = program.port(str(op.attr("port")))
            made = graph.made.get(op.inputs[0])
            writer = "" if made is None else home[made].name
            found.append(Buffer(port.name, port.type.shape, port.type.dtype, port.per.value, Scope.PORT, writer))
    for carry in program.carries:
        scan = next(run for task, run in home.items() if task.output == carry.step)
        for name, sides in ((carry.init, ("", (scan.name,))), (carry.final, (scan.name, ()))):
            found.append(Buffer(name, carry.type.shape, DType.ACC, "lane", Scope.PORT, *sides))
    return found


# ---- addresses


def allocate(
    workspaces: Sequence[Buffer], order: Order, sizes: Mapping[str, int], widths: Mapping[DType, int], *, reuse: bool
) -> tuple[list[Buffer], int, int]:
    """Give the workspaces of one section their copies and addresses.

    Without ``reuse`` every tile has its own bytes, in the order they are first written. With it, tiles of the value
    columns are laid out alike, one after the other, and inside one tile buffers share bytes unless they may be alive
    at once (:meth:`Order.conflict`). Returns the buffers, the bytes of all, and the bytes no assignment can go below:
    the heaviest set of buffers of which every two conflict. Every order of first-fit is tried, so where the two
    figures are equal the result is proven least.
    """
    ordered = sorted(workspaces, key=lambda b: _first_write(b, order.period))
    ordered = [replace(b, copies=order.copies(b) if reuse else 1) for b in ordered]
    need = {b.name: b.bytes(sizes, widths[b.dtype]) * b.copies for b in ordered}
    clash = {a.name: {b.name for b in ordered if a is not b and order.conflict(a, b)} for a in ordered}
    floor = _heaviest_clique(list(need), need, clash)
    tiles = max((b.tiles for b in ordered), default=1)
    if not reuse:
        placed, top = list[Buffer](), 0
        for b in ordered:
            placed.append(replace(b, addresses=tuple(top + i * need[b.name] for i in range(b.tiles))))
            top += b.tiles * need[b.name]
        return placed, top, tiles * floor
    at, height = _pack(list(need), need, clash, floor)
    placed = [
        replace(
            b,
            addresses=tuple(
                t * height + at[b.name] + i * need[b.name] // b.copies for t in range(b.tiles) for i in range(b.copies)
            ),
        )
        for b in ordered
    ]
    return placed, tiles * height, tiles * floor


def _first_write(buffer: Buffer, period: int) -> tuple[bool, int]:
    """What the step before has written for this one comes first."""
    assert buffer.lifetime is not None
    return (buffer.lifetime[1] < period, buffer.lifetime[0])


def _heaviest_clique(names: list[str], need: Mapping[str, int], clash: Mapping[str, set[str]]) -> int:
    if not names:
        return 0
    first, rest = names[0], names[1:]
    with_first = need[first] + _heaviest_clique([n for n in rest if n in clash[first]], need, clash)
    return with_first if clash[first].issuperset(rest) else max(with_first, _heaviest_clique(rest, need, clash))


def _pack(
    names: list[str], need: Mapping[str, int], clash: Mapping[str, set[str]], floor: int
) -> tuple[dict[str, int], int]:
    best, height = dict[str, int](), -1
    for order in islice(permutations(names), _MOST_PACKINGS):
        at: dict[str, int] = {}
        for name in order:
            taken = sorted((at[n], at[n] + need[n]) for n in at if n in clash[name])
            at[name] = _first_gap(taken, need[name])
        top = max((at[n] + need[n] for n in order), default=0)
        if height < 0 or top < height:
            best, height = at, top
        if height <= floor:
            break
    return best, max(height, 0)


def _first_gap(taken: Sequence[tuple[int, int]], need: int) -> int:
    at = 0
    for lo, hi in taken:
        if lo - at >= need:
            break
        at = max(at, hi)
    return at
