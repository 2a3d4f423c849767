"""Damaging compiled kernels, to see that the tests notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kdacompile.errors import InternalError
from tests.ascend.tools import Edit, SimulatedDevice, ToolError, Tools

ORDERS = (("AIC", "AIV0", "AIV1"), ("AIV1", "AIV0", "AIC"))
RACE = "RaceError"
LOUD = f"DeadlockError|FlagError|BoundsError|{RACE}"
WAIT = r'"hivm\.hir\.sync_block_wait"'
NOTHING = '"hivm.hir.set_mask_norm"'  # an operation that does nothing


def damage_is_caught(
    tools: Tools, kernel: str, edits: Sequence[Edit], is_right: Callable[[SimulatedDevice], bool], errors: str = LOUD
) -> bool:
    """Whether a kernel with these edits fails, with one of these ``errors``, or is wrong, with the cores let run in one
    of the orders."""
    for order in ORDERS:
        try:
            right = is_right(SimulatedDevice(tools, order, edits={kernel: edits}))
        except (ToolError, InternalError) as error:
            assert isinstance(error, ToolError) or isinstance(error.__cause__, ToolError), error
            assert any(name in str(error) for name in errors.split("|")), error
            return True
        if not right:
            return True
    return False
