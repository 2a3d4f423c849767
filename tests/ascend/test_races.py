"""The race detector: silent on what is emitted, on however many cores, and what it must see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from kdacompile.lowering.ascend.launch import Launch
from kdacompile.lowering.linear_attention import ROWS
from tests.ascend.cases import CORES, ascend_case, judge, rounded_inputs, run
from tests.ascend.damage import NOTHING, RACE, damage_is_caught
from tests.ascend.tools import Edit, SimulatedDevice, ToolError, Tools

# Two heads of keys, and four of values, and cores: fewer than the twelve tasks of the scan, in which Cube does the
# prologue's products then, or more, when they are a kernel of their own.
CASES = {
    "token": ascend_case("token", True, (130, 0, 40), heads=2, value_heads=4),
    "channel": ascend_case("channel", True, (70, 0, 3), heads=2, value_heads=4),
}
KERNELS = {"token": ("prologue", "scan"), "channel": ("sub_chunks", "scan")}
CORES_OF = {"token": 13, "channel": CORES}
BOTH = [(gate, kernel) for gate in CASES for kernel in KERNELS[gate]]
both_scans = pytest.mark.parametrize("gate", CASES)


def right(device: SimulatedDevice, gate: str, cores: int = 0) -> bool:
    """Whether the results are right; ``cores``: not those that a gate is said to have."""
    case = CASES[gate]
    inputs = rounded_inputs(case, torch.bfloat16)
    verdict = judge(case, inputs, run(inputs, device, cores=cores or CORES_OF[gate]))
    assert cores or tuple(device.compiled) == KERNELS[gate]
    return verdict.worst < 6e-3


def races(tools: Tools, gate: str, kernel: str, *edits: Edit) -> bool:
    return damage_is_caught(tools, kernel, edits, lambda device: right(device, gate), RACE)


@dataclass
class Changed(SimulatedDevice):
    """A device that runs changed text: ``change`` by kernel name."""

    change: dict[str, Callable[[str], str]] = field(default_factory=dict[str, Callable[[str], str]])

    def __call__(self, launch: Launch) -> None:
        if change := self.change.get(launch.kernel.name):
            text = change(launch.kernel.text)
            assert text != launch.kernel.text
            launch = replace(launch, kernel=replace(launch.kernel, text=text))
        super().__call__(launch)


def changed(tools: Tools, **change: Callable[[str], str]) -> Changed:
    return Changed(tools, change=change)


def fails(device: SimulatedDevice, gate: str) -> bool:
    """Whether a race is seen."""
    try:
        right(device, gate)
    except ToolError as error:
        return RACE in str(error)
    return False


# ---- what is emitted


@pytest.mark.parametrize("row", ROWS)
def test_grouped_heads(tools: Tools, row: tuple[str, bool]) -> None:
    case = ascend_case(*row, (70,), heads=2, value_heads=4)
    inputs = rounded_inputs(case, torch.bfloat16)
    assert judge(case, inputs, run(inputs, SimulatedDevice(tools))).worst < 6e-3


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != "head"])
def test_values_wider_than_a_tile(tools: Tools, row: tuple[str, bool]) -> None:
    """Tasks that share a chunk do not all write what they have in common."""
    case = ascend_case(*row, (70,), value_width=256, value_heads=1)
    inputs = rounded_inputs(case, torch.bfloat16)
    assert judge(case, inputs, run(inputs, SimulatedDevice(tools))).worst < 6e-3


@both_scans
@pytest.mark.parametrize("cores", [1, 5, 20, 24])
def test_more_and_fewer_tasks_than_cores(tools: Tools, gate: str, cores: int) -> None:
    """Twelve tasks of the scan, of which four have no chunk, and more of what comes before it."""
    assert right(SimulatedDevice(tools, seed=cores), gate, cores)


@pytest.mark.parametrize("cores", [20, 24])
def test_products_within_the_scan_on_all_cores(tools: Tools, cores: int) -> None:
    case = ascend_case("channel", True, (70, 20), value_heads=13, key_width=32, value_width=32)
    inputs, device = rounded_inputs(case, torch.bfloat16), SimulatedDevice(tools, seed=cores)
    assert judge(case, inputs, run(inputs, device, cores=cores)).worst < 6e-3
    assert tuple(device.compiled) == KERNELS["channel"]


@both_scans
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_blocks_and_cores(tools: Tools, gate: str, seed: int) -> None:
    assert right(SimulatedDevice(tools, seed=seed), gate)


# ---- what must be seen


@pytest.mark.parametrize(
    ("gate", "kernel", "own", "other"),
    [
        ("channel", "sub_chunks", "head // (HV // H)", "head % H"),
        ("token", "prologue", "head // (HV // H)", "head % H"),
        ("channel", "scan", "(v_ptr, token, head, ", "(v_ptr, token, head // 2 * 2, "),
    ],
    ids=["channel-keys", "token-keys", "channel-values"],
)
def test_a_wrong_map_of_grouped_heads(tools: Tools, gate: str, kernel: str, own: str, other: str) -> None:
    """By its numbers."""
    case = ascend_case(gate, True, (70,), heads=2, value_heads=4)
    inputs = rounded_inputs(case, torch.bfloat16)
    wrong = changed(tools, **{kernel: lambda text: text.replace(own, other)})
    cores = 3 if gate == "channel" else 5  # for four tasks of the scan
    assert judge(case, inputs, run(inputs, wrong, cores=cores)).worst > 0.1


@pytest.mark.parametrize(("gate", "kernel"), BOTH)
def test_every_core_doing_every_task(tools: Tools, gate: str, kernel: str) -> None:
    wrong = changed(tools, **{kernel: lambda text: text.replace("range(core, tasks, cores)", "range(0, tasks, 1)")})
    assert fails(wrong, gate)


@both_scans
@pytest.mark.parametrize("shared", ["S_io", "dS"])
def test_all_cores_sharing_one_state(tools: Tools, gate: str, shared: str) -> None:
    """Or one place for its change."""
    own = f"({shared}_ptr, core,"
    assert fails(changed(tools, scan=lambda text: text.replace(own, f"({shared}_ptr, core * 0,")), gate)


@pytest.mark.parametrize(("gate", "kernel"), [("token", "prologue"), ("token", "scan"), ("channel", "scan")])
def test_all_cores_sharing_one_workspace(tools: Tools, gate: str, kernel: str) -> None:
    assert races(tools, gate, kernel, (r"(affine_map<\(d0\) -> \(d0 \*) \d+", r"\1 0", -1))


def synchronisation(flag: int) -> str:
    return rf'"hivm\.hir\.sync_block_(?:set|wait)"(\([^)]*\) <{{.*?static_flag_id = {flag} )'


def flags(first: str, then: str) -> str:
    """Set or waited for, between two pipes."""
    pipes = rf".*?set_pipe = #hivm.pipe<PIPE_{first}>.*?wait_pipe = #hivm.pipe<PIPE_{then}>"
    return rf'"hivm\.hir\.(?:set|wait)_flag"(\([^)]*\) <{{{pipes})'


@both_scans
@pytest.mark.parametrize("flag", [0, 1])
def test_a_synchronisation_dropped_on_both_sides(tools: Tools, gate: str, flag: int) -> None:
    """Of the scan: dS is ready, and S is."""
    assert races(tools, gate, "scan", (synchronisation(flag), rf"{NOTHING}\1", -1))


@both_scans
@pytest.mark.parametrize("flag", [2, 3])
def test_what_says_that_a_buffer_is_free_follows_from_the_rest(tools: Tools, gate: str, flag: int) -> None:
    """The next S is stored after dS has come, which was made of this S: no race without these flags, and none seen.
    Nor without those that keep Cube from storing a joined block before it has loaded what lies there: it was made of
    what was loaded."""
    edits: list[Edit] = [(synchronisation(flag), rf"{NOTHING}\1", -1)]
    if gate == "channel":
        edits.append((flags("MTE2", "FIX"), rf"{NOTHING}\1", -1))
    assert right(SimulatedDevice(tools, edits={"scan": edits}), gate)


READY = {"S": "store_ubuf_to_gm_1d_bfloat16_t", "dS": "fixpipe_nz2nd_float_to_float_4d_to_2d"}


@both_scans
@pytest.mark.parametrize("store", READY.values(), ids=READY)
def test_ready_before_the_store(tools: Tools, gate: str, store: str) -> None:
    late = rf'( *"func\.call"\([^)]*\) <{{callee = @{store}}}.*\n(?:.*\n)?)( *"hivm\.hir\.sync_block_set".*\n)'
    assert races(tools, gate, "scan", (late, r"\2\1", 0))


PIPES = [("V", "MTE3"), ("MTE2", "V"), ("V", "MTE2"), ("M", "FIX"), ("FIX", "MTE2")]
BETWEEN_TASKS = ("MTE3", "MTE2")  # of one core


@pytest.mark.parametrize(
    ("gate", "first", "then"),
    [*(("token", *p) for p in PIPES), *(("channel", *p) for p in (*PIPES, ("FIX", "M"), BETWEEN_TASKS))],
)
def test_flags_between_pipes_dropped_on_both_sides(tools: Tools, gate: str, first: str, then: str) -> None:
    assert races(tools, gate, "scan", (flags(first, then), rf"{NOTHING}\1", -1))


@pytest.mark.parametrize(
    ("gate", "kernel", "pipe"),
    [
        ("token", "prologue", "V"),
        ("token", "scan", "V"),
        ("token", "scan", "MTE2"),
        ("channel", "scan", "V"),
        ("channel", "scan", "MTE2"),
        ("channel", "scan", "ALL"),
    ],
)
def test_dropped_barriers(tools: Tools, gate: str, kernel: str, pipe: str) -> None:
    barrier = rf'"hivm\.hir\.pipe_barrier"(\(\) <{{pipe = #hivm.pipe<PIPE_{pipe}>)'
    assert races(tools, gate, kernel, (barrier, rf"{NOTHING}\1", -1))
