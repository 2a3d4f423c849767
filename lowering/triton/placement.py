"""Which kernel computes what, and the buffers in between.

Two kernels run a chunked program. The *prologue* is parallel over chunks and heads; the *scan* walks the chunks of one
head and one block of V with the state in registers, and computes the epilogue as it goes: on a GPU a hand-over inside a
kernel is a register, so reading the state back for a third kernel would only cost.

Two rules place the ops that wait for no carry:

- a value as wide as V that needs no inverse is computed in the scan: what it needs crosses anyway or is smaller than
  itself (dS is [K, V], its operands are [C, K] and [C, V]);
- what only prepares an input of one column or of V columns is loaded again rather than stored and loaded.

Everything else that the scan reads is a buffer. 16-bit inputs cross in their own type; what multiplies the state
elementwise (the decay) crosses in fp32, because rounding it would compound over the sequence.

Inside the prologue two kinds of values *pass* through memory as well, from one loop over blocks of K to the next: what
the second loop reads of the first one (through the tile that the second one then overwrites), and the inverse. It saves
loading and preparing the inputs twice, and the products of the second loop get operands that were loaded, which is what
Triton 3.6 compiles right on Hopper (see ``configs.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from ..ir import Op, OpKind, Program, Value
from ..stages import Section, sections

_PREPARES = (OpKind.LOAD, OpKind.CAST, OpKind.SCALE)


@dataclass(frozen=True)
class CrossingBuffer:
    """A value that goes from the prologue to the scan, or through memory inside the prologue (``passes``).

    ``wide``: transposed, [V, C]. ``fp32``: whatever the inputs are.
    """

    value: Value
    wide: bool
    fp32: bool
    passes: bool = False

    @property
    def name(self) -> str:
        return self.value.name

    def __str__(self) -> str:
        rows, cols = self.value.type.shape
        shape = f"[{cols},{rows}]" if self.wide else f"[{rows},{cols}]"
        return f"{self.name} : {'fp32' if self.fp32 else 'io'}{shape}" + (
            ", inside the prologue" if self.passes else ""
        )


@dataclass(frozen=True)
class Placement:
    """The ops of each kernel in the order they are emitted, and the buffers.

    ``passed``: values that pass through memory inside the prologue, and the buffer whose tile they use.
    """

    program: Program
    prologue: tuple[Op, ...]
    scan: tuple[Op, ...]
    buffers: tuple[CrossingBuffer, ...]
    passed: tuple[tuple[Value, str], ...]

    @property
    def crossing(self) -> tuple[CrossingBuffer, ...]:
        """The buffers that the scan reads."""
        return tuple(buffer for buffer in self.buffers if not buffer.passes)

    def __str__(self) -> str:
        lines = [f"placement {self.program.name}"]
        lines += [f"  buffer {buffer}" for buffer in self.buffers]
        lines += [f"  {value.name} passes through {buffer}" for value, buffer in self.passed]
        for kernel, ops in (("prologue", self.prologue), ("scan", self.scan)):
            lines.append(f"  kernel {kernel}: " + " ".join(op.result.name if op.output else "store" for op in ops))
        return "\n".join(lines) + "\n"


def is_wide(value: Value) -> bool:
    return "V" in value.type.shape


@cache
def place(program: Program) -> Placement:
    """Place the ops of a chunked program."""
    placed = sections(program)
    inverted = _reached_from_inverse(program)
    waits = [op for op in program.ops if placed[op] is not Section.PROLOGUE]
    read = {value for op in waits for value in op.inputs}
    in_scan = set(waits)
    for op in reversed(program.ops):
        if op.output in read and is_wide(op.result) and op.result not in inverted:
            in_scan.add(op)
            read.update(op.inputs)
    reloaded = _reloads(program, in_scan)
    scan = _interleave(program, [op for op in program.ops if op in in_scan or op in reloaded])
    made_in_scan = {op.output for op in scan}
    crossing = dict.fromkeys(value for op in scan for value in op.inputs if value not in made_in_scan)
    needed = _needed(program, set(crossing))
    early = [op for op in program.ops if op in needed and op.result not in inverted]
    late = [op for op in program.ops if op in needed and op.result in inverted]
    passed = _passed(late, inverted, crossing)
    buffers = [CrossingBuffer(value, is_wide(value), _scales_state(program, value)) for value in crossing]
    buffers += [CrossingBuffer(value, False, False, passes=True) for value, name in passed if value.name == name]
    unique = {buffer.name: buffer for buffer in reversed(buffers)}
    ordered = tuple(sorted(unique.values(), key=_name))
    return Placement(program, tuple(early + late), tuple(scan), ordered, passed)


def _passed(late: list[Op], inverted: set[Value], crossing: Iterable[Value]) -> tuple[tuple[Value, str], ...]:
    """What the loops after the inverse read of what was made before them."""
    looped = [op for op in late if "K" in op.result.type.shape or is_wide(op.result)]
    passed: dict[Value, str] = {}
    for op in looped:
        for value in op.inputs:
            if value.type.shape == ("C", "C"):
                passed[value] = value.name
            elif "K" in value.type.shape and value not in inverted:
                passed[value] = value.name if value in crossing else op.result.name
    return tuple(passed.items())


def _reached_from_inverse(program: Program) -> set[Value]:
    reached: set[Value] = set()
    for op in program.ops:
        if op.output is not None and (
            op.kind is OpKind.UNIT_LOWER_INVERSE or any(value in reached for value in op.inputs)
        ):
            reached.add(op.output)
    return reached


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


def _scales_state(program: Program, value: Value) -> bool:
    carry = program.carry
    assert carry is not None
    return any(op.kind is OpKind.MUL and value in op.inputs and op.result.type == carry.type for op in program.ops)


def _name(buffer: CrossingBuffer) -> str:
    return buffer.name
