"""The public functions over the semantic ops: defaults, layouts and shapes; everything else is the op's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kdacompile.lowering.gates import GATE_FUNCTIONS
from kdacompile.ops import definitions
from kdacompile.ops.checks import check_number, check_tensors
from kdacompile.ops.errors import GateParameterError, OptionError, RankError, StateError

if TYPE_CHECKING:
    from kdacompile.distributed import ContextParallel

DEFAULT_L2NORM_EPS = 1e-6
_GATE_LAYOUTS = "[HV], [B, T, HV] or [B, T, HV, K]"


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    delta: bool = True,
    gate_fn: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_scale: float | None = None,
    sigmoid_beta: bool = False,
    qk_l2norm: bool | float = False,
    state_layout: str = "KV",
    chunk_size: int | None = None,
    out_dtype: torch.dtype | None = None,
    context_parallel: ContextParallel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decaying state and, optionally, the delta rule, over whole sequences.

    Per head, with the state ``S`` in R^{K x V}::

        S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        (delta=True)
        S_t = diag(exp g_t) S_{t-1} + beta_t k_t v_t^T                               (delta=False)
        o_t = scale * S_t^T q_t

    One function for the family: KDA (arXiv 2510.26692, eq. 1), the gated delta rule (arXiv 2412.06464, eq. 10), the
    delta rule (arXiv 2406.06484), GLA (arXiv 2312.06635, eq. 3), Mamba-2's SSD (arXiv 2405.21060, eq. 16), RetNet
    (arXiv 2307.08621, eq. 6), lightning attention (arXiv 2401.04658) and plain linear attention.

    Args:
        q, k: ``[B, T, H, K]``. bfloat16, float16, float32 or float64, any strides; T may be 0.
        v: ``[B, T, HV, V]``, HV a multiple of H: value head ``h`` reads key head ``h // (HV // H)``.
        g: the gate, its rank says which: None (no decay), ``[HV]`` (constant per head), ``[B, T, HV]`` (per token) or
            ``[B, T, HV, K]`` (per token and channel).
        beta: ``[B, T, HV]``, the writing strength; None means 1.
        scale: factor on the output; default ``K ** -0.5``.
        initial_state: ``[B, HV, K, V]`` of any float dtype, or ``[N, HV, K, V]`` with ``cu_seqlens``; None means zeros.
        output_final_state: return the state after the last token.
        cu_seqlens: ``[N + 1]`` int32 or int64, the bounds of N sequences packed along T (B must be 1): 0, ..., T, not
            decreasing. On the CPU the values are checked; on another device only the size is, since reading them would
            synchronise. A CPU tensor is welcome with operands on any device.
        delta: subtract what the state already holds for the key before writing (the delta rule).
        gate_fn: what ``g`` is. Writing d for the log decay of the equation:
            "log": d = g (at most 0; -inf is legal);
            "factor": exp(d) = g, in [0, 1] (0 is legal and exact);
            "softplus": d = -exp(A_log) * softplus(g + dt_bias);
            "sigmoid": d = gate_scale * sigmoid(exp(A_log) * (g + dt_bias)), gate_scale being the lower bound on d;
            "logsigmoid": d = gate_scale * logsigmoid(g).
        A_log: ``[HV]``, required by "softplus" and "sigmoid".
        dt_bias: ``[HV]``, or ``[HV, K]`` with a gate per channel; only "softplus" and "sigmoid" read it; None means 0.
        gate_scale: at most 0 and required by "sigmoid"; at least 0 and 1 by default for "logsigmoid".
        sigmoid_beta: beta is a logit, apply sigmoid to it.
        qk_l2norm: normalise q and k over K first, ``x * rsqrt(sum(x * x) + eps)``: True for eps = 1e-6, or eps itself.
        state_layout: "KV" or "VK" (``[.., HV, V, K]``), of both states. "VK" costs nothing: it is a transposed view.
        chunk_size: tokens the lowering treats at once; changes rounding and speed only. None or 0: its own choice.
        out_dtype: dtype of o; default v's.
        context_parallel: q, k, v, g and beta hold this rank's tokens of longer sequences, see
            :class:`kdacompile.distributed.ContextParallel`. ``cu_seqlens`` and the states are those of whole sequences,
            the same on every rank; the final state is returned on every rank.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]``, and the final state as float32 (float64 if q, k or v is float64), or
        None without ``output_final_state``. All arithmetic is at least float32, under ``torch.autocast`` too: autocast
        casts neither the inputs nor the output. Only on CUDA do matrix products take 16-bit operands where q, k and v
        are 16-bit, and TF32 where ``torch.set_float32_matmul_precision`` allows it; sums and state are float32.

    DTensors are computed shard by shard: on each dimension of their mesh every operand with a batch, or every operand
    with heads (H and HV alike), is sharded there, evenly, and the others are replicated. On one dimension every operand
    with tokens may be sharded along T instead: context parallelism in contiguous order. Gradients are DTensors too.

    Raises:
        kdacompile.ops.errors.OpError: one class per mistake, each also a ValueError or a TypeError.
    """
    optional = {"g": g, "beta": beta, "initial_state": initial_state, "cu_seqlens": cu_seqlens, "A_log": A_log}
    check_tensors({"q": q, "k": k, "v": v}, {**optional, "dt_bias": dt_bias})
    _check_gate_parameters(gate_fn, A_log, gate_scale)
    operands = (q, k, v, g, beta, _to_kv(initial_state, state_layout), A_log, dt_bias, cu_seqlens)
    options = _options(q, g, scale, delta, gate_fn, gate_scale, sigmoid_beta, qk_l2norm, out_dtype)
    check_number("chunk_size", chunk_size)
    options["chunk_size"] = 0 if chunk_size is None else chunk_size
    final_state: Tensor | None
    if context_parallel is None:
        o, final_state = definitions.linear_attention(*operands, **options)
    else:
        from kdacompile.distributed import calls  # torch.distributed is slow to import

        o, final_state = calls.linear_attention(operands, options, context_parallel, final_state=output_final_state)
    return o, None if final_state is None or not output_final_state else _from_kv(final_state, state_layout)


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    state: Tensor | None = None,
    inplace: bool = False,
    state_indices: Tensor | None = None,
    scale: float | None = None,
    delta: bool = True,
    gate_fn: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    gate_scale: float | None = None,
    sigmoid_beta: bool = False,
    qk_l2norm: bool | float = False,
    state_layout: str = "KV",
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of :func:`linear_attention`: the decoding step.

    Args:
        q, k, v, g, beta: as there with T = 1, or all without the T dimension: q, k ``[B, H, K]``, v ``[B, HV, V]``,
            beta ``[B, HV]``, g ``[B, HV]`` or ``[B, HV, K]``. A gate constant per head is ``[HV]`` in both.
        state: ``[B, HV, K, V]`` (``[B, HV, V, K]`` with ``state_layout="VK"``), any float dtype; None means zeros.
        inplace: overwrite ``state`` (any strides without overlap), rounding to its dtype. Where a gradient is needed
            this is the functional step and a ``copy_``.
        state_indices: ``[B]`` int32 or int64, with ``inplace``: ``state`` is a pool ``[P, HV, K, V]`` and this the slot
            of each request, which is read and overwritten where it lies. An index that is negative (padding of the
            batch) names no slot: o is 0 there, and nothing is written. No two requests may have one slot. On the CPU
            that is checked, and that indices are below P; on other devices, where reading them would synchronise,
            an index from P on names no slot either, and what requests that share a slot get is undefined.

    The other arguments are those of :func:`linear_attention`.

    Returns:
        ``(o, state)``: o ``[B, 1, HV, V]`` (``[B, HV, V]`` for inputs without T), and the new state: float32 (float64
        if q, k or v is float64) in memory of its own, or ``state`` itself with ``inplace``.

    Raises:
        kdacompile.ops.errors.OpError: as :func:`linear_attention`; ``StateError`` for ``inplace`` without a state and
            for ``state_indices`` without ``inplace``; ``StateIndicesError`` for values of ``state_indices``.
    """
    optional = {"g": g, "beta": beta, "state": state, "A_log": A_log, "dt_bias": dt_bias}
    optional["state_indices"] = state_indices
    check_tensors({"q": q, "k": k, "v": v}, optional)
    _check_gate_parameters(gate_fn, A_log, gate_scale)
    squeezed = q.dim() == 3
    if squeezed:
        q, k, v, g, beta = _insert_token_dimension(q, k, v, g, beta)
    options = _options(q, g, scale, delta, gate_fn, gate_scale, sigmoid_beta, qk_l2norm, out_dtype)
    operands = (q, k, v, g, beta, _to_kv(state, state_layout), A_log, dt_bias)
    if inplace:
        if state is None:
            raise StateError(problem="inplace=True needs a state to write to")
        o = definitions.linear_attention_step_(*operands, state_indices, **options)
        new_state = state
    elif state_indices is not None:
        raise StateError(problem="state_indices needs inplace=True: the slots of a pool are written where they lie")
    else:
        o, new_state = definitions.linear_attention_step(*operands, **options)
        new_state = _from_kv(new_state, state_layout)
    return o.squeeze(1) if squeezed else o, new_state


def _options(
    q: Tensor, g: Tensor | None, scale: float | None, delta: bool, gate_fn: str, gate_scale: float | None,
    sigmoid_beta: bool, qk_l2norm: bool | float, out_dtype: torch.dtype | None,
) -> dict[str, Any]:  # fmt: skip
    """The options that the ops of a sequence and of a step share, with their defaults."""
    check_number("scale", scale)
    check_number("gate_scale", gate_scale)
    return {
        "scale": _default_scale(q) if scale is None else scale,
        "delta": delta,
        "gate": _gate_kind(g),
        "gate_fn": gate_fn,
        "gate_scale": 1.0 if gate_scale is None else gate_scale,
        "sigmoid_beta": sigmoid_beta,
        "qk_l2norm_eps": _l2norm_eps(qk_l2norm),
        "out_dtype": out_dtype,
    }


def _gate_kind(g: Tensor | None) -> str:
    """The gate's rank names its kind, without ambiguity."""
    if g is None:
        return "none"
    kind = {1: "head", 3: "token", 4: "channel"}.get(g.dim())
    if kind is None:
        raise RankError(name="g", expected="1, 3 or 4", layout=_GATE_LAYOUTS, actual=tuple(g.shape))
    return kind


