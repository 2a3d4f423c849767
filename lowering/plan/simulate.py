"""A plan's numbers: its program on the torch executor, with every buffer rounded to the dtype it is planned in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..executor import Executable
from ..layout import dense_layout, packed_layout
from ..verify import Implementation
from .model import PlanData

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def simulate(plan: PlanData) -> Implementation:
    """An implementation for ``verify``: called as ``run_linear_attention``, it computes what the plan would.

    Inputs are rounded to the plan's dtype first, accumulation is fp32, and the plan's chunk is used.
    """
    dtype = DTYPES[plan.io]
    run = Executable(plan.program, dict.fromkeys(plan.rounding, dtype))
    chunk = plan.sizes["C"]

    def implementation(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        initial_state: Tensor | None,
        *,
        scale: float,
        gate: str,
        cu_seqlens: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        if (q.shape[-1], v.shape[-1]) != (plan.sizes["K"], plan.sizes["V"]):
            raise ArgumentError(f"planned for K={plan.sizes['K']}, V={plan.sizes['V']}, got {q.shape}, {v.shape}")
        heads = v.shape[2]
        if cu_seqlens is None:
            layout = dense_layout(q.shape[0], q.shape[1], heads, chunk)
        else:
            layout = packed_layout(cu_seqlens, q.shape[1], heads, chunk)
        if g is not None and gate == "head":
            g = g.expand(q.shape[0], q.shape[1], -1)
        narrow = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        tensors = {name: None if x is None else x.to(dtype).float() for name, x in narrow.items()}
        state = None if initial_state is None else initial_state.float()
        dims = {"C": chunk, "K": q.shape[-1], "V": v.shape[-1]}
        out = run({**tensors, "initial_state": state}, layout, dims=dims, dtype=torch.float32, scalars={"scale": scale})
        return out["o"], out["final_state"]

    return implementation
