"""From a program to its plan: sections, stages, buffers, addresses, capacities, in that order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from ..errors import ArgumentError
from ..ir import Combine, DType, Program
from ..stages import SCANS, Buffer, Scope, Section
from ..target import Target, target_of
from .assemble import make_stage, name_runs, order_scan, workspaces
from .buffers import Rule, allocate, buffers
from .capacity import Chip, needs
from .drawn import Plan
from .fold import Folded, fold, step
from .hazards import Order
from .legalise import legalise
from .model import NAIVE, WIDTHS, Options
from .split import (
    Graph,
    PlacedRun,
    Run,
    arrange,
    circuit_bound,
    fewest_runs,
    gates_first,
    hand_overs,
    in_order,
    move_ahead,
    place,
)
from .units import joined, tasks

_NARROWEST = 16  # columns of a value tile: one fractal of the Cube
DEFAULTS = {"B": 1, "T": 4096, "H": 16, "K": 128, "V": 128, "C": 64}


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
    if scan.program.reverse is not None:  # what reads both carries stands behind both scans
        options = replace(options, outputs="epilogue")
    choices = ("scan", "epilogue") if options.outputs == "auto" else (options.outputs,)
    if _may_be_ahead(scan, target, options, bound):
        both = Folded(legalise(scan.program, target, accumulate=options.accumulate, ahead=True), scan.carried)
        made = _plan(both, target, replace(options, outputs="scan"), bound, io)
        if all(need.over <= 0 for need in made.needs):
            return made
    options = replace(options, ahead=False)
    plans = [_fitted(legal, target, replace(options, outputs=o), bound, io) for o in choices]
    best = min(plans, key=lambda p: (p.handovers, p.tensor_bytes))
    if best.options.hoist:
        for need in best.needs:
            need.check()
    return best


def _may_be_ahead(scan: Folded, target: Target, options: Options, sizes: Mapping[str, int]) -> bool:
    """Whether a program has products that may join its scan, see :class:`Options`."""
    on_cube = target.split and target.narrows and target.accumulates and options.accumulate
    wanted = options.ahead and options.hoist and options.outputs in ("auto", "scan")
    alone = sizes.get("BV", sizes.get("V")) == sizes.get("V") and not scan.carried and scan.program.reverse is None
    return on_cube and wanted and alone and bool(joined(scan.program))


def _fitted(scan: Folded, target: Target, options: Options, sizes: Mapping[str, int], io: str) -> Plan:
    """The plan with the widest value tile that fits, or the narrowest there is if none does."""
    whole = _plan(scan, target, options, sizes, io)
    width = sizes.get("V", 1)
    if "BV" in sizes or not options.hoist or (scan.program.carry is None and not scan.carried):
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
    made = tasks(program, target, whole=not options.hoist, ahead=options.ahead)
    graph = Graph(program, made, folded.carried)
    hoist = options.hoist and not folded.carried
    placed = place(graph, hoist=hoist, outputs=Section(options.outputs), values=options.values)
    by_section = {s: [t for t in graph.tasks if placed[t] is s] for s in Section}
    cut: dict[Section, list[Run]] = {}
    for section, inside in by_section.items():
        if not options.hoist:
            cut[section] = in_order(inside)
        elif section in SCANS and graph.next:
            cut[section] = arrange(graph, inside, pipeline=options.pipeline, lookahead=options.lookahead)
        else:
            cut[section] = gates_first(graph, fewest_runs(graph, inside))
    rule = Rule(graph, target, narrow=options.narrow, narrow_update=options.narrow_update)
    tiles = sizes["V"] // sizes["BV"] if "BV" in sizes else 1
    widths = {DType.IO: WIDTHS[io], DType.ACC: 4}
    seen = {**sizes, "V": sizes.get("BV", sizes.get("V", 1))}
    if options.reuse:
        cut = order_scan(graph, cut, rule, tiles, seen, widths)
    if options.ahead:
        cut = move_ahead(cut)
    runs = name_runs(graph, cut)
    found = buffers(graph, runs, rule, tiles)
    found, total, floor = _with_addresses(graph, found, runs, seen, widths, reuse=options.reuse)
    stages = tuple(make_stage(run, found, graph) for run in runs)
    on_chip, streamed = needs(graph, stages, Chip(target, seen, widths))
    if streamed:
        found = [_streamed(buffer, streamed) for buffer in found]
        stages = tuple(make_stage(run, found, graph) for run in runs)
    inner = [cut[section] for section in SCANS]
    return Plan(
        program=program,
        target=target,
        options=options,
        sizes=dict(sizes),
        io=io,
        stages=stages,
        buffers=tuple(found),
        handovers=sum(map(hand_overs, inner)),
        lower_bound=sum(circuit_bound(graph, by_section[section]) for section in SCANS),
        meeting_bytes=total,
        floor_bytes=floor,
        period=sum(len(run.tasks) for run in cut[Section.SCAN]),
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

    Returns the buffers, the bytes of the scans' workspaces and the bytes no assignment could go below.
    """
    total = floor = 0
    addressed: dict[str, Buffer] = {}
    for section in Section:
        inside = [run for run in runs if run.section is section]
        mine = workspaces(found, inside)
        placed, bytes, least = allocate(mine, Order(graph, inside), sizes, widths, reuse=reuse)
        addressed.update({b.name: b for b in placed})
        if section in SCANS:
            total, floor = total + bytes, floor + least
    return [b if b.lifetime is None else addressed[b.name] for b in found], total, floor