def _check_gate_parameters(gate_fn: str, A_log: Tensor | None, gate_scale: float | None) -> None:
    """What the op has neutral defaults for and a person would rather be told about."""
    function = GATE_FUNCTIONS.get(gate_fn)
    if function is None:
        return  # the op says so
    if function.parametric and A_log is None:
        raise GateParameterError(gate_fn=gate_fn, problem="A_log is missing (zeros [HV] mean a factor of 1)")
    if function.scale == "lower bound" and gate_scale is None:
        raise GateParameterError(gate_fn=gate_fn, problem="gate_scale, the lower bound on the log decay, is missing")
    if gate_scale is not None and not function.scale:
        raise GateParameterError(gate_fn=gate_fn, problem="does not read gate_scale")


def _default_scale(q: Tensor) -> float:
    key_dim = q.shape[-1] if q.dim() else 0
    return key_dim**-0.5 if key_dim else 1.0


def _l2norm_eps(qk_l2norm: bool | float) -> float:
    if isinstance(qk_l2norm, bool):
        return DEFAULT_L2NORM_EPS if qk_l2norm else 0.0
    if isinstance(qk_l2norm, str) or not qk_l2norm > 0.0:
        raise OptionError(name="qk_l2norm", expected="True, False or a positive eps", actual=qk_l2norm)
    return float(qk_l2norm)


