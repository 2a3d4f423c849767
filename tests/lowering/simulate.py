"""A plan's numbers: its program on the torch executor, with every buffer rounded to the dtype it is planned in."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.errors import ArgumentError
from kdacompile.lowering.executor import Executable
from kdacompile.lowering.plan.model import PlanData
from kdacompile.lowering.run import execute, layout_of
from kdacompile.lowering.scratch import Scratch
from tests.lowering.verify import Implementation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def simulate(plan: PlanData) -> Implementation:
    """An implementation for ``verify``: it computes what the plan would.

    Inputs are rounded to the plan's dtype first, accumulation is fp32, and the plan's chunk is used.
    """
    dtype = DTYPES[plan.io]
    run = Executable(plan.program, dict.fromkeys(plan.rounding, dtype))

    def implementation(call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        if (call.q.shape[-1], call.v.shape[-1]) != (plan.sizes["K"], plan.sizes["V"]):
            raise ArgumentError(
                f"planned for K={plan.sizes['K']}, V={plan.sizes['V']}, got {call.q.shape}, {call.v.shape}"
            )
        narrow = {"q": call.q, "k": call.k, "v": call.v, "g": call.g, "beta": call.beta}
        rounded = {name: None if x is None else x.to(dtype).float() for name, x in narrow.items()}
        state = None if call.initial_state is None else call.initial_state.float()
        return execute(run, replace(call, **rounded, initial_state=state), layout_of(call, plan.sizes["C"]))

    return implementation
