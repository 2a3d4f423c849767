"""What the compiler decided about a kernel, read from the text of its HIVM."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .memory import memref_type
from .parse import Block, Module, Op, UnsupportedError

_SPACES = {"ub": "UB", "cbuf": "L1", "cc": "L0C"}
_CONSTANT = re.compile(r"(%\w+) = (?:arith\.constant |llvm\.mlir\.constant\()(\d+)")
_TILE = re.compile(r"hivm\.hir\.pointer_cast\((%\w+)\) : memref<(\w+), #hivm\.address_space<(\w+)>>")
_FROM_VEC_OR_TO_IT = re.compile(
    r"sync_block_(?:(wait)\[<CUBE>, <PIPE_MTE3>, <PIPE_MTE[12]>\]|(set)\[<CUBE>, <PIPE_FIX>, <PIPE_V>\])"
)
_SIZES = ("UB_SIZE", "L1_SIZE", "L0A_SIZE", "L0B_SIZE", "L0C_SIZE")


@dataclass(frozen=True)
class UnitFacts:
    """One function: its synchronisations with other cores."""

    block_sets: int
    block_waits: int


@dataclass(frozen=True)
class Memory:
    """One memory of a core: its bytes up to the highest address used, and those of every place it is cut into.
    ``tiles``: by function and in its order, every tile's address and bytes; several may lie in one place."""

    peak: int
    places: list[int]
    tiles: list[tuple[int, int]]


@dataclass(frozen=True)
class Facts:
    """One kernel. ``workspace_bytes`` is per block; ``memories`` by name. What follows is None where it was not read:
    ``handovers`` counts changes of unit in one turn of the innermost loop that has any, the wrap to the next turn
    included, and ``crossings`` the synchronisations there that say that a tile is ready for the other unit."""

    workspace_bytes: int
    memories: dict[str, Memory]
    cube: UnitFacts | None = None
    vec: UnitFacts | None = None
    handovers: int | None = None
    crossings: int | None = None


def device(text: str) -> dict[str, int]:
    """What the compiler takes the device to have, as it notes in its output: bytes of each memory, and core groups."""
    entries = dict(re.findall(r'dl_entry<"(\w+)", (\d+) : i32>', text))
    memories = {name.removesuffix("_SIZE"): int(bits) // 8 for name, bits in entries.items() if name in _SIZES}
    return {**memories, "groups": int(entries["CUBE_CORE_COUNT"])}


def layout(text: str, kernel: str) -> Facts:
    """What the custom form of a kernel's HIVM says of memory alone; it is alike for all generations."""
    return Facts(_workspace_bytes(text, kernel), _memories(text, kernel))


def next_facts(text: str, kernel: str) -> Facts:
    """Facts for the next generation, whose functions are blocks with jumps: the order of Cube's lines is that of its
    one loop, and what it waits for comes through memory on chip as well."""
    cube = re.search(rf"  func\.func @{kernel}_mix_aic\(.*?(?=\n  func\.func|\Z)", text, re.S)
    events = _FROM_VEC_OR_TO_IT.findall(cube.group()) if cube else []
    changes = sum(a[0] != b[0] for a, b in zip(events, events[1:] + events[:1], strict=True))
    return replace(layout(text, kernel), handovers=changes)


def facts(module: Module, text: str, kernel: str) -> Facts:
    """All facts of ``kernel``, from the parsed ``module`` and the custom form ``text`` it came from."""
    found = layout(text, kernel)
    cube, vec = (module.functions.get(f"{kernel}_mix_{unit}") for unit in ("aic", "aiv"))
    if cube is not None and vec is not None:
        changes, crossings = _handovers(cube)
        return replace(found, cube=_unit(cube), vec=_unit(vec), handovers=changes, crossings=crossings)
    alone = module.functions[kernel]
    unit = "cube" if "func_core_type<AIC>" in alone.attributes else "vec"
    return replace(found, handovers=0, **{unit: _unit(alone)})


def _workspace_bytes(text: str, kernel: str) -> int:
    """Bytes of global memory a block of ``kernel`` needs."""
    function = rf"@{kernel}_infer_workspace_shape_function\(\).*?\n\s*%\w+ = arith.constant (\d+) : index"
    found = re.search(function, text, re.S)
    return int(found.group(1)) if found else 0


def _memories(text: str, kernel: str) -> dict[str, Memory]:
    """Where the kernel's functions put their tiles: addresses are constants of each function."""
    places: dict[str, dict[int, int]] = {}
    every: dict[str, list[tuple[int, int]]] = {}
    for function in re.split(r"\n(?=  func\.func)", text):
        if not re.match(rf"  func\.func (?:private )?@{kernel}(?:_mix_\w+)?\(", function):
            continue
        constants = dict(_CONSTANT.findall(function))
        tiles = _TILE.findall(function)
        if len(tiles) != function.count("hivm.hir.pointer_cast("):
            raise UnsupportedError(f"a tile of {kernel} without an address")
        for name, kind, space in tiles:
            sizes, dtype = memref_type(f"memref<{kind}>")
            count, at = math.prod(sizes), int(constants[name])
            size = -(-count // 8) if dtype.kind == "b" else count * dtype.itemsize
            known = places.setdefault(_SPACES[space], {})
            known[at] = max(known.get(at, 0), size)
            every.setdefault(_SPACES[space], []).append((at, size))
    return {
        memory: Memory(
            max(at + size for at, size in known.items()), sorted(known.values(), reverse=True), every[memory]
        )
        for memory, known in places.items()
    }


def _unit(function: Op) -> UnitFacts:
    names = [op.name.rpartition(".")[2] for op in function.walk()]
    return UnitFacts(*(names.count(name) for name in ("sync_block_set", "sync_block_wait")))


def _handovers(cube: Op) -> tuple[int, int]:
    """Changes of unit and tiles that cross. Cube's loop, seen from Cube: it waits for data that Vec has written, and it
    tells Vec of its own results.

    Each run of waits is a change from Vec to Cube, each run of results one back; where one side only gives, there are
    two changes all the same. The other synchronisations say that a buffer has been read and may be written again.
    """
    _, loop = max(_loops(cube.regions[0], 0), key=lambda pair: pair[0])
    events = list(_events(loop))
    changes = sum(a != b for a, b in zip(events, events[1:] + events[:1], strict=True))
    return max(changes, 2) if events else 0, len(events)


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
