"""The buffer plan: a compiler's own table, sharing that survives any timing, capacities."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kdacompile.lowering.errors import CapacityError
from kdacompile.lowering.ir import Program
from kdacompile.lowering.linear_attention import linear_attention_program
from kdacompile.lowering.plan import NAIVE, Options, Plan, gdn_state_program, naive_program, plan
from kdacompile.lowering.plan.cost import total_bytes, total_flops
from kdacompile.lowering.plan.timeline import schedule, timeline
from kdacompile.lowering.plan.whole import whole_handovers
from kdacompile.lowering.stages import Section, evaluate
from kdacompile.lowering.target import ASCEND910B, Figure, Unit


def test_the_compilers_own_workspace() -> None:
    """fp32 hand-overs and no reuse: offsets, shapes and dtypes of the table a compiler wrote for the state kernel."""
    found = plan(gdn_state_program(), "ascend910b", NAIVE, BV=64)
    table = [(b.addresses, b.shape, b.dtype.value) for b in found.workspaces]
    assert table == [
        ((0, 16384), ("K", "V"), "io"),
        ((32768, 49152), ("C", "V"), "acc"),
        ((65536, 73728), ("C", "V"), "io"),
        ((81920, 114688), ("K", "V"), "acc"),
    ]
    assert found.workspace_bytes == 147_456


@pytest.mark.parametrize(
    ("options", "bytes"),
    [
        (replace(NAIVE, narrow=True), 131_072),  # W S in bf16: its readers round it anyway
        (replace(NAIVE, narrow=True, narrow_update=True), 98_304),  # dS as well
        (Options(), 81_920),  # dS fp32, addresses shared
        (Options(narrow_update=True), 49_152),
    ],
)
def test_the_way_down(options: Options, bytes: int) -> None:
    found = plan(gdn_state_program(), "ascend910b", options, BV=64)
    assert found.workspace_bytes == bytes
    assert found.handovers == 4
    if options.reuse:  # V' and dS are alive at once: the product that reads one writes the other
        alive = found.bytes(found.buffer("V_gated_io")) + found.bytes(found.buffer("dS"))
        assert found.floor_bytes == bytes == 2 * alive


def test_the_floor_of_two_hand_overs() -> None:
    """V' and dS are alive at once where Cube's own operands pass through memory; S shares with them.

    Cube has read S into its own memory before dS is written. Where V' stays on chip, dS alone is the floor.
    """
    program = linear_attention_program("channel", True)
    on_chip = replace(ASCEND910B, own_operands="chip")
    for narrow, through_memory, kept in ((False, 81_920, 65_536), (True, 49_152, 32_768)):
        found = plan(program, "ascend910b", Options(narrow_update=narrow))
        assert found.workspace_bytes == found.floor_bytes == through_memory
        best = plan(program, on_chip, Options(narrow_update=narrow))
        assert best.workspace_bytes == best.floor_bytes == kept
        assert best.buffer("S_io").addresses == best.buffer("dS").addresses == (0,)


def test_what_may_cross_narrow() -> None:
    found = plan(linear_attention_program("channel", True), "ascend910b", Options(ahead=False))
    assert found.buffer("dS").reason == "goes into the fp32 master state"
    assert "inverse" in found.buffer("A_kk_raw").reason
    assert found.buffer("A_qk_raw").dtype.value == "io"
    wide = plan(linear_attention_program("channel", True), "ascend910b", io="fp32")
    assert wide.bytes(wide.buffer("S_io")) == 2 * found.bytes(found.buffer("S_io"))


# ---- addresses, under any timing


def programs() -> list[Program]:
    rows = [("channel", True), ("token", True), ("none", False)]
    return [make(*row) for row in rows for make in (linear_attention_program, naive_program)] + [gdn_state_program()]


def test_shared_bytes_are_never_wanted_twice() -> None:
    """Tasks of random length, units in order, a task after what it reads: no two live tiles overlap in memory."""
    dice = random.Random(0)
    for program in programs():
        found = plan(program, "ascend910b", Options(outputs="scan"))
        for _ in range(5):
            clash = overlaps(found, dice, steps=6)
            assert clash == [], f"{program.name}: {clash[:3]}"


def test_a_plan_with_wrong_addresses_is_caught() -> None:
    """The check above can fail: two tiles that are alive at once, put at one address."""
    found = plan(gdn_state_program(), "ascend910b", BV=64)
    wrong = tuple(replace(b, addresses=(0, 40960)) if b.name in ("dS", "V_gated_io") else b for b in found.buffers)
    assert overlaps(replace(found, buffers=wrong), random.Random(0), steps=6)


def overlaps(found: Plan, dice: random.Random, steps: int) -> list[str]:
    """Pairs of workspace tiles that are alive at one time and share bytes, when task lengths are drawn at random."""
    ended = play(found, dice, steps)
    tasks = [task for stage in found.section(Section.SCAN) for task in stage.tasks]
    tiles: list[tuple[str, float, float, int, int]] = []
    for buffer in found.in_memory:
        if buffer.copies > 1:  # released by its reader before it is written again
            continue
        readers = [task.name for task in tasks if any(v.name == buffer.name for v in task.inputs)]
        for n in range(1, steps - 1):
            start, _ = ended[buffer.name, n]
            end = max(ended[name, n][1] for name in readers)
            address = buffer.addresses[0]
            tiles.append((f"{buffer.name} {n}", start, end, address, address + found.bytes(buffer)))
    return [
        f"{a[0]} and {b[0]}"
        for i, a in enumerate(tiles)
        for b in tiles[i + 1 :]
        if a[1] < b[2] and b[1] < a[2] and a[3] < b[4] and b[3] < a[4]
    ]


def play(found: Plan, dice: random.Random, steps: int) -> dict[tuple[str, int], tuple[float, float]]:
    """Start and end of every task of every step."""
    stages = found.section(Section.SCAN)
    carry = found.program.carry
    assert carry is not None
    free: dict[str, float] = {}
    ended: dict[tuple[str, int], tuple[float, float]] = {}
    for period in range(-2, steps):
        for stage in stages:
            for task in stage.tasks:
                n = period + stage.shift.get(task.name, 0)
                if not 0 <= n < steps:
                    continue
                start = free.get(stage.unit.value, 0.0)
                for value in task.inputs:
                    key = (carry.step.name, n - 1) if value.name == carry.name else (value.name, n)
                    start = max(start, ended.get(key, (0.0, 0.0))[1])
                end = start + dice.choice((0.01, 1.0, 30.0))
                ended[task.name, n], free[stage.unit.value] = (start, end), end
    return ended


# ---- capacity


def test_an_oversized_tile_says_which_and_by_how_much() -> None:
    program = linear_attention_program("channel", True)
    with pytest.raises(CapacityError, match=r"dS.*BV") as caught:
        plan(program, "ascend910b", K=256, V=256, BV=256)
    error = caught.value
    assert (error.memory, error.buffer) == ("L0C", "dS")
    assert error.over == error.needed - error.available == 196_608
    naive = plan(naive_program("channel", True), "ascend910b", False, K=256, V=256, BV=256)
    assert any(need.over > 0 for need in naive.needs)  # shown as it is, not refused


def test_the_value_tile_is_halved_until_it_fits() -> None:
    found = plan(linear_attention_program("channel", True), "ascend910b", K=256, V=256)
    assert found.sizes["BV"] < 256
    assert all(need.over <= 0 for need in found.needs)
    assert {need.memory for need in found.needs} == {"UB", "L1", "L0A", "L0B", "L0C"}


def test_what_a_stage_has_on_chip() -> None:
    """At the worst moment, and with every tile in a place of its own; a sum of products is one tile in L0C."""
    found = plan(linear_attention_program("channel", True), "ascend910b", Options(ahead=False))
    needs = {(need.stage, need.memory): need for need in found.needs}
    sums = needs["scan.1.cube", "L0C"]
    assert (sums.bytes, sums.apart) == (98_304, (("U", 32_768), ("O_inter", 32_768), ("dS", 65_536)))
    operands = needs["scan.1.cube", "L1"]
    assert (operands.bytes, operands.apart_bytes, len(operands.apart)) == (65_536, 131_072, 8)
    vec = needs["scan.2.vec", "UB"]
    assert vec.bytes == 65_536 and dict(vec.apart)["S"] == 32_768 and "S_next" not in dict(vec.apart)
    assert all(need.bytes <= need.apart_bytes for need in found.needs if need.apart)
    assert needs["scan.1.cube", "L0B"].tiles == (("v", 128 * 64),)


def test_products_of_the_prologue_in_the_scan() -> None:
    """Cube does the next chunk's while Vec is at the state: no hand-over more, and dearer ones do not show. Sums no
    longer fit L0C each in a place of its own; what is alive at once does."""
    program = linear_attention_program("channel", True)
    found, apart = plan(program, "ascend910b"), plan(program, "ascend910b", Options(ahead=False))
    assert (found.handovers, apart.handovers) == (2, 2)
    assert (whole_handovers(found), whole_handovers(apart)) == (2, 4)
    cube = next(stage for stage in found.section(Section.SCAN) if stage.unit is Unit.CUBE)
    assert {stage.unit for stage in found.section(Section.PROLOGUE)} == {Unit.VEC}
    ahead = [task for task in cube.tasks if cube.shift.get(task.name)]
    assert [t.name for t in ahead] == [t.name for t in cube.tasks][-len(ahead) :]
    assert {t.name for t in ahead} == {"A_qk", "A_qk_io", "A_kk", "M_left", "M_1", "M_1_io", "W_neg", "W_neg_io"}
    slower = [timeline(p, sync=1e-6).period - timeline(p, sync=0.0).period for p in (found, apart)]
    assert slower[0] == 0.0 < slower[1]
    sums = next(need for need in found.needs if (need.stage, need.memory) == (cube.name, "L0C"))
    assert sums.bytes == 98_304 < sums.available < sums.apart_bytes
    for options in (Options(outputs="epilogue"), Options(values="scan", ahead=False)):
        assert plan(program, "ascend910b", options).section(Section.PROLOGUE)[-1].unit is Unit.CUBE
    assert plan(program, "ascend910b", V=256, BV=128).section(Section.PROLOGUE)[-1].unit is Unit.CUBE


def test_an_operand_too_wide_for_the_cube() -> None:
    """L0B takes an operand a fractal deep, two at a time: 1,024 columns."""
    memories = {**ASCEND910B.memories, "L0B": Figure(8191, "bytes", "a smaller core")}
    with pytest.raises(CapacityError, match="L0B"):
        plan(linear_attention_program("channel", True), replace(ASCEND910B, memories=memories), BV=128)


def test_rows_are_streamed_where_whole_tiles_do_not_fit() -> None:
    """A Vec core too small for the state and whole tiles beside it takes dS and leaves S row by row."""
    program = linear_attention_program("channel", True)
    assert not any(b.streamed for b in plan(program, "ascend910b").buffers)
    memories = {**ASCEND910B.memories, "UB": Figure(60_000, "bytes", "a smaller core")}
    found = plan(program, replace(ASCEND910B, memories=memories), C=16, BV=128)
    assert {b.name for b in found.buffers if b.streamed} == {"dS", "S_io"}
    assert all(need.over <= 0 for need in found.needs)


# ---- cost and time


def test_costs_are_those_of_the_equations() -> None:
    found = plan(gdn_state_program(), "ascend910b", B=2, T=4096, H=3)
    sizes = {**found.sizes, "io_bytes": 2, "acc_bytes": 4}
    products = 2 * 3 * 4096 * (2 * 128 * 128 * 2)  # W S and k^T V'
    assert products < evaluate(total_flops(found), sizes) < 1.1 * products
    crossing = 2 * found.crossing_bytes * 2 * 3 * 4096 // 64
    assert evaluate(total_bytes(found), sizes) > crossing


def test_time_follows_the_hand_overs() -> None:
    """A dearer hand-over costs the plan two of them a chunk, the naive pipeline eight.

    Two of its ten changes of unit hide behind work of Cube that does not wait for V'.
    """
    naive = plan(naive_program("channel", True), "ascend910b", False)
    best = plan(linear_attention_program("channel", True), "ascend910b")
    slower = [timeline(p, sync=1e-3).period - timeline(p, sync=0.0).period for p in (naive, best)]
    assert slower[0] == pytest.approx(8e-3, rel=1e-2)
    assert slower[1] == pytest.approx(2e-3, rel=1e-2)
    assert timeline(best, sync=0.0).period < timeline(naive, sync=0.0).period


def test_heads_go_to_core_groups() -> None:
    spread = schedule(plan(linear_attention_program("channel", True), "ascend910b", Options(ahead=False), H=16))
    assert [group.lanes for group in spread.groups if group.lanes] == [(i,) for i in range(16)]
    assert sum(not group.lanes for group in spread.groups) == 4
    steps = spread.steps * 16 * (spread.prologue + spread.epilogue) / 20  # kernels of their own, on every group
    assert spread.low < spread.steps * spread.scan + steps < spread.high
    larger = schedule(plan(linear_attention_program("channel", True), "ascend910b1", H=16))
    assert (len(larger.groups), sum(not group.lanes for group in larger.groups)) == (24, 8)
    many = schedule(plan(linear_attention_program("channel", True), "ascend910b", H=32))
    assert sorted(lane for group in many.groups for lane in group.lanes) == list(range(32))
    assert spread.low <= spread.high
