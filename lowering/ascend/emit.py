"""From a plan to a module of Triton kernels for Ascend: one kernel a section, and one more for gates per channel.

Every kernel has a one-dimensional grid of as many programs as there are cores and loops over its tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

from ..adjoint_program import adjoint_program
from ..errors import TileProgramError
from ..ir import DType, OpKind
from ..linear_attention import linear_attention_program
from ..plan import Options, Plan, plan
from ..plan.split import of_gates
from ..plan.whole import SUB_CHUNKS, kernel_plans
from ..stages import SCANS, Scope, Section, Stage, Task
from .body import Body
from .kernel import (
    Argument,
    Domain,
    Kernel,
    Kind,
    Module,
    Scratch,
    assemble,
    definition,
    indent,
    macro_kernel,
    used_constants,
)
from .prepare import PLAIN, Fused

CHUNK = 64
FIRST = "ascend910b"  # the target whose modules are called by the program alone


@cache
def chunk_module(
    gate: str,
    delta: bool,
    beta: bool = True,
    *,
    fused: Fused = PLAIN,
    outputs: str = "auto",
    narrow_update: bool = False,
    target: str = FIRST,
    ahead: bool = True,
) -> Module:
    """The kernels of one row of the family over whole sequences, from their plan for ``target``.

    ``fused``: what the prologue makes of its inputs as it loads them.
    ``outputs``: "scan" computes o where the state is, and with the delta term nothing but o is written; "epilogue"
    writes every chunk's state and computes o from it, all chunks at once; "auto" is the plan's choice.
    ``narrow_update``: the change of the state crosses in the inputs' dtype. ``ahead``: whether the plan may have the
    products of the prologue in the scan; not where several of its tasks have columns of one state.
    """
    options = Options(outputs=outputs, narrow_update=narrow_update, ahead=ahead)
    made = chunk_plan(gate, delta, beta, target, options, norm=fused.norm)
    words = ["" if beta else "nobeta", "" if outputs == "auto" else outputs, "narrow_update" * narrow_update]
    words += ["" if target == FIRST else target, "" if ahead else "apart", fused.name]
    return _module(made, words, fused)


def chunk_plan(gate: str, delta: bool, beta: bool, target: str, options: Options, *, norm: bool) -> Plan:
    """The plan of a row's kernels, ``norm``: of those that divide queries and keys by their norms. Where ``sub_chunks``
    reads them for all other kernels, it does that as well, and nothing changes."""
    made = plan(linear_attention_program(gate, delta, beta=beta), target, options, io="bf16", C=CHUNK)
    if not norm or any(kernel.name == SUB_CHUNKS for kernel in kernel_plans(made)):
        return made
    return plan(linear_attention_program(gate, delta, beta=beta, norm=True), target, options, io="bf16", C=CHUNK)


@cache
def adjoint_module(gate: str, delta: bool, beta: bool = True) -> Module:
    """The kernels of a row's gradients, from their plan for the 910B."""
    made = plan(adjoint_program(gate, delta, beta=beta), FIRST, io="bf16", C=CHUNK)
    return _module(made, [] if beta else ["nobeta"], PLAIN)


def _module(made: Plan, words: Sequence[str], fused: Fused) -> Module:
    kernels: list[Kernel] = []
    scratch: dict[str, Scratch] = {}
    for section in Section:
        if made.section(section):
            _section(made, section, kernels, scratch, fused)
    name = made.program.name
    scans = "scan" if made.program.reverse is None else "scans"
    source = assemble(f"{name}, {made.handovers} hand-overs a chunk in the {scans}.", [k.text for k in kernels])
    return Module("_".join(filter(None, [name, *words])), source, tuple(kernels), tuple(scratch.values()))


