"""What the compiler lays out on chip, against the plan.

It shares no place over lifetimes while there is room for all. In L1 every operand of Cube has two places, so that the
next is loaded while one is read; in L0C every sum has one; in UB what is loaded has two places, and what is stored may.
Where that is too much it lays second places in L1 over other operands' first ones, and in L0C lets sums take turns, in
as many places as are alive at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kdacompile.lowering.ascend.kernel import SUB_CHUNK
from kdacompile.lowering.ascend.launch import levels
from kdacompile.lowering.ir import DType
from kdacompile.lowering.plan import Plan
from kdacompile.lowering.plan.capacity import Need
from kdacompile.lowering.plan.whole import kernel_plans
from kdacompile.lowering.stages import Section, Task
from kdacompile.lowering.target import ASCEND910B, Target

# What a kernel has in UB beside the plan's tiles: a vector spread for an elementwise operation with a tile.
TEMPORARIES = 5 * 1024


def on_chip(made: Plan, section: str, facts: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """By memory: the least the plan says a section can do with, what the compiler took, every tile apart."""
    least: dict[str, int] = {}
    apart: dict[str, dict[str, int]] = {}
    for need in _needs(made, section):
        if need.memory in facts["memories"]:
            least[need.memory] = max(least.get(need.memory, 0), need.bytes)
            apart.setdefault(need.memory, {}).update(need.apart)
    return {m: (n, facts["memories"][m]["peak"], sum(apart[m].values())) for m, n in least.items()}


def within_capacity(facts: dict[str, Any], target: Target = ASCEND910B) -> bool:
    return all(found["peak"] <= (target.capacity(memory) or 0) for memory, found in facts["memories"].items())


def check_on_chip(made: Plan, section: str, facts: dict[str, Any]) -> None:
    """Never less than what is alive at once, and, but for what macros have beside the plan's tiles (they make the Gram
    matrices and inverses of the prologue), no more than two places for each."""
    assert within_capacity(facts, made.target)
    macros = any(_is_macro(task) for stage in made.section(Section(section)) for task in stage.tasks)
    for memory, (least, found, apart) in on_chip(made, section, facts).items():
        assert least <= found, memory
        assert section == "prologue" or macros or found <= 2 * apart + TEMPORARIES * (memory == "UB"), memory


def check_cube(made: Plan, section: str, memories: dict[str, Any]) -> None:
    """L1 and L0C, tile by tile."""
    operands, sums = cube_tiles(made, section)
    if not operands:
        assert memories.keys() == {"UB"}
        return
    if 2 * sum(operands.elements()) > (made.target.capacity("L1") or 0):
        check_shared(operands, memories["L1"]["tiles"], made.target.capacity("L1") or 0)
    else:
        places: Counter[int] = Counter()
        for size in memories["L1"]["places"]:  # both places of an operand may be in one piece
            places[size if size in operands else size // 2] += 1 if size in operands else 2
        assert places == operands + operands
    if sums.total() and sum(sums.elements()) <= (made.target.capacity("L0C") or 0):
        assert Counter(memories["L0C"]["places"]) == sums
    else:
        alive = max(need.bytes for need in _needs(made, section) if need.memory == "L0C")
        assert memories["L0C"]["peak"] == max(alive, *sums)


def check_shared(operands: Counter[int], tiles: Sequence[tuple[int, int]], capacity: int) -> None:
    """Of operands whose two places have no room apart. The first places lie side by side from 0 on, and behind them as
    many of the second as there is room for; the rest lies over first places of other operands, which are not read or
    loaded then, or the race detector would see it (test_dtypes runs KDA's scan so)."""
    first, second = tiles[::2], tiles[1::2]
    assert Counter(size for _, size in first) == Counter(size for _, size in second) == operands
    once = sum(operands.elements())
    assert _side_by_side(first, 0) == once
    behind = [tile for tile in second if tile[0] >= once]
    shared = [size for at, size in second if at + size <= once]
    assert len(behind) + len(shared) == len(second)
    assert capacity - min(shared) < _side_by_side(behind, once) <= capacity


def _side_by_side(tiles: Sequence[tuple[int, int]], start: int) -> int:
    """Where tiles end that lie without a gap from ``start`` on."""
    for at, size in sorted(tiles):
        assert at == start
        start += size
    return start


def cube_tiles(made: Plan, section: str) -> tuple[Counter[int], Counter[int]]:
    """Bytes of Cube's operands and of its sums in a section, stage by stage, once each, with macros spelled out."""
    operands: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    for stage in made.section(Section(section)):
        macros = [task for task in stage.tasks if _is_macro(task)]
        loaded = {value.name for task in stage.tasks if task not in macros for value in task.inputs[:2]}
        summed = {task.name for task in macros}
        ahead, now = (
            {v.name for t in stage.tasks if bool(stage.shift.get(t.name)) is later for v in t.inputs[:2]}
            for later in (True, False)
        )
        for need in _needs(made, stage.name):
            if need.memory == "L1":
                operands.update(size for name, size in need.apart if name in loaded)
                operands.update(size for name, size in need.apart if name in loaded & ahead & now)  # for each step
            elif need.memory == "L0C":
                sums.update(size for name, size in need.apart if name not in summed)
        for task in macros:
            _add_blocks(made, task, operands, sums)
    return operands, sums


def _is_macro(task: Task) -> bool:
    """A Gram matrix with a gate per channel, or the blocks of an inverse being joined."""
    return task.part in ("left", "join") or (task.part == "product" and task.inputs[1].name.endswith("_cols"))


def _add_blocks(made: Plan, task: Task, operands: Counter[int], sums: Counter[int]) -> None:
    """What a macro multiplies block by block, for every pair of neighbours of a level: two tiles of keys, or y by l, or
    that by x. Where Cube rounds what it joins, and joins further, it multiplies l by x and y by that as well."""
    twice = task.part in ("left", "join") and made.options.ahead
    for level in range(levels(made.sizes["C"])):
        block, pairs = SUB_CHUNK << level, made.sizes["C"] // (2 * SUB_CHUNK << level)
        operand = block * made.sizes["K"] * made.widths[DType.IO] if task.part == "product" else block * block * 4
        times = pairs * (2 if twice and 2 * block < made.sizes["C"] else 1)
        operands[operand] += 2 * (times if task.part == "join" else pairs)
        sums[block * block * 4] += times


def check_vec(made: Plan, memories: dict[str, Any]) -> None:
    """UB of a scan, tile by tile. With Cube each has one place. Alone, Vec loads the state's change, which has two
    then, as the state's shadow may, which it stores; and the next state is made beside this one."""
    places = Counter(memories["UB"]["places"])
    tiles = dict(pair for need in _needs(made, "scan") if need.memory == "UB" for pair in need.apart)
    expected = Counter(size for size in tiles.values() if size > TEMPORARIES)
    alone = memories.keys() == {"UB"}
    if alone:
        expected.update((tiles["S"], tiles["dS"]))
    assert not expected - places
    rest = places - expected
    if alone and rest[tiles["S_io"]]:
        rest[tiles["S_io"]] -= 1
    assert sum(rest.elements()) <= TEMPORARIES


def _needs(made: Plan, section: str) -> list[Need]:
    """Of a section or a stage; those of L0A and L0B, which operands pass in pieces, are not here."""
    stages = {stage.name for kernel in kernel_plans(made) if kernel.name == section for stage in kernel.stages}
    return [need for need in made.needs if need.stage in stages | {section} and need.apart]
