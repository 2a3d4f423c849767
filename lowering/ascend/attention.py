"""Latent attention for Ascend: the decode program's plan as one kernel on both units, and the merge of its parts.

A task is a tile of heads of one query, and a part of the blocks that query sees. The blocks are walked with the carry
on Vec; where a query's blocks are cut into parts, each leaves its carry in memory and a kernel on Vec merges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ..attention import attention_program, decode_program
from ..emitter import Emitter
from ..ir import Op, OpKind, Program, Value
from ..plan import Plan, plan
from ..stages import Section
from .kernel import Argument, Domain, Kernel, Kind, Module, assemble, definition, indent, used_constants

HEADS = (16, 32)  # heads of a tile: one fractal of the Cube, and what two Vec cores hold the accumulator of
BLOCK = 128  # cached tokens of a block, where they fit
CARRY = ("max", "sum", "acc")
_START = {
    "max": "lowest(TILE)",
    "sum": "tl.zeros([TILE], tl.float32)",
    "acc": "tl.zeros([TILE, K], tl.float32)",
}


def attention_plan(
    heads: int, block: int, rank: int, rope: int, io: str, target: str = "ascend910b", *, masks: bool = False
) -> Plan:
    """The plan of ``heads`` heads by ``block`` cached tokens; ``rope`` 0 where keys have no shared part, ``masks``
    where every head has one of its own."""
    sizes: dict[str, Any] = {"D": rope} if rope else {}
    return plan(decode_program(rope=rope > 0, masks=masks), target, io=io, M=heads, C=block, K=rank, **sizes)


@cache
def attention_module(rope: bool, masks: bool = False) -> Module:
    """``attend`` and ``merge``; their texts are the same for all sizes. ``masks``: every head has one of its own."""
    made = attention_plan(32, BLOCK, 512, 64 if rope else 0, "bf16", masks=masks)
    kernels = (_attend(made, rope, masks), _merge())
    title = f"{made.program.name}, {made.handovers} hand-overs a block."
    name = made.program.name + ("" if rope else "_norope") + ("_masks" if masks else "")
    return Module(name, assemble(title, [kernel.text for kernel in kernels]), kernels)


_HIDDEN = (
    "hidden = hidden_after(rows, C)",
    "if MASK:",
    "    masked = row // queries * mask_batch + row % queries * mask_query",
    "    hidden += load_mask(mask_ptr, masked, position, width, C)",
)
_HIDDEN_BY_HEAD = (
    "masked = row // queries * mask_batch + row % queries * mask_query + head * mask_head",
    "hidden = load_masks(mask_ptr, masked, position, width, mask_head, head, H, TILE, C)",
    "hidden += hidden_after(rows, C)[None, :]",
)


def _attend(made: Plan, rope: bool, masks: bool) -> Kernel:
    tasks = [task for stage in made.section(Section.SCAN) for task in stage.tasks]
    early = [t for stage in made.section(Section.SCAN) for t in stage.tasks if stage.shift.get(t.name)]
    # a product may overwrite its left operand, so queries are loaded for each
    ports = {
        "q": "load_heads(q_ptr, row, head, H, TILE, K)",
        "q_rope": "load_heads(q_rope_ptr, row, head, H, TILE, ROPE)",
    }
    ports |= {name: name for name in (*(f"{name}0" for name in CARRY), "latent", "k_rope", "hidden")}
    printer = _Attention(made.program, ports)
    printer.emit(dict.fromkeys(task.op for task in [*early, *tasks]))
    loads = ["latent = load_block(latent_ptr, page, first, rows, page_stride, LATENT_ROW, C, K)"]
    if rope:
        loads.append("k_rope = load_block(k_rope_ptr, page, first, rows, rope_stride, ROPE_ROW, C, ROPE)")
    block = [
        "rows = visible - n * C",
        "page = row // queries",
        "first = n * C",
        "position = n * C",
        "if PAGE:",
        "    start = n // IN_PAGE * PAGE",
        "    page = tl.load(table_ptr + page * pages + n // IN_PAGE)",
        "    first = n % IN_PAGE * C",
        "    position = start + first",
        "    rows = tl.minimum(PAGE, visible - start) - first",
        *loads,
        *(_HIDDEN_BY_HEAD if masks else _HIDDEN),
        *printer.lines,
        *(f"{name}0 = {value}" for name, value in _stored(made.program).items()),
    ]
    lines = [
        *_task("row", "tile % TILES"),
        "visible = tl.load(visible_ptr + row)",
        "blocks = (visible + C - 1) // C",
        "if PAGE:",
        "    blocks = visible // PAGE * IN_PAGE + (visible % PAGE + C - 1) // C",
        "share = (blocks + PARTS - 1) // PARTS",
        *_carry_start(),
        "for n in range(part * share, tl.minimum(part * share + share, blocks)):",
        *indent(block, 1),
        "if PARTS == 1:",
        *indent(_finished(), 1),
        "else:",
        *indent([f"store_{_part(name, f'{name}0')}" for name in CARRY], 1),
    ]
    kinds = {"q_ptr": Kind.IO, "latent_ptr": Kind.IO, "q_rope_ptr": Kind.IO, "k_rope_ptr": Kind.IO, "o_ptr": Kind.IO}
    kinds |= {f"{name}_ptr": Kind.F32 for name in ("lse", "mask", *CARRY)} | {
        "table_ptr": Kind.I32,
        "visible_ptr": Kind.I32,
    }
    kinds |= {"scale": Kind.NUMBER}
    counts = ("page_stride", "rope_stride", "pages", "queries", "mask_batch", "mask_query", "width", "tasks")
    kinds |= dict.fromkeys((*counts, "mask_head") if masks else counts, Kind.COUNT)
    if not rope:
        kinds = {name: kind for name, kind in kinds.items() if "rope" not in name}
    return _kernel("attend", lines, kinds, ["io = q_ptr.dtype.element_ty"])


def _merge() -> Kernel:
    """The merge program over the parts of a tile of heads, on Vec alone."""
    merge = attention_program().merge
    printer = _Attention(merge, {f"{name}{i}": f"{name}{i}" for name in CARRY for i in (0, 1)})
    printer.emit(merge.ops)
    turn = [
        *(f"{name}1 = load_{_part(name)}" for name in CARRY),
        *printer.lines,
        *(f"{name}0 = {value}" for name, value in _stored(merge).items()),
    ]
    lines = [
        "row = task // TILES",
        "head = task % TILES * TILE",
        *_carry_start(),
        "for part in range(PARTS):",
        *indent(turn, 1),
        *_finished(),
    ]
    kinds = {"o_ptr": Kind.IO, **{f"{name}_ptr": Kind.F32 for name in ("lse", *CARRY)}, "tasks": Kind.COUNT}
    return _kernel("merge", lines, kinds, ["io = o_ptr.dtype.element_ty"])


def _kernel(name: str, lines: list[str], kinds: Mapping[str, Kind], start: list[str]) -> Kernel:
    arguments = tuple(Argument(*pair) for pair in kinds.items())
    constants = used_constants("\n".join(lines))
    head = [*definition(name, arguments, constants), "    core = tl.program_id(0)", "    cores = tl.num_programs(0)"]
    body = [*indent(start, 1), "    for task in range(core, tasks, cores):", *indent(lines, 2)]
    return Kernel(name, Domain.HEAD_TILES, arguments, constants, "\n".join([*head, *body]))


def _task(row: str, tile: str) -> list[str]:
    return ["part = task % PARTS", "tile = task // PARTS", f"{row} = tile // TILES", f"head = {tile} * TILE"]


def _carry_start() -> list[str]:
    return [f"{name}0 = {_START[name]}" for name in CARRY]


def _finished() -> list[str]:
    return [
        "o = divided(acc0, sum0).to(io)",
        "store_heads(o_ptr, row, head, o, H, TILE, K)",
        "store_numbers(lse_ptr, row, head, log_of_sum(max0, sum0), H, TILE)",
    ]


def _part(name: str, value: str = "") -> str:
    """The rest of a call that loads or stores a part's carry: it lies by query, part and head."""
    words = [f"{name}_ptr", "row * PARTS + part", "head", *([value] if value else []), "H", "TILE"]
    return f"heads({', '.join([*words, 'K'])})" if name == "acc" else f"numbers({', '.join(words)})"


