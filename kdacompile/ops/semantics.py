"""What the semantic ops compute before the recurrence, as a composition of differentiable torch functions.

The op takes tensors as a model has them. This file brings them into the form the lowering runs, in this order:
one compute dtype (float64 if q, k or v is float64, else float32), gate activation, sigmoid of beta. l2norm of q and k
and the recurrence itself are :mod:`kdacompile.lowering`'s. Nothing here is in place, and nothing reads a value on the
host, so ``torch.func.vjp`` differentiates it (the backward ops do) and CUDA graphs capture it.

The gate functions are those of the table in :mod:`kdacompile.lowering.gates`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.gates import FORMS, log_decay


def log_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *, gate: str, gate_fn: str, gate_scale: float
) -> Tensor:
    """The log decay that g stands for; a factor passes through, its logarithm is the lowering's business."""
    if gate_fn in FORMS:
        return g
    rate: Tensor | float = 1.0
    if A_log is not None:
        rate = A_log.exp()
        if gate == "channel":
            rate = rate.unsqueeze(-1)  # [HV] against g's [B, T, HV, K]
    return log_decay(g if dt_bias is None else g + dt_bias, rate, gate_fn, gate_scale)


def prepared(call: Call) -> Call:
    """The call of the recurrence itself, as the lowering takes it."""
    return recurrence(call, prepared_operands(call))


def recurrence(call: Call, operands: Mapping[str, Any]) -> Call:
    """The same, of operands that are prepared."""
    return call.having({**operands, **_APPLIED, "gate_fn": "factor" if call.gate_fn == "factor" else "log"})


_APPLIED = {"A_log": None, "dt_bias": None, "sigmoid_beta": False}


def prepared_operands(call: Call) -> dict[str, Any]:
    """What the lowering takes, by name in the order of ``RECURRENT``: one dtype, gates and beta as they are used."""
    dtype, beta, state = call.state_dtype, call.beta, call.initial_state
    if beta is not None:
        beta = _cast(beta, dtype)
        beta = torch.sigmoid(beta) if call.sigmoid_beta else beta
    return {
        "q": _cast(call.q, dtype),
        "k": _cast(call.k, dtype),
        "v": _cast(call.v, dtype),
        "g": prepared_gate(call, dtype),
        "beta": beta,
        "initial_state": None if state is None else _cast(state, dtype),
    }


def prepared_gate(call: Call, dtype: torch.dtype) -> Tensor | None:
    """The log gate; under ``factor`` the factor, whose logarithm is the lowering's business."""
    if call.g is None:
        return None
    A_log = None if call.A_log is None else _cast(call.A_log, dtype)
    dt_bias = None if call.dt_bias is None else _cast(call.dt_bias, dtype)
    return log_gate(
        _cast(call.g, dtype), A_log, dt_bias, gate=call.gate, gate_fn=call.gate_fn, gate_scale=call.gate_scale
    )  # fmt: skip


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # asking is cheaper than a cast that does nothing
