"""The plan of a program on a target: stages, buffers, hand-overs, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ArgumentError
from ..ir import DType, Program
from ..stages import SCANS, Buffer, Scope, Section, Stage
from ..target import Target
from .capacity import Need
from .fold import Carried
from .units import is_widening

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Options:
    """What the planner may do. The defaults are the optimised plan; :data:`NAIVE` is the text as it stands.

    ``hoist``: work free of the carry leaves the scan. ``accumulate``: additions of products form in Cube's accumulator.
    ``pipeline``: tasks of neighbouring steps may share a stage. ``lookahead``: Cube begins such a stage with the later
    step's, so that it need not wait for Vec, at the price of a second copy of what they make; the emitted kernels do a
    step in one turn, and do not. ``narrow``: what every reader rounds anyway crosses in the inputs' dtype;
    ``narrow_update``: the carry's change too (it costs accuracy). ``reuse``: buffers whose lifetimes do not meet share
    addresses. ``outputs``: "scan", "epilogue", or "auto" for fewer hand-overs, then fewer bytes. ``values``: as in
    :class:`Target`, or "auto" for the target's. ``ahead``: with gates Vec leaves the triangular inverse's
    diagonal blocks where Cube joins them, so that all products of the prologue are Cube's alone; they join the scan, in
    which Cube does the next chunk's while Vec is at the state. Only where one task has all columns of the state.
    """

    hoist: bool = True
    accumulate: bool = True
    pipeline: bool = True
    lookahead: bool = False
    narrow: bool = True
    narrow_update: bool = False
    reuse: bool = True
    outputs: str = "auto"
    values: str = "auto"
    ahead: bool = True


NAIVE = Options(
    hoist=False, accumulate=False, pipeline=False, narrow=False, narrow_update=False, reuse=False, outputs="scan"
)


@dataclass(frozen=True)
class PlanData:
    """A program on a target at one shape: what is planned, without its pictures (:class:`~.drawn.Plan` adds them).

    ``program`` is the program as the target computes it: run on the torch executor with :attr:`rounding` it gives the
    plan's numbers. ``sizes`` binds its symbols, and B, T and H; ``io`` names the inputs' dtype. ``period`` is the
    number of tasks in a step of the scan, the clock of the workspaces' lifetimes. ``needs`` is what every stage keeps
    on chip, ``meeting_bytes`` what the scan's workspaces take a core group, and ``floor_bytes`` what no assignment of
    addresses to them can go below. ``carried``: every carried value with what it becomes in the next step.
    """

    program: Program
    target: Target
    options: Options
    sizes: Mapping[str, int]
    io: str
    stages: tuple[Stage, ...]
    buffers: tuple[Buffer, ...]
    handovers: int
    lower_bound: int
    meeting_bytes: int
    floor_bytes: int
    period: int
    needs: tuple[Need, ...]
    carried: Carried

    def section(self, section: Section) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.section is section)

    def buffer(self, name: str) -> Buffer:
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise ArgumentError(f"no buffer {name!r} in this plan; it has {', '.join(b.name for b in self.buffers)}")

    @property
    def step(self) -> str:
        """What the scan walks: "chunk" or "token" of a sequence, "block" of a cache."""
        return self.program.axis or "chunk"

    @property
    def tiles(self) -> int:
        """How many tiles the value columns are cut into."""
        return self.sizes["V"] // self.sizes["BV"] if "BV" in self.sizes else 1

    @property
    def workspaces(self) -> tuple[Buffer, ...]:
        """What crosses units inside the scans."""
        names = {stage.name for section in SCANS for stage in self.section(section)}
        return tuple(b for b in self.buffers if b.scope is Scope.WORKSPACE and b.producer in names)

    @property
    def in_memory(self) -> tuple[Buffer, ...]:
        """What has addresses in the scan's workspace: what crosses units, and operands Cube makes for itself."""
        names = {stage.name for section in SCANS for stage in self.section(section)}
        return tuple(b for b in self.buffers if b.addresses and b.producer in names)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """What one section leaves for another in global memory: one tile per lane and step."""
        return tuple(b for b in self.buffers if b.scope is Scope.TENSOR)

    @property
    def meeting(self) -> str:
        """A name for what units hand over through, of which there are ``meeting_bytes``."""
        return "workspace" if self.target.meeting == "global" else "meeting on chip"

    @property
    def workspace_bytes(self) -> int:
        """Bytes of global memory a core group needs for its scan: none where units meet on chip."""
        return self.meeting_bytes if self.target.meeting == "global" else 0

    @property
    def apart_bytes(self) -> int:
        """The same with every tile at an address of its own, which is how the Ascend compiler lays them out."""
        total = sum(self.bytes(b) * b.tiles * b.copies for b in self.in_memory)
        return total if self.target.meeting == "global" else 0

    @property
    def tensor_bytes(self) -> int:
        """Bytes that sections leave for each other, a lane and step."""
        return sum(self.bytes(b) * b.tiles for b in self.tensors)

    @property
    def crossings(self) -> int:
        """Tiles that change unit inside the scan, a step."""
        return sum(b.tiles for b in self.workspaces)

    @property
    def crossing_bytes(self) -> int:
        """Bytes those tiles have, a step: each is written once and read at least once."""
        return sum(self.bytes(b) * b.tiles for b in self.workspaces)

    @property
    def rounding(self) -> dict[str, DType]:
        """What is rounded to a narrower dtype where it is made: casts, and buffers that are planned narrow.

        In the terms of the torch executor (see ``codegen.generate``), and so without the columns inside a gated Gram
        matrix, which it rounds with the rows.
        """
        wide = {v.name for v in self.program.values()} - {op.result.name for op in self.program.ops if is_widening(op)}
        wide |= {t.name for stage in self.stages for t in stage.tasks if t.part in ("rows", "product")}
        made = {name for stage in self.stages for name in stage.rounding}
        return dict.fromkeys(sorted(made & wide), DType.IO)

    def bytes(self, buffer: Buffer) -> int:
        """Bytes of one tile of ``buffer``."""
        return buffer.bytes(self.tile_sizes, self.widths[buffer.dtype])

    @property
    def widths(self) -> dict[DType, int]:
        return {DType.IO: WIDTHS[self.io], DType.ACC: 4}

    @property
    def tile_sizes(self) -> dict[str, int]:
        """Sizes as one task sees them: V is the tile of the value columns."""
        return {**self.sizes, "V": self.sizes.get("BV", self.sizes.get("V", 1))}
