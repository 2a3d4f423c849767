"""The plan of a program on a target: stages, buffers, hand-overs, bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..errors import ArgumentError
from ..ir import Combine, DType, Program
from ..stages import Buffer, Scope, Section, Stage
from ..target import Target, target_of
from .assemble import make_stage, name_runs, order_scan, workspaces
from .buffers import Rule, allocate, buffers
from .capacity import Chip, Need, needs
from .fold import Carried, Folded, fold, step
from .hazards import Order
from .split import Graph, PlacedRun, Run, arrange, circuit_bound, fewest_runs, hand_overs, in_order, place
from .units import is_widening, legalise, tasks

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
_NARROWEST = 16  # columns of a value tile: one fractal of the Cube
DEFAULTS = {"B": 1, "T": 4096, "H": 16, "K": 128, "V": 128, "C": 64}


@dataclass(frozen=True)
class Options:
    """What the planner may do. The defaults are the optimised plan; :data:`NAIVE` is the text as it stands.

    ``hoist``: work free of the carry leaves the scan. ``accumulate``: additions of products form in Cube's accumulator.
    ``pipeline``: tasks of neighbouring steps may share a stage. ``narrow``: what every reader rounds anyway crosses in
    the inputs' dtype; ``narrow_update``: the carry's change too (it costs accuracy). ``reuse``: buffers whose lifetimes
    do not meet share addresses. ``outputs``: "scan", "epilogue", or "auto" for fewer hand-overs, then fewer bytes.
    ``values``: as in :class:`Target`, or "auto" for the target's.
    """

    hoist: bool = True
    accumulate: bool = True
    pipeline: bool = True
    narrow: bool = True
    narrow_update: bool = False
    reuse: bool = True
    outputs: str = "auto"
    values: str = "auto"


NAIVE = Options(
    hoist=False, accumulate=False, pipeline=False, narrow=False, narrow_update=False, reuse=False, outputs="scan"
)


@dataclass(frozen=True)
class Plan:
    """A program on a target at one shape; made by :func:`plan`.

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

    def __str__(self) -> str:
        from .text import to_text

        return to_text(self)

    def to_svg(self, chunks: int = 4, *, standalone: bool = True) -> str:
        """The scan of one core group over ``chunks`` chunks: Cube lane, workspace, Vec lanes.

        ``standalone``: for a file of its own rather than inside a page.
        """
        from .picture import timeline_svg
        from .timeline import timeline

        return timeline_svg(self, timeline(self, chunks), standalone=standalone)

    def to_html(self, naive: Plan | None = None) -> str:
        """A page of its own, nothing loaded from elsewhere; with ``naive`` its timeline stands above, to one scale."""
        from .page import to_html

        return to_html(self, naive)

    def section(self, section: Section) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.section is section)

    def buffer(self, name: str) -> Buffer:
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise ArgumentError(f"no buffer {name!r} in this plan; it has {', '.join(b.name for b in self.buffers)}")

    @property
    def tiles(self) -> int:
        """How many tiles the value columns are cut into."""
        return self.sizes["V"] // self.sizes["BV"] if "BV" in self.sizes else 1

    @property
    def workspaces(self) -> tuple[Buffer, ...]:
        """What crosses units inside the scan."""
        return tuple(
            b
            for b in self.buffers
            if b.scope is Scope.WORKSPACE and any(b.producer == s.name for s in self.section(Section.SCAN))
        )

    @property
    def in_memory(self) -> tuple[Buffer, ...]:
        """What has addresses in the scan's workspace: what crosses units, and operands Cube makes for itself."""
        names = {stage.name for stage in self.section(Section.SCAN)}
        return tuple(b for b in self.buffers if b.addresses and b.producer in names)

    @property
    def tensors(self) -> tuple[Buffer, ...]:
        """What one section leaves for another in global memory: one tile per lane and step."""
        return tuple(b for b in self.buffers if b.scope is Scope.TENSOR)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of global memory a core group needs for its scan: none where units meet on chip."""
        return self.meeting_bytes if self.target.meeting == "global" else 0

    @property
    def tensor_bytes(self) -> int:
        """Bytes that sections leave for each other, a lane and step."""
        return sum(self.bytes(b) * b.tiles for b in self.tensors)

    @property
    def outer_handovers(self) -> int:
        """Changes of unit a step outside the scan, where steps are independent and hide them behind each other."""
        sides = (self.section(Section.PROLOGUE), self.section(Section.EPILOGUE))
        return sum(max(len(stages) - 1, 0) for stages in sides)

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


def plan(
    program: Program | Combine,
    target: str | Target,
    optimise: bool | Options = True,
    *,
    io: str = "bf16",
    **sizes: int,
) -> Plan:
    """Plan ``program`` for ``target``; a scan given as a summary and a merge is folded first (see ``fold.py``).

    ``optimise``: True, False (the text as it stands: nothing hoisted, merged or narrowed, no address shared) or
    :class:`Options`. ``io``: the inputs' dtype, bf16, fp16 or fp32. ``sizes``: B, T, H and the program's own symbols
    (C, K, V). BV tiles the value columns; without it V is halved until everything fits. A tile that does not fit, given
    or found, raises :class:`~kdacompile.lowering.errors.CapacityError` (the text as it stands is not refused: that it
    would not fit is part of what it shows).
    """
    options = optimise if isinstance(optimise, Options) else (Options() if optimise else NAIVE)
    machine = target_of(target)
    if io not in WIDTHS:
        raise ArgumentError(f"io must be one of {', '.join(WIDTHS)}, got {io!r}")
    scan = fold(program) if isinstance(program, Combine) else step(program)
    return _planned(scan, machine, options, io, tuple(sorted(_bind(scan.program, sizes).items())))


@cache
def _planned(scan: Folded, target: Target, options: Options, io: str, sizes: tuple[tuple[str, int], ...]) -> Plan:
    legal = Folded(legalise(scan.program, target, accumulate=options.accumulate), scan.carried)
    bound = dict(sizes)
    if options.outputs == "auto" and target.outputs != "auto":
        options = replace(options, outputs=target.outputs)
    if options.values == "auto":
        options = replace(options, values=target.values)
    choices = ("scan", "epilogue") if options.outputs == "auto" else (options.outputs,)
    plans = [_fitted(legal, target, replace(options, outputs=o), bound, io) for o in choices]
    best = min(plans, key=lambda p: (p.handovers, p.tensor_bytes))
    if best.options.hoist:
        for need in best.needs:
            need.check()
    return best


def _fitted(scan: Folded, target: Target, options: Options, sizes: Mapping[str, int], io: str) -> Plan:
    """The plan with the widest value tile that fits, or the narrowest there is if none does."""
    whole = _plan(scan, target, options, sizes, io)
    width = sizes.get("V", 1)
    if "BV" in sizes or not options.hoist or scan.program.carry is None:
        return whole
    fitted = whole
    while any(need.over > 0 for need in fitted.needs) and width % 2 == 0 and width > _NARROWEST:
        width //= 2
        fitted = _plan(scan, target, options, {**sizes, "BV": width}, io)
    return whole if any(need.over > 0 for need in fitted.needs) else fitted


def _bind(program: Program, sizes: Mapping[str, int]) -> dict[str, int]:
    used = {d for port in (*program.inputs, *program.outputs) for d in port.type.shape if isinstance(d, str)}
    used |= {d for value in program.values() for d in value.type.shape if isinstance(d, str) and d.isidentifier()}
    known = used | {"B", "T", "H", "BV"}
    if unknown := sizes.keys() - known:
        raise ArgumentError(f"{', '.join(sorted(unknown))}: not a size of {program.name}; it has {sorted(known)}")
    bound = {**{name: n for name, n in DEFAULTS.items() if name in known}, **sizes}
    if missing := used - bound.keys():
        raise ArgumentError(f"{program.name} needs a value for {', '.join(sorted(missing))}")
    if any(n < 1 for n in bound.values()) or bound.get("V", 1) % bound.get("BV", 1):
        raise ArgumentError(f"sizes are positive and BV divides V, got {bound}")
    return bound


def _plan(folded: Folded, target: Target, options: Options, sizes: Mapping[str, int], io: str) -> Plan:
    program = folded.program
    graph = Graph(program, tasks(program, target), folded.carried)
    hoist = options.hoist and not folded.carried
    placed = place(graph, hoist=hoist, outputs=Section(options.outputs), values=options.values)
    by_section = {s: [t for t in graph.tasks if placed[t] is s] for s in Section}
    cut: dict[Section, list[Run]] = {}
    for section, inside in by_section.items():
        if not options.hoist:
            cut[section] = in_order(inside)
        elif section is Section.SCAN and graph.next:
            cut[section] = arrange(graph, inside, pipeline=options.pipeline)
        else:
            cut[section] = fewest_runs(graph, inside)
    narrow = options.narrow and target.outputs == "auto"
    rule = Rule(
        graph,
        narrow=narrow,
        narrow_update=options.narrow_update,
        operands_in_memory=target.own_operands == "global",
    )
    tiles = sizes["V"] // sizes["BV"] if "BV" in sizes else 1
    widths = {DType.IO: WIDTHS[io], DType.ACC: 4}
    seen = {**sizes, "V": sizes.get("BV", sizes.get("V", 1))}
    if options.reuse:
        cut = order_scan(graph, cut, rule, tiles, seen, widths)
    runs = name_runs(graph, cut)
    found = buffers(graph, runs, rule, tiles)
    found, total, floor = _with_addresses(graph, found, runs, seen, widths, reuse=options.reuse)
    stages = tuple(make_stage(run, found, graph) for run in runs)
    on_chip, streamed = needs(graph, stages, Chip(target, seen, widths))
    if streamed:
        found = [_streamed(buffer, streamed) for buffer in found]
        stages = tuple(make_stage(run, found, graph) for run in runs)
    inner = cut[Section.SCAN]
    return Plan(
        program=program,
        target=target,
        options=options,
        sizes=dict(sizes),
        io=io,
        stages=stages,
        buffers=tuple(found),
        handovers=hand_overs(inner),
        lower_bound=circuit_bound(graph, by_section[Section.SCAN]),
        meeting_bytes=total,
        floor_bytes=floor,
        period=sum(len(run.tasks) for run in inner),
        needs=tuple(on_chip),
        carried=tuple(graph.next.items()),
    )


def _streamed(buffer: Buffer, streamed: Mapping[str, frozenset[str]]) -> Buffer:
    """``buffer``, handed over row by row if a stage at one of its ends can only take or leave it so."""
    if buffer.scope is not Scope.WORKSPACE:
        return buffer
    ends = (buffer.producer, *buffer.consumers)
    return replace(buffer, streamed=any(buffer.name in streamed.get(end, ()) for end in ends))


def _with_addresses(
    graph: Graph,
    found: Sequence[Buffer],
    runs: Sequence[PlacedRun],
    sizes: Mapping[str, int],
    widths: Mapping[DType, int],
    *,
    reuse: bool,
) -> tuple[list[Buffer], int, int]:
    """Addresses for the workspaces of every section (each has its own kernel, so each starts at 0).

    Returns the buffers, the bytes of the scan's workspace and the bytes no assignment could go below.
    """
    total = floor = 0
    addressed: dict[str, Buffer] = {}
    for section in Section:
        inside = [run for run in runs if run.section is section]
        mine = workspaces(found, inside)
        placed, bytes, least = allocate(mine, Order(graph, inside), sizes, widths, reuse=reuse)
        addressed.update({b.name: b for b in placed})
        if section is Section.SCAN:
            total, floor = bytes, least
    return [b if b.lifetime is None else addressed[b.name] for b in found], total, floor
