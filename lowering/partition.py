"""The sections of a program: what is computed before its scan, in it, and after it.

The one partitioner of all targets: the torch executor and the Triton kernels place ops with it, the plans tasks (ops,
or parts of them on one unit). What a target wants of it is in two words of its descriptor: ``outputs``, the section of
what reads the carry but nothing waits for, and ``values``, where what is as wide as V and waits for no carry goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Generic, Protocol, TypeVar

from .ir import Op, OpKind, Program, Value
from .stages import SCANS, Section


class Node(Protocol):
    """What makes one value from others."""

    @property
    def inputs(self) -> tuple[Value, ...]: ...
    @property
    def output(self) -> Value | None: ...
    @property
    def kind(self) -> OpKind: ...


N = TypeVar("N", bound=Node)


class Flow(Generic[N]):
    """Who makes and who reads the values of a list of nodes; ``carried``: a value and what it is in the next step.

    ``reverse``: the steps of what is carried from the end."""

    def __init__(self, nodes: Sequence[N], carried: Mapping[Value, Value], reverse: Collection[Value] = ()) -> None:
        self.nodes = tuple(nodes)
        self.reverse = frozenset(reverse)
        self.made = {node.output: node for node in nodes if node.output is not None}
        self.next = dict(carried)
        self.last = {step: value for value, step in self.next.items()}
        readers: dict[Value, list[N]] = {}
        for node in nodes:
            for value in dict.fromkeys(node.inputs):
                readers.setdefault(value, []).append(node)
        self._readers = {value: tuple(found) for value, found in readers.items()}

    def before(self, node: N) -> tuple[N, ...]:
        """The nodes whose results of the same step ``node`` reads."""
        return tuple(self.made[v] for v in node.inputs if v in self.made)

    def readers(self, value: Value) -> tuple[N, ...]:
        return self._readers.get(value, ())

    def reads_carry(self, node: N) -> bool:
        return any(value in self.next for value in node.inputs)

    def dependent(self) -> set[N]:
        """What reads the carry, directly or not."""
        found: set[N] = set()
        for node in self.nodes:
            if self.reads_carry(node) or any(earlier in found for earlier in self.before(node)):
                found.add(node)
        return found

    def awaited(self, *, reverse: bool) -> set[N]:
        """What the next step's carry waits for."""
        steps = self.reverse if reverse else self.last.keys() - self.reverse
        found = {node for node in self.nodes if node.output in steps}
        for node in reversed(self.nodes):
            if node in found:
                found.update(self.before(node))
        return found

    def inverted(self) -> set[Value]:
        """What comes from a triangular inverse."""
        found: set[Value] = set()
        for node in self.nodes:
            inverse = node.kind is OpKind.UNIT_LOWER_INVERSE or any(value in found for value in node.inputs)
            if inverse and node.output is not None:
                found.add(node.output)
        return found


def carried(program: Program) -> dict[Value, Value]:
    """The values in which a program reads its carries, and those that they become."""
    steps = {carry.name: carry.step for carry in program.carries}
    return {op.result: steps[str(op.attr("carry"))] for op in program.ops if op.kind is OpKind.CARRY}


def reversed_steps(program: Program) -> tuple[Value, ...]:
    """What the carry that walks from the end becomes."""
    return () if program.reverse is None else (program.reverse.step,)


def partition(
    flow: Flow[N],
    *,
    outputs: Section = Section.EPILOGUE,
    values: str = "prologue",
    joins_scan: Callable[[N, set[N]], bool] | None = None,
    summed: Callable[[N], Sequence[N]] | None = None,
    apart: Callable[[N], bool] | None = None,
    stays: Callable[[N], bool] = lambda node: False,
) -> dict[N, Section]:
    """The section of every node.

    ``outputs``, ``values``: as in :class:`~kdacompile.lowering.target.Target`. ``joins_scan``: whether a node that
    nothing waits for belongs to the scan's nodes all the same; ``summed``: the nodes that one is computed with;
    ``apart``: which nodes sum over tokens, where such sums behind two scans are a section of their own;
    ``stays``: what is made in the prologue wherever it is read.
    """
    dependent = flow.dependent()
    scans = {section: flow.awaited(reverse=section is Section.REVERSE) & dependent for section in SCANS}

    def joins(node: N, scan: set[N]) -> bool:
        return node in scan or (joins_scan is not None and joins_scan(node, scan))

    placed: dict[N, Section] = {}
    for node in flow.nodes:
        if node not in dependent:
            placed[node] = Section.PROLOGUE
        else:
            placed[node] = next((section for section, scan in scans.items() if joins(node, scan)), outputs)
    if flow.reverse:
        _sink(flow, placed, stays)
        if apart is not None:
            _set_sums_apart(flow, placed, apart)
    if summed is not None:
        for node in reversed(flow.nodes):
            placed.update(dict.fromkeys(summed(node), placed[node]))
    if values != "prologue":
        _keep_wide(flow, placed, inverted=values == "scan")
    return placed


