"""The stage split: eleven naive stages, two hand-overs, and why fewer is impossible."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from kdacompile.lowering.attention import attention_program, decode_program
from kdacompile.lowering.builder import Builder
from kdacompile.lowering.errors import ArgumentError
from kdacompile.lowering.ir import OpKind, Program, TileType, Value
from kdacompile.lowering.linear_attention import ROWS, linear_attention_program
from kdacompile.lowering.plan import NAIVE, Options, Plan, gdn_state_program, naive_program, plan
from kdacompile.lowering.plan.legalise import legalise
from kdacompile.lowering.plan.split import Graph, arrange, circuit_bound, hand_overs
from kdacompile.lowering.plan.timeline import timeline
from kdacompile.lowering.plan.units import tasks
from kdacompile.lowering.stages import Scope, Section, Task
from kdacompile.lowering.target import ASCEND910_95, ASCEND910B, Unit
from tests.lowering.test_program import check_golden


@pytest.mark.parametrize(("row", "name"), ROWS.items())
def test_golden(row: tuple[str, bool], name: str) -> None:
    check_golden(f"{name}.ascend910b.plan.txt", str(plan(linear_attention_program(*row), "ascend910b")))


def test_goldens_to_compare_with() -> None:
    check_golden("kda_naive.ascend910b.plan.txt", str(plan(naive_program("channel", True), "ascend910b", False)))
    check_golden("gdn_state.ascend910b.plan.txt", str(plan(gdn_state_program(), "ascend910b", BV=64)))
    check_golden("kda.cuda_sm90.plan.txt", str(plan(linear_attention_program("channel", True), "cuda_sm90")))


def test_the_naive_pipeline_stage_for_stage() -> None:
    """The eleven stages and ten changes of unit of a chunk written as it stands on the page."""
    found = plan(naive_program("channel", True), "ascend910b", False)
    assert [stage.unit for stage in found.stages] == [Unit.VEC, Unit.CUBE] * 5 + [Unit.VEC]
    assert found.handovers == 10
    made = [{task.name for task in stage.tasks} for stage in found.stages]
    for stage, expected in zip(
        made,
        [
            {"G", "exp_G", "K_gated", "K_inverse", "Q_gated"},
            {"A_kk_raw"},
            {"A_kk_beta", "A_kk", "A_inverse", "M"},
            {"W", "U", "WS"},
            {"V_new"},
            {"O_inter", "A_qk_raw"},
            {"A_qk"},
            {"O_intra"},
            {"O", "K_decayed"},
            {"dS"},
            {"S_next"},
        ],
        strict=True,
    ):
        assert expected <= stage


@pytest.mark.parametrize("row", [row for row in ROWS if row[1]])
def test_two_hand_overs_with_the_delta_term(row: tuple[str, bool]) -> None:
    """V' and O accumulate on Cube, only S goes down and dS comes up; from the naive text as well."""
    for program in (linear_attention_program(*row), naive_program(*row)):
        found = plan(program, "ascend910b")
        assert found.handovers == found.lower_bound == 2
        assert {b.name for b in found.workspaces} == {"S_io", "dS"}
        assert [stage.unit for stage in found.section(Section.SCAN)] == [Unit.CUBE, Unit.VEC]


@pytest.mark.parametrize("row", [row for row in ROWS if not row[1]])
def test_no_hand_over_without_the_delta_term(row: tuple[str, bool]) -> None:
    """Nothing but the decay touches the state: the products leave the scan on both sides."""
    found = plan(linear_attention_program(*row), "ascend910b")
    assert found.handovers == found.lower_bound == 0 == found.meeting_bytes
    together = plan(linear_attention_program(*row), "ascend910b", Options(outputs="scan"))
    assert together.handovers == together.lower_bound == 2


def test_the_public_state_kernel_has_four() -> None:
    for options in (NAIVE, Options()):
        found = plan(gdn_state_program(), "ascend910b", options)
        assert found.handovers == found.lower_bound == 4


def test_the_token_step_is_all_vec() -> None:
    """A row by a matrix is no work for Cube, and the state keeps fp32 throughout."""
    found = plan(linear_attention_program("channel", True, form="token"), "ascend910b")
    assert found.handovers == 0
    assert {stage.unit for stage in found.stages} == {Unit.VEC}


@pytest.mark.parametrize(("gate", "delta"), ROWS)
def test_every_task_has_what_it_reads(gate: str, delta: bool) -> None:
    """Stages in order, and a step's work for the next step after what it reads: no task comes too early."""
    for program in (linear_attention_program(gate, delta), naive_program(gate, delta)):
        found = plan(program, "ascend910b")
        known = {op.result for op in found.program.ops if op.kind in (OpKind.LOAD, OpKind.CARRY)}
        for stage in found.stages:
            for task in stage.tasks:
                ahead = stage.shift.get(task.name, 0)
                unknown = [v for v in task.inputs if v not in known and not ahead]
                late = [v.name for v in unknown if v.name not in _made_ahead(found)]
                assert late == []
                known.add(task.output)


