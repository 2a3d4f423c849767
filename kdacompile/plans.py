"""``kdacompile.plan("kda", target="ascend910b")`` and ``python -m kdacompile plan``: plans by the name of a pattern."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import util
from pathlib import Path
from typing import Any, cast

import torch

from kdacompile import lowering
from kdacompile.errors import OutputError, UnknownPatternError
from kdacompile.lowering.adjoint_program import adjoint_program
from kdacompile.lowering.attention import decode_program
from kdacompile.lowering.ir import Combine, Program
from kdacompile.lowering.linear_attention import linear_attention_program
from kdacompile.lowering.plan import Options, Plan, gdn_state_program, naive_program
from kdacompile.lowering.plan import plan as plan_program
from kdacompile.lowering.plan.model import WIDTHS
from kdacompile.lowering.plan.planner import DEFAULTS
from kdacompile.lowering.plan.whole import kernel_plans, whole_bytes, whole_handovers
from kdacompile.lowering.target import TARGETS
from kdacompile.patterns.recurrence.family import FAMILY, Pattern

STATE_KERNEL = "gdn_state"  # the state kernel of public libraries, to compare with
GRADIENTS = "gradients"  # the form of a pattern that is its adjoint
_FORMS = ("chunk", "token", "segment", GRADIENTS)
MLA = "mla"  # decoding over a latent: M heads, a latent of K columns and D shared columns, blocks of C cached tokens

_MLA_SHAPE = {"M": 32, "C": 128, "K": 512, "D": 64}

# What the real compiler made of the emitted kernels, by pattern, target and kernel, written where the compiler runs
# (`make test-ascend`): its workspace, the buffers the kernel brings itself, what is on chip, and, where they can be
# counted, hand-overs and crossings.
COMPILED = Path(lowering.__file__).parent / "ascend" / "compiled.json"

_TABLE_TARGETS = ("ascend910b", "ascend910_95", "cuda_sm90", "cpu")


def plan(
    pattern: str,
    target: str = "ascend910b",
    *,
    optimise: bool | Options = True,
    io: str = "bf16",
    form: str = "chunk",
    ranks: int | None = None,
    order: str = "zigzag",
    **shape: int,
) -> Plan:
    """The plan of a pattern's program on a target.

    ``pattern``: a name of ``python -m kdacompile support``, "mla" or "gdn_state". ``target``: a name of
    ``kdacompile.lowering.target.TARGETS``. ``optimise=False`` is the textbook's order of work, stage by stage, to
    compare with. ``io``: the inputs' dtype, bf16, fp16 or fp32. ``form``: "chunk", "token" for the one-token step,
    "segment" for what a run of chunks does to the state (its map, merged chunk after chunk), or "gradients", on a
    target whose Cube and Vec are cores of their own. ``shape``: B, T, H
    (heads), K, V (widths), C (tokens a chunk), BV (columns a value tile); for "mla" M (heads of a tile), K (the
    latent's rank), D (shared key columns), C (cached tokens a block), and B x H is the number of tiles. ``ranks``: the
    plan of one of so many ranks among which T tokens are cut in ``order`` (context parallelism, docs/distributed.md),
    with what it computes and sends forward and backward: a :class:`~kdacompile.distributed.cost.ParallelPlan`.

    Raises :class:`~kdacompile.errors.UnknownPatternError`, and from ``kdacompile.lowering`` ``ArgumentError`` on a
    wrong size and ``CapacityError`` where a tile does not fit the target.
    """
    sizes: dict[str, object] = {"ranks": ranks or 1, **shape}
    if wrong := {name: n for name, n in sizes.items() if not isinstance(n, int)}:
        raise lowering.ArgumentError(f"sizes are whole numbers, got {wrong}")
    if form not in _FORMS:
        raise lowering.ArgumentError(f"form must be one of {', '.join(_FORMS)}; got {form!r}")
    program = _program(pattern, form, naive=optimise is False)

    def made(**sizes: int) -> Plan:
        return plan_program(program, target, optimise, io=io, **sizes)

    if ranks is not None:
        return _of_a_rank(made, pattern if form == "chunk" else f"{pattern}, {form}", ranks, order, shape)
    return made(**({**_MLA_SHAPE, **shape} if pattern == MLA else shape))


def _of_a_rank(made: Callable[..., Plan], pattern: str, ranks: int, order: str, shape: Mapping[str, int]) -> Plan:
    from kdacompile.distributed.cost import Layer, ParallelPlan  # torch.distributed is slow to import
    from kdacompile.distributed.fragments import Fragments, take_turns

    row = next((row for row in FAMILY if row.name == pattern), None)
    if ranks < 1:
        raise lowering.ArgumentError(f"ranks={ranks}: at least one")
    if row is None:
        raise lowering.ArgumentError(
            f"ranks={ranks} for {pattern}: only linear attention over a sequence divides its tokens among ranks; "
            "others divide heads or batch, and a rank's plan is that of its sizes"
        )
    per_rank, sizes = Fragments(order, ranks).per_rank, {**DEFAULTS, **shape}
    tokens = -(-sizes["T"] // (ranks * per_rank)) * per_rank
    alone = made(**{**shape, "T": tokens})
    two_passes = alone.target.name == "cuda_sm90" and alone.io == "bf16" and 32 <= sizes["K"] <= 128
    found = alone if two_passes else made(**{**shape, "T": tokens, "V": sizes["V"] + row.delta * sizes["K"]})
    layer = Layer(
        sizes["T"], sizes["H"], sizes["H"], sizes["K"], sizes["V"],
        batch=sizes["B"], delta=row.delta, channel_gate=row.gate == "channel", element=WIDTHS[found.io],
    )  # fmt: skip
    given = {field.name: getattr(found, field.name) for field in fields(found)}
    adjoint = adjoint_program(row.gate, row.delta, beta=row.delta)
    overlap = take_turns(None, ranks, sizes["H"])
    more: dict[str, Any] = {"adjoint": adjoint, "two_passes": two_passes, "overlap": overlap}
    return ParallelPlan(**given, ranks=ranks, order=order, layer=layer, **more)


def names() -> list[str]:
    """The patterns that have a plan."""
    return [row.name for row in FAMILY] + [MLA, STATE_KERNEL]


def _program(pattern: str, form: str, *, naive: bool) -> Program | Combine:
    if pattern in (MLA, STATE_KERNEL):
        if form != "chunk":
            raise lowering.ArgumentError(f"{pattern} has one form; {form!r} is one of linear attention")
        return decode_program() if pattern == MLA else gdn_state_program()
    row = _row(pattern)
    if form == GRADIENTS:
        return adjoint_program(row.gate, row.delta, beta=row.delta)
    if naive and form == "chunk":
        return naive_program(row.gate, row.delta, beta=row.delta)
    if form == "segment":
        carry = linear_attention_program(row.gate, row.delta, beta=row.delta).carry
        assert carry is not None and carry.combine is not None
        return carry.combine
    return linear_attention_program(row.gate, row.delta, beta=row.delta, form=form)


def _row(pattern: str) -> Pattern:
    row = next((row for row in FAMILY if row.name == pattern), None)
    if row is None:
        raise UnknownPatternError(pattern=pattern, known=", ".join(names()))
    return row


def _rows() -> Iterator[tuple[str, str, str]]:
    """Pattern, form and target of the table's rows: gradients where kernels are emitted from their plans."""
    for pattern in names():
        for target in _TABLE_TARGETS:
            yield pattern, "chunk", target
    for row in FAMILY:
        yield row.name, GRADIENTS, _TABLE_TARGETS[0]


def table() -> str:
    """Every pattern on every target, over all kernels of a chunk: naive -> optimised, and what the real compiler made.

    Memory counts every tile at an address of its own, as the compiler lays them out. Where plan and compiler are equal
    one figure stands for both; where not, the compiler's follows in parentheses, and docs/plans.md says why.
    """
    compiled = read_compiled()
    lines = [
        "| pattern | target | stages | hand-overs a chunk | crossings | memory where units meet, bytes "
        "| UB, L1, L0C, bytes | between sections, bytes a chunk |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for pattern, form, target in _rows():
        best = plan(pattern, target, form=form)
        stages = " + ".join(f"{kernel.name} {len(kernel.stages)}" for kernel in kernel_plans(best))
        cells = ["-"] * 4  # one core does everything: nothing is handed over inside a kernel
        if best.target.split:
            real = compiled.get(compiled_as(pattern, form), {}).get(TARGETS[target].name, {})
            cells = _against_compiler(plan(pattern, target, optimise=False, form=form), best, real)
        name = f"`{pattern}`" if form == "chunk" else f"`{pattern}`, {form}"
        lines.append(f"| {name} | {target} | {stages} | {' | '.join(cells)} | {best.tensor_bytes:,} |")
    return "\n".join(lines)


def _against_compiler(naive: Plan, best: Plan, real: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Hand-overs, crossings, memory and on-chip peaks of all kernels."""
    on_chip = best.target.meeting != "global"

    def compiled(*figures: str) -> int | None:
        if not all(figure in kernel for kernel in real.values() for figure in figures) or not real:
            return None
        return sum(kernel[figure] for kernel in real.values() for figure in figures)

    written, planned = (sum(kernel.crossings for kernel in kernel_plans(made)) for made in (naive, best))
    memory = compiled("workspace_bytes", "own_bytes")
    peaks = [max((kernel.get(name, 0) for kernel in real.values()), default=0) for name in ("UB", "L1", "L0C")]
    return [
        _arrow(whole_handovers(naive), whole_handovers(best), compiled("handovers")),
        _arrow(written, planned, compiled("crossings")),
        _arrow(whole_bytes(naive), whole_bytes(best), memory) if not on_chip or memory is not None else "0",
        ", ".join(f"{peak:,}" for peak in peaks) if real else "-",
    ]


def _arrow(naive: int, best: int, real: int | None) -> str:
    found = "" if real is None or real == best else f" ({real:,})"
    return f"{naive:,} → {best:,}{found}"


_BEGIN, _END = "<!-- plans -->\n", "<!-- /plans -->"


def with_table(text: str) -> str:
    """A document with the table between its markers brought up to date."""
    before, rest = text.split(_BEGIN)
    return f"{before}{_BEGIN}{table()}\n{_END}{rest.split(_END)[1]}"


def compiled_as(pattern: str, form: str) -> str:
    """The name of a pattern's form among the compiler's figures."""
    return pattern if form == "chunk" else f"{pattern} {form}"


Compiled = Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]


def read_compiled() -> Compiled:
    """The compiler's figures by pattern, target and kernel, or nothing where no compiler has run."""
    return cast(Compiled, json.loads(COMPILED.read_text(encoding="utf-8"))) if COMPILED.exists() else {}


def parse_sizes(words: Sequence[str]) -> dict[str, int]:
    """``["T=8192", "K=64"]`` as keyword arguments."""
    sizes: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if not number.isdecimal():
            raise lowering.ArgumentError(f"sizes are written like T=8192, got {word!r}")
        sizes[name] = int(number)
    return sizes


def main(arguments: Any) -> int:
    """``python -m kdacompile plan``; ``arguments`` as parsed in ``__main__``."""
    if arguments.table:
        if arguments.write:
            document = arguments.write.read_text(encoding="utf-8")
            if not all(mark in document for mark in (_BEGIN, _END)):
                raise OutputError(path=arguments.write, problem=f"it has no lines {_BEGIN.strip()} and {_END}")
            arguments.write.write_text(with_table(document), encoding="utf-8")
        else:
            print(table())
        return 0
    sizes: Any = parse_sizes(arguments.size)
    if arguments.target == "here":
        arguments.target = here()
    pattern, target, io, form = (str(getattr(arguments, name)) for name in ("pattern", "target", "io", "form"))
    spread: Any = {"ranks": arguments.ranks, "order": arguments.order}
    found = plan(pattern, target, optimise=not arguments.naive, io=io, form=form, **spread, **sizes)
    if arguments.json:
        more: dict[str, Any] = {"parallel": cast(Any, found).as_data()} if arguments.ranks is not None else {}
        print(json.dumps({**as_data(found), **more}, indent=2))
    else:
        print(found, end="")
    if arguments.html:
        alone = arguments.naive or form == "token" or arguments.ranks is not None
        naive = None if alone else plan(pattern, target, optimise=False, io=io, form=form, **sizes)
        arguments.html.write_text(found.to_html(naive), encoding="utf-8")
    if arguments.svg:
        arguments.svg.write_text(found.to_svg(), encoding="utf-8")
    return 0


def here() -> str:
    """The target that stands for this machine."""
    if torch.cuda.is_available():
        own = f"cuda_sm{''.join(map(str, torch.cuda.get_device_capability()))}"
        return own if own in TARGETS else "cuda_sm90"
    return "ascend910b" if util.find_spec("torch_npu") else "cpu"


def as_data(found: Plan) -> dict[str, Any]:
    """A plan as plain data."""
    return {
        "program": found.program.name,
        "target": found.target.name,
        "sizes": dict(found.sizes),
        "io": str(found.io),
        "handovers": found.handovers,
        "least_handovers": found.lower_bound,
        "workspace_bytes": found.workspace_bytes,
        "tensor_bytes": found.tensor_bytes,
        "stages": [
            {
                "name": stage.name,
                "flops": str(stage.flops),
                "bytes": str(stage.bytes),
                "tasks": [str(task) for task in stage.tasks],
            }
            for stage in found.stages
        ],
        "buffers": [
            {
                "name": buffer.name,
                "bytes": found.bytes(buffer),
                "from": buffer.producer,
                "to": list(buffer.consumers),
                "addresses": list(buffer.addresses),
            }
            for buffer in found.buffers
        ],
    }