def _stored(program: Program) -> dict[str, str]:
    stores = {str(op.attr("port")): op.inputs[0].name for op in program.ops if op.kind is OpKind.STORE}
    return {name: stores[name] for name in CARRY}


class _Attention(Emitter):
    """Ops as lines. A value with one column or one row is a vector and takes its axis where it meets a tile."""

    def __init__(self, program: Program, ports: Mapping[str, str]) -> None:
        super().__init__(program)
        loads = [op for op in program.ops if op.kind is OpKind.LOAD]
        self._loaded = {op.result: ports[str(op.attr("port"))] for op in loads}

    def name(self, value: Value) -> str:
        return self._loaded.get(value, value.name)

    def operand(self, value: Value, op: Op) -> str:
        rows, cols = value.type.shape
        if 1 in op.result.type.shape or op.kind is OpKind.SCALE:
            return self.name(value)
        return self.name(value) + ("[None, :]" if rows == 1 else "[:, None]" if cols == 1 else "")

    def on_load(self, op: Op) -> str:
        return ""

    on_store = on_load

    def on_cast(self, op: Op) -> str:
        return f"{self.name(op.inputs[0])}.to(io)"

    def on_dot(self, op: Op) -> str:
        x, y, *acc = map(self.name, op.inputs)
        y = f"tl.trans({y})" if op.attr("trans_b", False) else y
        self.lines.add(f"left = {x}")
        return f'tl.dot({", ".join(["left", y, *acc])}, input_precision="ieee")'