def _section(made: Plan, section: Section, kernels: list[Kernel], scratch: dict[str, Scratch], fused: Fused) -> None:
    tasks, first = _ordered(made, section), made.section(section)[0]
    if any(t.part == "cols" for t in first.tasks):
        own = of_gates(made.program, first.tasks)
        kernels.append(_channel_kernel(made, SUB_CHUNKS, first, own, scratch, fused))
        tasks = [t for t in tasks if t not in own]
    if any(t.part == "pairs" for t in first.tasks):
        kernels.append(_channel_kernel(made, section.value, first, tasks, scratch, fused))
        tasks = []
    if not tasks:
        return
    scan = section in SCANS
    domain = Domain.LANE_COLUMNS if scan else _domain(tasks)
    body = Body(made, tasks, fused, turns=scan, columns=domain is not Domain.CHUNKS)
    body.scratch.update(scratch)
    body.print()
    text = _scan_text(made, body, section) if scan else _chunks_text(section.value, body, domain)
    if "log_gate(" in text:
        text = fused.functions(tile=False, channels=False) + text
    scratch.update(body.scratch)
    made_of = next(kernel for kernel in kernel_plans(made) if kernel.name == section.value)
    arguments = tuple(_arguments(body))
    kernels.append(Kernel(section.value, domain, arguments, used_constants(text), text, made_of.slots))


def _domain(tasks: Sequence[Task]) -> Domain:
    """Of a section with all chunks at once: columns of V apart, unless something is summed over them."""
    wide = any("V" in task.output.type.shape for task in tasks)
    summed = any("V" in v.type.shape and "V" not in t.output.type.shape for t in tasks for v in t.inputs)
    return Domain.CHUNK_COLUMNS if wide and not summed else Domain.CHUNKS


def _ordered(made: Plan, section: Section) -> list[Task]:
    """The tasks in the order of one turn. What works for the next turn at the end of one begins the next instead."""
    early: list[Task] = []
    late: list[Task] = []
    for stage in made.section(section):
        for task in stage.tasks:
            (early if stage.shift.get(task.name) else late).append(task)
    return list(dict.fromkeys([*early, *late]))


# ---- text


def _arguments(body: Body) -> list[Argument]:
    order = list(Kind)
    return sorted(body.arguments.values(), key=lambda a: order.index(a.kind))


def _head(name: str, body: Body, lines: list[str]) -> list[str]:
    arguments = _arguments(body)
    head = definition(name, arguments, used_constants("\n".join([*lines, *body.lines])))
    head += ["    core = tl.program_id(0)", "    cores = tl.num_programs(0)"]
    io = next(a.name for a in arguments if a.kind is Kind.IO)
    return head + ([f"    io = {io}.dtype.element_ty"] if any(".to(io)" in x for x in body.lines) else [])


def _columns(domain: Domain, rest: str) -> list[str]:
    """Split a task number into columns of V and the rest."""
    if domain in (Domain.CHUNK_COLUMNS, Domain.LANE_COLUMNS):
        return ["column = task % (V // BV) * BV", f"{rest} = task // (V // BV)"]
    return [f"{rest} = task"]


def _chunks_text(name: str, body: Body, domain: Domain) -> str:
    """A kernel over all chunks at once. Where it also leaves what has no columns of V, which tasks that share a chunk
    would all write, the host launches it for one ``part`` of the columns after the other."""
    body.argument("tasks", Kind.COUNT)
    place = _columns(domain, "at")
    if domain is Domain.CHUNK_COLUMNS and any("V" not in task.output.type.shape for task in body.tasks):
        place = [f"column = {body.argument('part', Kind.COUNT)} * BV", "at = task"]
    start = [*place, "head = at % HV"]
    mentioned = "\n".join(body.lines)
    if "token" in mentioned:
        chunks = body.argument("chunks", Kind.I32)
        start += [
            "chunk = at // HV",
            f"token = tl.load({chunks} + 2 * chunk)",
            f"rows = tl.load({chunks} + 2 * chunk + 1)",
        ]
    elif "head" not in mentioned:
        start.pop()
    lines = ["    for task in range(core, tasks, cores):", *indent(start, 2), *indent(body.lines, 2)]
    return "\n".join([*_head(name, body, start), *lines])