def _made_ahead(found: Plan) -> set[str]:
    return {name for stage in found.stages for name in stage.shift}


def test_attention_overlaps_its_blocks() -> None:
    """Softmax over a latent: four changes of unit as written, two where the next block's scores come right behind this
    one's product with the values.

    With every tile apart it has the 90,112 bytes that the real compiler reports for 32 heads by 128 tokens. Scores that
    come before that product take a second copy, and pay for it: Cube no longer waits for the softmax.
    """
    program = attention_program(bias=False)

    def planned(options: Options) -> Plan:
        return plan(program, "ascend910b", options, M=32, C=128, K=512, D=64, V=512)

    assert (planned(NAIVE).handovers, planned(NAIVE).workspace_bytes) == (4, 90_112)
    together = planned(Options(pipeline=False))
    assert (together.handovers, together.workspace_bytes) == (4, 81_920)
    found, ahead = planned(Options()), planned(Options(lookahead=True))
    assert (found.workspace_bytes, found.floor_bytes, found.apart_bytes) == (81_920, 81_920, 90_112)
    assert ahead.workspace_bytes == ahead.floor_bytes == 106_496
    assert (found.buffer("S_shared").copies, ahead.buffer("S_shared").copies) == (1, 2)
    assert timeline(ahead).period < timeline(found).period < timeline(together).period
    for made in (found, ahead):
        assert made.handovers == made.lower_bound == 2
        cube, vec = made.stages
        assert {"S", "S_shared"} == set(cube.shift) and "A_next" not in vec.shift
    check_golden("attention.ascend910b.plan.txt", str(found))


def test_decoding_carries_its_sums_itself() -> None:
    """A step that takes the carry in at once: the same hand-overs and bytes, and a pass over the accumulator less."""
    merged = plan(attention_program(bias=False), "ascend910b", M=32, C=128, K=512, D=64, V=512)
    found = plan(decode_program(), "ascend910b", M=32, C=128, K=512, D=64)
    assert (found.handovers, found.lower_bound, found.workspace_bytes) == (2, 2, 81_920)
    assert {after.name for _, after in found.carried} == {"m", "l", "A"}
    naive = plan(decode_program(), "ascend910b", False, M=32, C=128, K=512, D=64)
    assert (naive.handovers, naive.workspace_bytes) == (4, 90_112)

    def whole_tiles(p: Plan) -> int:
        return sum(t.output.type.shape == ("M", p.program.port("acc").type.cols) for t in p.stages[1].tasks)

    assert (whole_tiles(merged), whole_tiles(found)) == (3, 2)
    assert plan(decode_program(rope=False), "ascend910b", M=32, C=128, K=512).handovers == 2
    check_golden("latent_attention.ascend910b.plan.txt", str(found))


# ---- the bound, against searches that know nothing of it


@pytest.mark.parametrize("row", ROWS)
def test_no_order_has_fewer_hand_overs(row: tuple[str, bool]) -> None:
    """All orders of a step's scan tasks, rotated as one likes: the plan's number is the least of them."""
    for program in (linear_attention_program(*row), naive_program(*row), gdn_state_program()):
        found = plan(program, "ascend910b")
        graph = Graph(found.program, tasks(found.program, ASCEND910B))
        scan = [task for stage in found.section(Section.SCAN) for task in stage.tasks]
        assert exhaustive(graph, [task for task in graph.tasks if task in scan]) == found.handovers


def exhaustive(graph: Graph, scan: Sequence[Task]) -> int:
    """The fewest changes of unit around the ring over every order of the tasks that their dependences allow."""
    index = {task: i for i, task in enumerate(scan)}
    before = [{index[t] for t in graph.before(task) if t in index} for task in scan]

    @cache
    def least(done: frozenset[int], first: Unit, last: Unit) -> int:
        if len(done) == len(scan):
            return int(first is not last)
        ready = [i for i in range(len(scan)) if i not in done and before[i] <= done]
        return min((scan[i].unit is not last) + least(done | {i}, first, scan[i].unit) for i in ready)

    starts = [i for i in range(len(scan)) if not before[i]]
    return min(least(frozenset({i}), scan[i].unit, scan[i].unit) for i in starts) if scan else 0


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_on_random_scans(seed: int) -> None:
    """An unrolled scan, changing unit only when nothing more can be done, needs ``circuit_bound`` changes a step.

    Always doing all that can be done is the least for an acyclic graph, so its growth with the number of steps is the
    least any schedule can have, however it mixes steps. (Where no circuit crosses units the bound is 2: a step's work
    on both units; unrolled, all of one unit's work could come first.)
    """
    program = random_program(random.Random(seed))
    graph = Graph(legal := legalise(program, ASCEND910B), tasks(legal, ASCEND910B))
    bound = circuit_bound(graph, graph.tasks)
    runs = arrange(graph, graph.tasks, pipeline=True)
    assert hand_overs(runs) == bound
    assert sorted(t.name for run in runs for t in run.tasks) == sorted(t.name for t in graph.tasks)
    few, many = unrolled_changes(graph, 6), unrolled_changes(graph, 12)
    assert (many - few) / 6 == (bound if bound > 2 or many > few else 0)


