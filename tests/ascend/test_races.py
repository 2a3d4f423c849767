"""The race detector: silent on what is emitted, on however many cores, and what it must see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from kdacompile.lowering.ascend.launch import Launch
from kdacompile.lowering.linear_attention import ROWS
from tests.ascend.cases import CORES, ascend_case, judge, rounded_inputs, run
from tests.ascend.damage import NOTHING, RACE, damage_is_caught
from tests.ascend.tools import Edit, SimulatedDevice, ToolError, Tools

CASE = ascend_case("token", True, (130, 0, 40), heads=2, value_heads=4)  # two heads of keys, and four of values
INPUTS = rounded_inputs(CASE, torch.bfloat16)


def right(device: SimulatedDevice, cores: int = CORES) -> bool:
    return judge(CASE, INPUTS, run(INPUTS, device, cores=cores)).worst < 6e-3


def races(tools: Tools, kernel: str, *edits: Edit) -> bool:
    return damage_is_caught(tools, kernel, edits, right, RACE)


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


def fails(device: SimulatedDevice) -> bool:
    """Whether a race is seen."""
    try:
        right(device)
    except ToolError as error:
        return RACE in str(error)
    return False


# ---- what is emitted


@pytest.mark.parametrize("row", ROWS)
def test_grouped_heads(tools: Tools, row: tuple[str, bool]) -> None:
    case = ascend_case(*row, (70,), heads=2, value_heads=4)
    inputs = rounded_inputs(case, torch.bfloat16)
    assert judge(case, inputs, run(inputs, SimulatedDevice(tools))).worst < 6e-3


@pytest.mark.parametrize("cores", [1, 5, 20, 24])
def test_more_and_fewer_tasks_than_cores(tools: Tools, cores: int) -> None:
    """Twelve tasks of the scan, of which four have no chunk, and sixteen of the prologue."""
    assert right(SimulatedDevice(tools, seed=cores), cores)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_blocks_and_cores(tools: Tools, seed: int) -> None:
    assert right(SimulatedDevice(tools, seed=seed))


# ---- what must be seen


@pytest.mark.parametrize(("gate", "kernel"), [("channel", "sub_chunks"), ("token", "prologue")])
def test_a_wrong_map_of_grouped_heads(tools: Tools, gate: str, kernel: str) -> None:
    """By its numbers."""
    case = ascend_case(gate, True, (70,), heads=2, value_heads=4)
    inputs = rounded_inputs(case, torch.bfloat16)
    wrong = changed(tools, **{kernel: lambda text: text.replace("head // (HV // H)", "head % H")})
    assert judge(case, inputs, run(inputs, wrong)).worst > 0.1


@pytest.mark.parametrize("kernel", ["prologue", "scan"])
def test_every_core_doing_every_task(tools: Tools, kernel: str) -> None:
    wrong = changed(tools, **{kernel: lambda text: text.replace("range(core, tasks, cores)", "range(0, tasks, 1)")})
    assert fails(wrong)


def test_all_cores_sharing_one_state(tools: Tools) -> None:
    assert fails(changed(tools, scan=lambda text: text.replace("(S_io_ptr, core,", "(S_io_ptr, core * 0,")))


@pytest.mark.parametrize("kernel", ["prologue", "scan"])
def test_all_cores_sharing_one_workspace(tools: Tools, kernel: str) -> None:
    assert races(tools, kernel, (r"(affine_map<\(d0\) -> \(d0 \*) \d+", r"\1 0", -1))


def synchronisation(flag: int) -> str:
    return rf'"hivm\.hir\.sync_block_(?:set|wait)"(\([^)]*\) <{{.*?static_flag_id = {flag} )'


@pytest.mark.parametrize("flag", [0, 1])
def test_a_synchronisation_dropped_on_both_sides(tools: Tools, flag: int) -> None:
    """Of the scan: dS is ready, and S is."""
    assert races(tools, "scan", (synchronisation(flag), rf"{NOTHING}\1", -1))


@pytest.mark.parametrize("flag", [2, 3])
def test_what_says_that_a_buffer_is_free_follows_from_the_rest(tools: Tools, flag: int) -> None:
    """The next S is stored after dS has come, which was made of this S: no race without these flags, and none seen."""
    edits: dict[str, Sequence[Edit]] = {"scan": [(synchronisation(flag), rf"{NOTHING}\1", -1)]}
    assert right(SimulatedDevice(tools, edits=edits))


READY = {"S": "store_ubuf_to_gm_1d_bfloat16_t", "dS": "fixpipe_nz2nd_float_to_float_4d_to_2d"}


@pytest.mark.parametrize("store", READY.values(), ids=READY)
def test_ready_before_the_store(tools: Tools, store: str) -> None:
    late = rf'( *"func\.call"\([^)]*\) <{{callee = @{store}}}.*\n(?:.*\n)?)( *"hivm\.hir\.sync_block_set".*\n)'
    assert races(tools, "scan", (late, r"\2\1", 0))


PIPES = [("V", "MTE3"), ("MTE2", "V"), ("V", "MTE2"), ("M", "FIX"), ("FIX", "MTE2"), ("MTE3", "MTE2")]


@pytest.mark.parametrize(("first", "then"), PIPES)
def test_flags_between_pipes_dropped_on_both_sides(tools: Tools, first: str, then: str) -> None:
    pipes = rf".*?set_pipe = #hivm.pipe<PIPE_{first}>.*?wait_pipe = #hivm.pipe<PIPE_{then}>"
    assert races(tools, "scan", (rf'"hivm\.hir\.(?:set|wait)_flag"(\([^)]*\) <{{{pipes})', rf"{NOTHING}\1", -1))


@pytest.mark.parametrize(("kernel", "pipe"), [("prologue", "V"), ("scan", "V"), ("scan", "MTE2")])
def test_dropped_barriers(tools: Tools, kernel: str, pipe: str) -> None:
    barrier = rf'"hivm\.hir\.pipe_barrier"(\(\) <{{pipe = #hivm.pipe<PIPE_{pipe}>)'
    assert races(tools, kernel, (barrier, rf"{NOTHING}\1", -1))
