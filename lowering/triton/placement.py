"""Which kernel computes what, and the buffers in between.

Up to four kernels run a chunked program. Three are parallel over chunks and heads: *gram* makes the Gram matrices and
everything else that needs no inverse, *inverse* the inverse with what scales its columns, *apply* its products. The
*scan* walks the chunks of one head and one block of V with the state in registers, and computes the epilogue as it
goes: on a GPU a hand-over inside a kernel is a register, so reading the state back for another kernel would only cost.

The three are apart because they want different schedules. The inverse is a chain of small products, of which one warp
a chunk and many chunks a multiprocessor hide the latency; gram is elementwise work on tiles as wide as K, short of
registers; apply is bound by memory. In one kernel every chunk held the registers of all three.

Two rules place the ops that wait for no carry:

- a value as wide as V that needs no inverse is computed in the scan: what it needs crosses anyway or is smaller than
  itself (dS is [K, V], its operands are [C, K] and [C, V]);
- what only prepares an input of one column or of V columns is loaded again rather than stored and loaded.

Everything else that a later kernel reads is a buffer. 16-bit inputs cross in their own type; what multiplies the state
elementwise (the decay) crosses in fp32, because rounding it would compound over the sequence; what is inverted crosses
as the products of the inverse take it. A tile that apply reads and whose product has its shape is overwritten by that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ..ir import Op, OpKind, Program, Value
from ..partition import Flow, carried, sections
from ..stages import Section
from ..target import CUDA_SM90

_PREPARES = (OpKind.LOAD, OpKind.CAST, OpKind.SCALE)


@dataclass(frozen=True)
class CrossingBuffer:
    """A value that goes from one kernel to a later one, the ``reader``.

    ``wide``: transposed, [V, C]. ``kept``: "io" (as the inputs), "fp32", or "inverse" (as its products' operands).
    """

    value: Value
    wide: bool
    kept: str
    reader: str = "scan"

    @property
    def name(self) -> str:
        return self.value.name

    def __str__(self) -> str:
        rows, cols = self.value.type.shape
        shape = f"[{cols},{rows}]" if self.wide else f"[{rows},{cols}]"
        return f"{self.name} : {self.kept}{shape}" + ("" if self.reader == "scan" else f", for {self.reader}")


@dataclass(frozen=True)
class Placement:
    """The ops of each kernel in the order they are emitted, and the buffers.

    ``passed``: values that the inverse and apply kernels read, and the buffer whose tile they use. Without the delta
    term there is no inverse, and both kernels are empty.
    """

    program: Program
    gram: tuple[Op, ...]
    inverse: tuple[Op, ...]
    apply: tuple[Op, ...]
    scan: tuple[Op, ...]
    buffers: tuple[CrossingBuffer, ...]
    passed: tuple[tuple[Value, str], ...]

    @property
    def kernels(self) -> dict[str, tuple[Op, ...]]:
        """The kernels that are launched, in that order."""
        every = {"gram": self.gram, "inverse": self.inverse, "apply": self.apply, "scan": self.scan}
        return {name: ops for name, ops in every.items() if ops}

    @property
    def crossing(self) -> tuple[CrossingBuffer, ...]:
        """The buffers that the scan reads."""
        return tuple(buffer for buffer in self.buffers if buffer.reader == "scan")

    def tiles(self, value: Value) -> list[str]:
        """The buffers that a value is stored to."""
        names = [buffer.name for buffer in self.crossing if buffer.value == value]
        return list(dict.fromkeys(names + [name for passing, name in self.passed if passing == value]))

    def __str__(self) -> str:
        lines = [f"placement {self.program.name}"]
        lines += [f"  buffer {buffer}" for buffer in self.buffers]
        lines += [f"  {value.name} passes through {buffer}" for value, buffer in self.passed if value.name != buffer]
        for kernel, ops in self.kernels.items():
            lines.append(f"  kernel {kernel}: " + " ".join(op.result.name if op.output else "store" for op in ops))
        return "\n".join(lines) + "\n"


def is_wide(value: Value) -> bool:
    return "V" in value.type.shape


@cache
def place(program: Program) -> Placement:
    """Place the ops of a chunked program."""
    placed = sections(program, outputs=Section.SCAN, values=CUDA_SM90.values)
    inverted = Flow(program.ops, carried(program)).inverted()
    in_scan = {op for op in program.ops if placed[op] is Section.SCAN}
    reloaded = _reloads(program, in_scan)
    scan = _interleave(program, [op for op in program.ops if op in in_scan or op in reloaded])
    made_in_scan = {op.output for op in scan}
    crossing = dict.fromkeys(value for op in scan for value in op.inputs if value not in made_in_scan)
    needed = _needed(program, set(crossing))
    ordered = [op for op in program.ops if op in needed]
    inverse = [op for op in ordered if op.result in inverted and op.result.type.shape == ("C", "C")]
    apply = [op for op in ordered if is_wide(op.result) or (op.result in inverted and op not in inverse)]
    gram = [op for op in ordered if op not in inverse and op not in apply]
    passed = _passed(inverse, apply, crossing)
    buffers = [CrossingBuffer(value, is_wide(value), _kept(program, value)) for value in crossing]
    buffers += [
        CrossingBuffer(value, False, _kept(program, value), reader)
        for value, (name, reader) in passed.items()
        if value.name == name and value not in crossing
    ]
    return Placement(
        program,
        tuple(gram),
        tuple(inverse),
        tuple(apply),
        tuple(scan),
        tuple(sorted(buffers, key=_name)),
        tuple((value, name) for value, (name, _) in passed.items()),
    )


def _passed(inverse: list[Op], apply: list[Op], crossing: Iterable[Value]) -> dict[Value, tuple[str, str]]:
    """What the inverse and apply kernels read of earlier ones: the buffer, and which of the two reads it."""
    passed: dict[Value, tuple[str, str]] = {}
    for reader, ops in (("inverse", inverse), ("apply", apply)):
        made = {op.output for op in ops}
        for op in ops:
            for value in op.inputs:
                if value in made:
                    continue
                overwritten = value.type.shape == op.result.type.shape and reader == "apply" and value not in crossing
                passed[value] = (op.result.name if overwritten else value.name, reader)
    return passed


def _reloads(program: Program, in_scan: set[Op]) -> set[Op]:
    """The load chains of narrow inputs that the scan reads."""
    found: set[Op] = set()
    waiting = [value for op in in_scan for value in op.inputs]
    while waiting:
        value = waiting.pop()
        op = program.producer(value)
        if op in in_scan or op in found or not _narrow_load(program, value):
            continue
        found.add(op)
        waiting += op.inputs
    return found


def _narrow_load(program: Program, value: Value) -> bool:
    op = program.producer(value)
    return op.kind in _PREPARES and value.type.cols == 1 and all(_narrow_load(program, x) for x in op.inputs)


def _needed(program: Program, values: set[Value]) -> set[Op]:
    """The ops that ``values`` depend on."""
    needed: set[Op] = set()
    for op in reversed(program.ops):
        if op.output in values:
            needed.add(op)
            values = values | set(op.inputs)
    return needed


def _interleave(program: Program, ops: list[Op]) -> list[Op]:
    """Scan ops in order, and after each product the epilogue ops that were ready before it.

    The next step waits for the scan's products only; the epilogue's fill the gaps between them.
    """
    placed = sections(program)
    epilogue = [op for op in ops if placed[op] is Section.EPILOGUE]
    order: list[Op] = []
    ready: set[Value] = set()
    made = {op.output for op in ops if op.output is not None}

    def flush(known: set[Value]) -> None:
        for op in list(epilogue):
            if all(value in known or value not in made for value in op.inputs):
                epilogue.remove(op)
                order.append(op)
                known = known | ({op.output} if op.output is not None else set())
        ready.update(known)

    for op in ops:
        if placed[op] is Section.EPILOGUE:
            continue
        before = set(ready)
        order.append(op)
        ready.add(op.result)
        if op.kind is OpKind.DOT and placed[op] is Section.SCAN:
            flush(before)
    flush(made)
    return order


def _kept(program: Program, value: Value) -> str:
    """What a buffer of ``value`` holds."""
    carry = program.carry
    assert carry is not None
    readers = [op for op in program.ops if value in op.inputs]
    if any(op.kind is OpKind.UNIT_LOWER_INVERSE for op in readers):
        return "inverse"
    scales_state = any(op.kind is OpKind.MUL and op.result.type == carry.type for op in readers)
    return "fp32" if scales_state or value.type.rows == 1 else "io"


def _name(buffer: CrossingBuffer) -> str:
    return buffer.name
