"""The tests of the tests: a damaged kernel must be caught, by a wrong number, a deadlock or an unbalanced flag.

What must be caught as a race is in test_races.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.ascend.emit import chunk_module
from kdacompile.lowering.ascend.launch import Launch
from tests.ascend.cases import CORES, Verdict, ascend_case, judge, rounded_inputs, run
from tests.ascend.damage import LOUD, NOTHING, WAIT, damage_is_caught
from tests.ascend.test_compiler import constants
from tests.ascend.tools import Edit, SimulatedDevice, ToolError, Tools
from tests.lowering.verify import Case

CASE = ascend_case("token", True, (200,), value_heads=1)  # fewer tasks of the scan than cores
AHEAD = ascend_case("channel", True, (70,), value_heads=CORES)  # as many: Cube does the prologue's products in it
INPUTS = {case: rounded_inputs(case, torch.bfloat16) for case in (CASE, AHEAD)}
both = pytest.mark.parametrize("case", [CASE, AHEAD], ids=["apart", "ahead"])


def verdict(device: SimulatedDevice, case: Case = CASE) -> Verdict:
    return judge(case, INPUTS[case], run(INPUTS[case], device))


def is_caught(tools: Tools, case: Case, edits: Sequence[Edit], errors: str = LOUD) -> bool:
    """Whether the damaged scan fails or is wrong."""
    return damage_is_caught(tools, "scan", edits, lambda device: verdict(device, case).worst < 6e-3, errors)


@both
def test_undamaged(tools: Tools, case: Case) -> None:
    assert not is_caught(tools, case, [])


@both
def test_a_dropped_wait(tools: Tools, case: Case) -> None:
    """Each of the waits between the cores in turn."""
    kernel = chunk_module(case.gate, True, ahead=case is AHEAD).kernel("scan")
    facts = tools.compile(kernel, constants(True)).facts
    waits = facts["cube"]["block_waits"] + facts["vec"]["block_waits"]
    assert waits == 6
    assert all(is_caught(tools, case, [(WAIT, NOTHING, i)]) for i in range(waits))


def test_a_swapped_buffer(tools: Tools) -> None:
    """Two products of the scan take each other's operand, of the same shape."""

    class Swapped(SimulatedDevice):
        def __call__(self, launch: Launch) -> None:
            if launch.kernel.name == "scan":
                first, second = "M_1_io_ptr", "A_qk_io_ptr"
                values = dict(launch.arguments)
                values[first], values[second] = values[second], values[first]
                launch = replace(launch, arguments=values)
            super().__call__(launch)

    assert verdict(SimulatedDevice(tools)).worst < 6e-3 < verdict(Swapped(tools)).worst


def test_a_master_state_in_16_bits(tools: Tools) -> None:
    """The state rounded after every chunk, in the emitted text. Where nothing is forgotten the roundings add up (the
    delta rule overwrites them), and the bound that test_numbers sets on long sequences catches them."""

    class Narrow(SimulatedDevice):
        def __call__(self, launch: Launch) -> None:
            if launch.kernel.name == "scan":
                text = launch.kernel.text.replace("S = S_next", "S = S_next.to(tl.bfloat16).to(tl.float32)")
                assert text != launch.kernel.text
                launch = replace(launch, kernel=replace(launch.kernel, text=text))
            super().__call__(launch)

    case = ascend_case("token", False, (2048,), value_heads=1, key_width=64, value_width=64)
    inputs = rounded_inputs(case, torch.bfloat16)
    assert inputs.g is not None
    inputs = replace(inputs, g=0.01 * inputs.g)
    right, wrong = (judge(case, inputs, run(inputs, device(tools))) for device in (SimulatedDevice, Narrow))
    assert right.state < 6e-3 and wrong.state > 1.2 * right.state and wrong.output > 1.2 * right.output


def test_the_compiler_s_workspace_reuse_is_not_safe(tools: Tools) -> None:
    """Why no kernel asks for it: told to share workspace addresses, the compiler lets a Vec core write the next state
    where the other has not yet read this one's change (ascendnpu-ir 1.2.0). Without buffers of its own, the scan then
    depends on luck."""
    option = "--enable-hivm-global-workspace-reuse=true"

    class Sharing(SimulatedDevice):
        def __call__(self, launch: Launch) -> None:
            if launch.kernel.name != "scan":
                return super().__call__(launch)
            own = ("store(tile_at(S_io_ptr", "store(tile_at(dS_ptr", "dS = tl.load(tile_at(dS_ptr")
            lines = [line for line in launch.kernel.text.splitlines() if not any(part in line for part in own)]
            text = "\n".join(lines).replace("tl.load(tile_at(S_io_ptr, core, 0, K, BV, BV))", "S_io")
            kernel = replace(launch.kernel, text=text)
            compiled = self.tools.compile(kernel, dict(launch.constants), options=[option])
            assert compiled.facts["workspace_bytes"] == 65536
            return self.tools.run(compiled, launch, order=self.order)

    with pytest.raises(ToolError, match=r"RaceError: .* AIV\d.MTE3, .*: writes what AIV\d.MTE2 reads in the workspace"):
        verdict(Sharing(tools))


def test_two_places_lose_a_load_that_both_units_want(tools: Tools) -> None:
    """Why ``slots`` of lowering/plan/hazards.py gives one place where Vec and Cube load the same keys: told to use two,
    the compiler leaves out Cube's load (ascendnpu-ir 1.2.0), and Cube multiplies what lies in L1 from before."""

    class Two(SimulatedDevice):
        def __call__(self, launch: Launch) -> None:
            if launch.kernel.name == "prologue":
                assert launch.kernel.slots == 1
                launch = replace(launch, kernel=replace(launch.kernel, slots=2))
            super().__call__(launch)

    case = ascend_case("token", False, (70,), value_heads=1)
    inputs = rounded_inputs(case, torch.bfloat16)
    right, wrong = (judge(case, inputs, run(inputs, device(tools))) for device in (SimulatedDevice, Two))
    assert right.worst < 6e-3 and not wrong.output < 6e-3