def unrolled_changes(graph: Graph, steps: int) -> int:
    waiting = [(task, n) for n in range(steps) for task in graph.tasks]
    totals = []
    for start in (Unit.CUBE, Unit.VEC):
        left, done, unit, changes = list(waiting), set[tuple[Task, int]](), start, -1
        while left:
            progress = True
            while progress:
                ready = [node for node in left if node[0].unit is unit and _ready(graph, node, done)]
                progress = bool(ready)
                done.update(ready)
                left = [node for node in left if node not in done]
            unit = Unit.VEC if unit is Unit.CUBE else Unit.CUBE
            changes += 1
        totals.append(changes)
    return min(totals)


def _ready(graph: Graph, node: tuple[Task, int], done: set[tuple[Task, int]]) -> bool:
    task, n = node
    waits = [(earlier, n - distance) for earlier, later, distance in graph.edges() if later == task]
    return all(step < 0 or (earlier, step) in done for earlier, step in waits)


def random_program(dice: random.Random) -> Program:
    """Square tiles, elementwise ops and products of what came before; the last one steps the carry."""
    b = Builder("random")
    tile = TileType("K", "K")
    values: list[Value] = [b.carry("S", tile, "first", "last"), b.input("x", tile)]
    for i in range(dice.randint(3, 8)):
        x, y = dice.choice(values), dice.choice(values)
        values.append(b.dot(x, y, name=f"p{i}") if dice.random() < 0.45 else b.mul(x, y, f"e{i}"))
    step = values[-1]
    b.step(b.add(step, values[0], "next"))
    b.store("out", dice.choice(values[2:]))
    return b.build()


def test_tasks_of_several_steps_share_a_stage_where_that_saves_a_hand_over() -> None:
    """A product before and one after Vec's work, neither in the carry's ring: two hand-overs instead of four."""
    b = Builder("pipelined")
    tile = TileType("K", "K")
    state, x = b.carry("S", tile, "first", "last"), b.input("x", tile)
    scores = b.dot(x, x, name="scores")
    weights = b.mul(scores, state, "weights")
    b.step(b.add(state, scores, "next"))
    b.store("out", b.dot(weights, x, name="late"))
    program = b.build()
    kept = Options(hoist=True, outputs="scan")
    graph = Graph(legal := legalise(program, ASCEND910B), tasks(legal, ASCEND910B))
    assert hand_overs(arrange(graph, graph.tasks, pipeline=False)) == 3 + 1
    runs = arrange(graph, graph.tasks, pipeline=True)
    assert hand_overs(runs) == 2
    assert max(run.shift.get("scores", 0) for run in runs) > max(run.shift.get("late", 0) for run in runs)
    assert plan(program, "ascend910b", kept, K=64).handovers == 2


# ---- targets and arguments


def test_on_a_gpu_hand_overs_are_registers() -> None:
    found = plan(linear_attention_program("channel", True), "cuda")
    assert found.handovers == 0 and found.workspace_bytes == 0
    assert [stage.name for stage in found.stages] == ["prologue", "scan"]
    assert all(b.dtype.value == "io" for b in found.tensors if 1 not in b.shape)


def test_on_the_next_generation_units_meet_on_chip() -> None:
    """Its compiler has Vec add and round what Cube could: V' goes up and down once more."""
    found = plan(linear_attention_program("channel", True), "ascend910_95")
    assert found.handovers == found.lower_bound == 4
    assert found.workspace_bytes == 0 < found.meeting_bytes
    cube = [task for stage in found.stages if stage.unit is Unit.CUBE for task in stage.tasks]
    assert all(task.op.kind is not OpKind.CAST and len(task.inputs) == 2 for task in cube)
    able = replace(ASCEND910_95, accumulates=True, narrows=True)
    assert plan(linear_attention_program("channel", True), able).handovers == 2


def test_the_master_state_stays_wide_and_at_home() -> None:
    for row in ROWS:
        found = plan(linear_attention_program(*row), "ascend910b", Options(narrow_update=True))
        state = found.buffer("S")
        assert (state.scope, state.dtype.value) == (Scope.CARRY, "acc")


def test_arguments_are_checked() -> None:
    program = linear_attention_program("channel", True)
    with pytest.raises(ArgumentError, match="no such target"):
        plan(program, "abacus")
    with pytest.raises(ArgumentError, match="not a size"):
        plan(program, "cpu", Q=3)
    with pytest.raises(ArgumentError, match="BV divides V"):
        plan(program, "cpu", V=64, BV=48)
    with pytest.raises(ArgumentError, match="io must be"):
        plan(program, "cpu", io="int8")
    with pytest.raises(ArgumentError, match="no buffer"):
        plan(program, "cpu").buffer("nonesuch")
