"""The tests of the tests: a damaged kernel must be caught, by a wrong number, a deadlock or an unbalanced flag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.ascend.emit import chunk_module
from kdacompile.lowering.ascend.launch import Launch
from tests.ascend.cases import Verdict, ascend_case, judge, rounded_inputs, run
from tests.ascend.damage import LOUD, NOTHING, ORDERS, WAIT, damage_is_caught
from tests.ascend.test_compiler import constants
from tests.ascend.tools import Edit, SimulatedDevice, Tools

CASE = ascend_case("token", True, (200,), value_heads=1)
INPUTS = rounded_inputs(CASE, torch.bfloat16)


def verdict(device: SimulatedDevice) -> Verdict:
    return judge(CASE, INPUTS, run(CASE, INPUTS, device))


def is_caught(tools: Tools, edits: Sequence[Edit], errors: str = LOUD) -> bool:
    """Whether the damaged scan fails or is wrong."""
    return damage_is_caught(tools, "scan", edits, lambda device: verdict(device).worst < 6e-3, errors)


def test_undamaged(tools: Tools) -> None:
    assert not is_caught(tools, [])


def test_a_dropped_wait(tools: Tools) -> None:
    """Each of the waits between the cores in turn."""
    compiled = tools.compile(chunk_module("token", True).kernel("scan"), constants(True))
    waits = compiled.facts["cube"]["block_waits"] + compiled.facts["vec"]["block_waits"]
    assert waits == 6
    assert all(is_caught(tools, [(WAIT, NOTHING, i)]) for i in range(waits))


@pytest.mark.parametrize("flag", [0, 1])
def test_a_synchronisation_dropped_on_both_sides(tools: Tools, flag: int) -> None:
    """No flag is left over then: the numbers have to show it. These two say that S and that dS are ready."""
    pattern = rf'"hivm\.hir\.sync_block_(?:set|wait)"(\([^)]*\) <{{.*?static_flag_id = {flag} )'
    assert is_caught(tools, [(pattern, rf"{NOTHING}\1", -1)], errors="no error")


def test_a_dropped_flag_between_pipes(tools: Tools) -> None:
    assert is_caught(tools, [(r'"hivm\.hir\.wait_flag"', NOTHING, 0)], errors="FlagError")


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
    right, wrong = (judge(case, inputs, run(case, inputs, device(tools))) for device in (SimulatedDevice, Narrow))
    assert right.state < 6e-3 and wrong.state > 1.2 * right.state and wrong.output > 1.2 * right.output


def test_the_compiler_s_workspace_reuse_is_not_safe(tools: Tools) -> None:
    """Why no kernel asks for it: told to share workspace addresses, the compiler lets Vec write the next state where
    Cube has not yet read this one (ascendnpu-ir 1.2.0). Without buffers of its own, the scan then depends on luck."""
    option = "--enable-hivm-global-workspace-reuse=true"

    class Sharing(SimulatedDevice):
        def __call__(self, launch: Launch) -> None:
            if launch.kernel.name != "scan":
                return super().__call__(launch)
            lines = [line for line in launch.kernel.text.splitlines() if "store(tile_at(S_io_ptr" not in line]
            text = "\n".join(lines).replace("tl.load(tile_at(S_io_ptr, core, 0, K, BV, BV))", "S_io")
            kernel = replace(launch.kernel, text=text)
            compiled = self.tools.compile(kernel, dict(launch.constants), options=[option])
            assert compiled.facts["workspace_bytes"] == 65536
            return self.tools.run(compiled, launch, order=self.order)

    worst = [verdict(Sharing(tools, order)).worst for order in ORDERS]
    assert min(worst) < 6e-3 and not max(worst) < 6e-3
