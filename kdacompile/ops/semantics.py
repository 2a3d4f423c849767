"""What the semantic ops compute, as a composition of differentiable torch functions.

The op takes tensors as a model has them. This file brings them into the form the lowering runs, in this order:
one compute dtype (float64 if q, k or v is float64, else float32), gate activation, sigmoid of beta. l2norm of q and k
and the recurrence itself are :mod:`kdacompile.lowering`'s. Nothing here is in place unless ``overwrite`` asks for it,
and nothing reads a value on the host, so ``torch.func.vjp`` differentiates it (the backward ops do, but for the
recurrence where there is a kernel) and CUDA graphs capture it.

Gate functions, ``g`` as given to the log decay it stands for:

==============  ========================================================  ===================================
``log``         ``g``                                                     RetNet, Mamba-2, GLA with a log gate
``factor``      ``log g``, never formed: alpha = 0 stays exact            models that multiply by alpha
``softplus``    ``-exp(A_log) * softplus(g + dt_bias)``                   Gated DeltaNet, KDA, Mamba-2
``sigmoid``     ``gate_scale * sigmoid(exp(A_log) * (g + dt_bias))``      KDA with a lower bound on the decay
``logsigmoid``  ``gate_scale * logsigmoid(g)``                            GLA
==============  ========================================================  ===================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile import lowering


def compute_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The dtype of the arithmetic and of the state: float64 when q, k or v is, else float32."""
    double = torch.float64
    return double if q.dtype is double or k.dtype is double or v.dtype is double else torch.float32


def log_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *, gate: str, gate_fn: str, gate_scale: float
) -> Tensor:
    """Apply the gate function; ``factor`` passes through, its logarithm is the lowering's business."""
    if gate_fn in ("log", "factor"):
        return g
    if gate_fn == "logsigmoid":
        return gate_scale * F.logsigmoid(g)
    if dt_bias is not None:
        g = g + dt_bias
    rate = None
    if A_log is not None:
        rate = A_log.exp()
        if gate == "channel":
            rate = rate.unsqueeze(-1)  # [HV] against g's [B, T, HV, K]
    if gate_fn == "softplus":
        softplus = F.softplus(g)
        return -softplus if rate is None else -rate * softplus
    return gate_scale * torch.sigmoid(g if rate is None else rate * g)


def sequence_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float,
    delta: bool,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    sigmoid_beta: bool,
    qk_l2norm_eps: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]``, both in the compute dtype."""
    q, k, v, g, beta, initial_state = prepare(
        q, k, v, g, beta, initial_state, A_log, dt_bias, gate, gate_fn, gate_scale, sigmoid_beta
    )
    if q.shape[1] == 0:
        return _no_tokens(k, v, initial_state, cu_seqlens)
    if cu_seqlens is not None and cu_seqlens.device != q.device:
        cu_seqlens = cu_seqlens.to(q.device)  # bounds may be given on the CPU; the lowering wants one device
    return lowering.run_linear_attention(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale=scale,
        delta=delta,
        gate=gate,
        gate_form="factor" if gate_fn == "factor" else "log",
        norm_eps=qk_l2norm_eps,
        chunk_size=chunk_size,
        cu_seqlens=cu_seqlens,
    )


def step_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    scale: float,
    delta: bool,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    sigmoid_beta: bool,
    qk_l2norm_eps: float,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token: o ``[B, 1, HV, V]`` and the state after it ``[B, HV, K, V]``, both in the compute dtype.

    With ``overwrite`` the state returned may be ``initial_state`` itself.
    """
    q, k, v, g, beta, initial_state = prepare(
        q, k, v, g, beta, initial_state, A_log, dt_bias, gate, gate_fn, gate_scale, sigmoid_beta
    )
    return lowering.run_linear_attention_step(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        scale=scale,
        delta=delta,
        gate=gate,
        gate_form="factor" if gate_fn == "factor" else "log",
        norm_eps=qk_l2norm_eps,
        overwrite=overwrite,
    )


def sequence_backward(
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    wanted: Sequence[bool],
    *,
    factor: bool,
    qk_l2norm_eps: float,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> list[Tensor | None]:
    """Gradients of the wanted ones of q, k, v, g, beta and state as :func:`prepare` returns them, from those of o and
    the final state; ``factor``: g is the gate's factor.
    """
    device = next(x.device for x in tensors if x is not None)
    if cu_seqlens is not None and cu_seqlens.device != device:
        cu_seqlens = cu_seqlens.to(device)
    form = "factor" if factor else "log"
    return lowering.run_linear_attention_backward(
        grads, tensors, wanted, gate_form=form, norm_eps=qk_l2norm_eps, cu_seqlens=cu_seqlens, **options
    )


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    sigmoid_beta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What the lowering takes: one dtype, the gate function and beta's sigmoid applied."""
    dtype = compute_dtype(q, k, v)
    q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    if g is not None:
        A_log = None if A_log is None else _cast(A_log, dtype)
        dt_bias = None if dt_bias is None else _cast(dt_bias, dtype)
        g = log_gate(_cast(g, dtype), A_log, dt_bias, gate=gate, gate_fn=gate_fn, gate_scale=gate_scale)
    if beta is not None:
        beta = _cast(beta, dtype)
        if sigmoid_beta:
            beta = torch.sigmoid(beta)
    return q, k, v, g, beta, None if state is None else _cast(state, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # asking is cheaper than a cast that does nothing


def _no_tokens(k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """T = 0: no output, and the state passes through (as a copy: an op's output may not alias its input)."""
    if initial_state is not None:
        return torch.empty_like(v), initial_state.clone(memory_format=torch.contiguous_format)
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.empty_like(v), v.new_zeros(sequences, v.shape[2], k.shape[3], v.shape[3])