def _sink(flow: Flow[N], placed: dict[N, Section], stays: Callable[[N], bool]) -> None:
    """What only the epilogue reads is made there, unless it ``stays``: behind two scans there is much of it, and it
    need not lie in memory while they run."""
    for node in reversed(flow.nodes):
        readers = () if node.output is None else flow.readers(node.output)
        if (
            placed[node] is Section.PROLOGUE
            and not stays(node)
            and all(placed[reader] is Section.EPILOGUE for reader in readers)
        ):
            placed[node] = Section.EPILOGUE


def _set_sums_apart(flow: Flow[N], placed: dict[N, Section], over_tokens: Callable[[N], bool]) -> None:
    """Sums over tokens of what the epilogue makes, what follows from them, and what only they read and no other node of
    the epilogue is needed for. A sum over rows keeps the rows of every tile that it is computed from on one core.
    Products of matrices stay where they are, and so do sums by token."""
    inside = [node for node in flow.nodes if placed[node] is Section.EPILOGUE]
    sums: set[N] = set()
    for node in inside:
        if over_tokens(node) or sums.intersection(flow.before(node)):
            sums.add(node)

    def read_by(node: N, found: set[N]) -> bool:
        readers = () if node.output is None else flow.readers(node.output)
        return bool(readers) and all(reader in found for reader in readers)

    def stays(node: N) -> bool:
        by_token = node.kind is OpKind.ROW_SUM and node.output is not None and node.output.type.rows == "C"
        return by_token or node.kind in (OpKind.DOT, OpKind.GATED_DOT)

    only: set[N] = set()  # read by sums, directly or not
    for node in reversed(inside):
        if node not in sums and not stays(node) and read_by(node, sums | only):
            only.add(node)
    rest = {node for node in inside if node not in sums | only}
    while more := {n for n in only if rest & {*flow.before(n), *(flow.readers(n.output) if n.output else ())}}:
        only, rest = only - more, rest | more

    def crosses(value: Value) -> bool:
        return 1 in value.type.shape or not sums.isdisjoint(flow.readers(value))

    for node in reversed(inside):  # tiles made for sums of a number a token, or of what crosses to them anyway
        if node in rest and not stays(node) and read_by(node, sums | only):
            made = [value for value in node.inputs if flow.made.get(value) in rest]
            only |= {node} if all(map(crosses, made)) else set()
    placed.update(dict.fromkeys(sums | only, Section.SUMS))


def _keep_wide(flow: Flow[N], placed: dict[N, Section], *, inverted: bool) -> None:
    """What is as wide as V goes where it is first read; with ``inverted`` also what comes from an inverse."""
    order, behind = list(Section), flow.inverted()
    for node in reversed(flow.nodes):
        value = node.output
        readers = () if value is None else flow.readers(value)
        if value is None or "V" not in value.type.shape or not readers:
            continue
        if inverted or value not in behind:
            placed[node] = max(placed[node], min((placed[t] for t in readers), key=order.index), key=order.index)


@cache
def sections(program: Program, outputs: Section = Section.EPILOGUE, values: str = "prologue") -> Mapping[Op, Section]:
    """The section of every op. A carry is read in its scan; a store goes with the outputs."""
    ends = (OpKind.CARRY, OpKind.STORE)
    flow = Flow([op for op in program.ops if op.kind not in ends], carried(program), reversed_steps(program))
    placed = partition(flow, outputs=outputs, values=values)

    def end(op: Op) -> Section:
        if op.kind is OpKind.STORE:
            return outputs
        backwards = program.reverse is not None and op.attr("carry") == program.reverse.name
        return Section.REVERSE if backwards else Section.SCAN

    return {op: end(op) if op.kind in ends else placed[op] for op in program.ops}
