"""What the compiler decided about a kernel, read from the text of its HIVM."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .memory import memref_type
from .parse import Block, Module, Op

_SPACES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}


@dataclass(frozen=True)
class UnitFacts:
    """One function: bytes of each memory up to the highest address used, and its synchronisations with other cores."""

    peak: dict[str, int]
    block_sets: int
    block_waits: int
    pipe_sets: int


@dataclass(frozen=True)
class Facts:
    """One kernel. ``workspace_bytes`` is per block; ``handovers`` counts changes of unit in one turn of the innermost
    loop that has any, the wrap to the next turn included."""

    workspace_bytes: int
    cube: UnitFacts | None
    vec: UnitFacts | None
    handovers: int


def workspace_bytes(text: str, kernel: str) -> int:
    """Bytes of global memory a block of ``kernel`` needs, from the custom form of its HIVM."""
    function = rf"@{kernel}_infer_workspace_shape_function\(\).*?\n\s*%\w+ = arith.constant (\d+) : index"
    found = re.search(function, text, re.S)
    return int(found.group(1)) if found else 0


def facts(module: Module, text: str, kernel: str) -> Facts:
    """Facts of ``kernel`` from the parsed ``module`` and the custom-form ``text`` it came from."""
    workspace = workspace_bytes(text, kernel)
    cube, vec = (module.functions.get(f"{kernel}_mix_{unit}") for unit in ("aic", "aiv"))
    if cube is not None and vec is not None:
        return Facts(workspace, _unit(cube), _unit(vec), _handovers(cube))
    alone = module.functions[kernel]
    on_cube = "func_core_type<AIC>" in alone.attributes
    return Facts(workspace, _unit(alone) if on_cube else None, None if on_cube else _unit(alone), 0)


def _unit(function: Op) -> UnitFacts:
    constants: dict[str, int] = {}
    peak: dict[str, int] = {}
    counts = dict.fromkeys(("sync_block_set", "sync_block_wait", "set_flag"), 0)
    for op in function.walk():
        name = op.name.rpartition(".")[2]
        if op.name == "arith.constant" and op.type == "i64":
            constants[op.results[0]] = int(op.get(r"value = (-?\d+)"))
        elif name == "pointer_cast":
            sizes, dtype = memref_type(op.type)
            count = math.prod(sizes)
            size = -(-count // 8) if dtype.kind == "b" else count * dtype.itemsize
            space = _SPACES[op.get(r"-> .*address_space<(\w+)>")]
            peak[space] = max(peak.get(space, 0), constants[op.operands[0]] + size)
        elif name in counts:
            counts[name] += 1
    return UnitFacts(peak, counts["sync_block_set"], counts["sync_block_wait"], counts["set_flag"])


def _handovers(cube: Op) -> int:
    """Cube's loop, seen from Cube: it waits for data that Vec has written, and it tells Vec of its own results.

    Each run of waits is a change from Vec to Cube, each run of results one back; where one side only gives, there are
    two changes all the same. The other synchronisations say that a buffer has been read and may be written again.
    """
    _, loop = max(_loops(cube.regions[0], 0), key=lambda pair: pair[0])
    events = list(_events(loop))
    changes = sum(a != b for a, b in zip(events, events[1:] + events[:1], strict=True))
    return max(changes, 2) if events else 0


def _loops(block: Block, depth: int) -> Iterator[tuple[int, Block]]:
    """Loop bodies with a synchronisation of data in them, and how deep they are."""
    yield depth, block
    for op in block.ops:
        for region in op.regions:
            if any(_events(region)):
                inner = depth + (op.name == "scf.for")
                yield from _loops(region, inner)


def _events(block: Block) -> Iterator[str]:
    for op in block.ops:
        if op.name == "hivm.hir.sync_block_wait" and "tpipe = #hivm.pipe<PIPE_MTE3>" in op.attributes:
            yield "vec to cube"
        elif op.name == "hivm.hir.sync_block_set" and "tpipe = #hivm.pipe<PIPE_FIX>" in op.attributes:
            yield "cube to vec"
        for region in op.regions:
            yield from _events(region)