def _to_kv(state: Tensor | None, layout: str) -> Tensor | None:
    if layout not in ("KV", "VK"):
        raise OptionError(name="state_layout", expected='"KV" or "VK"', actual=layout)
    if state is None or layout == "KV":
        return state
    if state.dim() != 4:
        raise RankError(name="state", expected=4, layout="[B, HV, V, K]", actual=tuple(state.shape))
    return state.transpose(-1, -2)


def _from_kv(state: Tensor, layout: str) -> Tensor:
    return state.transpose(-1, -2) if layout == "VK" else state


def _insert_token_dimension(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``[B, H, ..]`` to ``[B, 1, H, ..]``; every tensor must come without T if q does."""
    for name, x, rank, layout in (("k", k, 3, "[B, H, K]"), ("v", v, 3, "[B, HV, V]"), ("beta", beta, 2, "[B, HV]")):
        if x is not None and x.dim() != rank:
            raise RankError(name=name, expected=rank, layout=f"{layout}, as q has no T", actual=tuple(x.shape))
    if g is not None and g.dim() != 1:
        if g.dim() not in (2, 3):
            layout = "[HV], [B, HV] or [B, HV, K], as q has no T"
            raise RankError(name="g", expected="1, 2 or 3", layout=layout, actual=tuple(g.shape))
        g = g.unsqueeze(1)
    beta = None if beta is None else beta.unsqueeze(1)
    return q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), g, beta
