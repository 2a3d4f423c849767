"""What the semantic ops compute, as a composition of differentiable torch functions.

The op takes tensors as a model has them. This file brings them into the form the lowering runs, in this order:
one compute dtype (float64 if q, k or v is float64, else float32), gate activation, sigmoid of beta. l2norm of q and k
and the recurrence itself are :mod:`kdacompile.lowering`'s. Nothing here is in place unless ``overwrite`` asks for it,
and nothing reads a value on the host, so ``torch.func.vjp`` differentiates it (the backward ops do, but for the
recurrence where there is a kernel) and CUDA graphs capture it.

The gate functions are those of the table in :mod:`kdacompile.lowering.gates`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kdacompile import lowering
from kdacompile.lowering.calls import Call
from kdacompile.lowering.gates import FORMS, log_decay

RECURRENT: tuple[str, ...] = ("q", "k", "v", "g", "beta", "initial_state")
"""The operands of the recurrence itself: those with a gate function or a parameter of it are applied before."""


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


def sequence_forward(call: Call) -> tuple[Tensor, Tensor]:
    """o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]``, both in the compute dtype."""
    call = call.with_bounds_at_hand()
    operands = prepared_operands(call)
    if call.q.shape[1] == 0:
        return _no_tokens(call, operands)
    more: dict[str, Any] = {"chunk_size": call.chunk_size, "cu_seqlens": call.cu_seqlens}
    return lowering.run_linear_attention(**operands, **_options(call), **more)


def step_forward(call: Call, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """One token of a checked call: o ``[B, 1, HV, V]`` and the state after it ``[B, HV, K, V]``, in the compute dtype.

    With ``overwrite`` the state returned may be ``initial_state`` itself.
    """
    options = _options(call)
    return lowering.run_linear_attention_step(**prepared_operands(call), **options, overwrite=overwrite, checked=True)


def backward(
    grads: Sequence[Tensor | None], call: Call, operands: Mapping[str, Tensor], wanted: Collection[str], *, step: bool
) -> dict[str, Tensor | None]:
    """Gradients of the wanted ones of the prepared ``operands`` of a call, from those of o and the final state."""
    call = call.with_bounds_at_hand()
    more: dict[str, Any] = {"step": True}
    if not step:
        more = {"chunk_size": call.chunk_size, "cu_seqlens": call.cu_seqlens}
    tensors, flags = [operands.get(name) for name in RECURRENT], [name in wanted for name in RECURRENT]
    found = lowering.run_linear_attention_backward(grads, tensors, flags, **_options(call), **more)
    return dict(zip(RECURRENT, found, strict=True))


def _options(call: Call) -> dict[str, Any]:
    return {
        "scale": call.scale,
        "delta": call.delta,
        "gate": call.gate,
        "gate_form": "factor" if call.gate_fn == "factor" else "log",
        "norm_eps": call.qk_l2norm_eps,
    }


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


def _no_tokens(call: Call, operands: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """T = 0: no output, and the state passes through (as a copy: an op's output may not alias its input)."""
    o, state = torch.empty_like(operands["v"]), operands["initial_state"]
    if state is not None:
        return o, state.clone(memory_format=torch.contiguous_format)
    _, (shape, dtype) = call.results
    return o, o.new_zeros(shape, dtype=dtype)