def _scan_text(made: Plan, body: Body, section: Section) -> str:
    """The kernel that walks the chunks of a sequence with the state, or from its end with the state's gradient, on
    chip."""
    reverse = section is Section.REVERSE
    carry = made.program.reverse if reverse else made.program.carry
    assert carry is not None
    initial, final = (body.argument(f"{port}_ptr", Kind.F32) for port in (carry.init, carry.final))
    sequences, first = body.argument("cu_seqlens", Kind.I32), body.argument("first_chunk", Kind.I32)
    body.argument("tasks", Kind.COUNT)
    tile = "lane, column, K, V, BV"
    start = [
        *_columns(Domain.LANE_COLUMNS, "lane"),
        "sequence = lane // HV",
        "head = lane % HV",
        f"start = tl.load({sequences} + sequence)",
        f"length = tl.load({sequences} + sequence + 1) - start",
        f"first = tl.load({first} + sequence)",
        f"{carry.name} = tl.zeros([K, BV], tl.float32)",
        "if INITIAL:",
        f"    {carry.name} = tl.load(tile_at({initial}, {tile}))",
        *(["last = tl.cdiv(length, C) - 1"] if reverse else []),
        "for n in range(tl.cdiv(length, C)):",
    ]
    n = "(last - n)" if reverse else "n"
    turn = [f"at = (first + {n.strip('()')}) * HV + head"]
    if "token" in "\n".join(body.lines):
        turn += [f"token = start + {n} * C", f"rows = length - {n} * C"]
    end = [f"tl.store(tile_at({final}, {tile}), {carry.name})"]
    lines = [
        "    for task in range(core, tasks, cores):",
        *indent(start, 2),
        *indent([*turn, *body.lines, f"{carry.name} = {carry.step.name}"], 3),
        *indent(end, 2),
    ]
    return "\n".join([*_head(section.value, body, [*start, *turn, *end]), *lines])


# ---- gates per channel


def _channel_kernel(
    made: Plan, name: str, stage: Stage, tasks: Sequence[Task], scratch: dict[str, Scratch], fused: Fused
) -> Kernel:
    """The kernel of macros_channel.py that does these ``tasks`` of a stage, and leaves and reads what the plan says."""
    text, runtime, constants = macro_kernel(name)
    known = {"BETA": any(port.name == "beta" for port in made.program.inputs)}
    known["WIDE"] = made.program.port("g").type.cols != 1
    known |= {"NORM": fused.norm, "SIGMOID": fused.sigmoid_beta}
    known["INVERTED"] = any(task.part == "diagonal" for task in tasks)
    known["JOINED"] = any(task.part == "diagonal" and task.op.kind is OpKind.GATED_GRAM for task in tasks)
    for constant, value in known.items():
        text = re.sub(rf"\b{constant}\b", str(value), text.replace(f"    {constant}: tl.constexpr,\n", ""))
    constants = tuple(constant for constant in constants if constant not in known)
    names = [argument.removesuffix("_ptr") for argument in runtime if argument.endswith("_ptr")]
    outputs = {task.name for task in tasks}
    crossing = [*stage.reads, *(b for b in stage.writes if b.name in outputs)]
    if missing := {b.name for b in crossing if b.scope is not Scope.PORT} - set(names):
        raise TileProgramError(f"{name} does not have what the plan says it does", ", ".join(sorted(missing)))
    if name == SUB_CHUNKS and not known["JOINED"]:
        grams = (f"{task.op.result.name}_diagonal" for task in tasks if task.part == "rows")
        scratch.update({gram: Scratch(gram, Kind.F32, ("C", "C")) for gram in grams})
    for buffer in made.buffers:
        if buffer.name in names and buffer.scope is not Scope.PORT:
            kind = Kind.IO if buffer.dtype is DType.IO else Kind.F32
            shape = ("K", 1) if buffer.shape == (1, 1) else buffer.shape
            scratch.setdefault(buffer.name, Scratch(buffer.name, kind, shape))
    kinds = {"chunks": Kind.I32, "scale": Kind.NUMBER, "tokens": Kind.COUNT, "tasks": Kind.COUNT}
    kinds |= dict.fromkeys(("g_ptr", "beta_ptr", "A_log_ptr", "dt_bias_ptr", "grad_g_ptr"), Kind.F32)
    kinds |= dict.fromkeys(("gate_scale", "l2norm_eps"), Kind.NUMBER)
    arguments = [Argument(a, kinds.get(a) or _pointer_kind(a, scratch)) for a in runtime]
    domain = Domain.SUB_CHUNKS if name == SUB_CHUNKS else Domain.CHUNK_KEYS
    text = fused.functions(tile=True, channels=known["WIDE"]) + text
    return Kernel(name, domain, tuple(arguments), constants, text)


def _pointer_kind(name: str, buffers: Mapping[str, Scratch]) -> Kind:
    buffer = buffers.get(name.removesuffix("_ptr"))
    return Kind.IO if buffer is None else buffer.kind
