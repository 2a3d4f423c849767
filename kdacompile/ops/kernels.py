"""The device-independent kernels of the semantic ops: check, compute through the lowering, return fresh tensors.

A kernel runs below autograd and autocast on real tensors. Outputs and gradients are contiguous (o in the order of
``o_layout``) and own their memory: the fakes promise it, and an op that returned a view of an input would be aliasing
the compiler does not know of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kdacompile import lowering
from kdacompile.lowering import pools
from kdacompile.lowering.attention_rows import run_attention_backward
from kdacompile.lowering.calls import Call
from kdacompile.lowering.gates import FORMS, log_decay, slopes
from kdacompile.lowering.operands import given, operands, tensors
from kdacompile.lowering.run_attention import Attention, run_attention
from kdacompile.ops.checks import check_layout
from kdacompile.ops.dispatch import Kernel, differentiation
from kdacompile.ops.errors import PagedCacheError
from kdacompile.ops.signature import LINEAR_ATTENTION, MLA, O_DIMENSIONS, Signature

OptionalTensors = Sequence[Tensor | None]


def kernel_of(signature: Signature, run: Callable[[Any], Any]) -> Kernel:
    """The kernel of an op: ``run`` on its checked call."""

    def kernel(*arguments: Tensor | None, **options: Any) -> Any:
        return run(signature.checked(arguments, options))

    return kernel


def in_layout(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``kernel`` with the option ``o_layout``: the dimensions of o from the outermost to the innermost in memory.

    A rewritten graph must hand on the strides that the user's code gave its result. Copying here rather than in the
    graph saves the compiler a kernel of its own.
    """

    @functools.wraps(kernel)
    def laid_out(*inputs: Tensor | None, o_layout: str = O_DIMENSIONS, **options: Any) -> tuple[Tensor, Tensor]:
        o, state = kernel(*inputs, **options)
        if o_layout != O_DIMENSIONS:
            check_layout(o_layout)
            order = [O_DIMENSIONS.index(letter) for letter in o_layout]
            o = o.permute(order).contiguous().permute([o_layout.index(letter) for letter in O_DIMENSIONS])
        return o, state

    return laid_out


def run_sequence(call: Call) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention`` of a checked call."""
    o, state = lowering.run_linear_attention(prepared(call.with_bounds_at_hand()))
    return o.to(call.out_dtype).contiguous(), state.contiguous()


def run_step(call: Call) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention_step`` of a checked call."""
    o, state = lowering.run_linear_attention_step(prepared(call))
    return o.to(call.out_dtype).contiguous(), state.contiguous()


def run_inplace_step(call: Call) -> Tensor:
    """``kdacompile::linear_attention_step_``: the new state is rounded to the state's dtype, o is computed first."""
    if call.state_indices is not None:
        return _run_step_in_pool(call)
    o, new_state = lowering.run_linear_attention_step(prepared(call), overwrite=True)
    # Whoever overwrites the state has read everything else before, inputs that share memory with the state too.
    if call.initial_state is not None and new_state is not call.initial_state:
        call.initial_state.copy_(new_state)
    return o.to(call.out_dtype).contiguous()


def _run_step_in_pool(call: Call) -> Tensor:
    """The same where the states lie in a pool; one in another dtype or layout than the kernels' is not copied whole."""
    pool, o = call.initial_state, None
    assert pool is not None
    if pool.dtype is call.state_dtype and pool.is_contiguous():
        o = lowering.run_step_in_pool(prepared(call))
    if o is None:
        o = pools.step_apart(call, lambda own: lowering.run_linear_attention_step(prepared(own), overwrite=True))
    return o.to(call.out_dtype).contiguous()


def backward_kernel_of(signature: Signature) -> Kernel:
    """The backward op of ``linear_attention`` or of its step; what came in was checked by the op itself."""
    step = signature is not LINEAR_ATTENTION

    def kernel(*arguments: Tensor | None, wanted: list[bool], **options: Any) -> list[Tensor]:
        grads, inputs = signature.of_backward(arguments)
        return gradients(grads, signature.call(*inputs, **options), wanted, step=step)

    return kernel


def gradients(grads: OptionalTensors, call: Call, wanted: Sequence[bool], *, step: bool) -> list[Tensor]:
    """Gradients of the wanted operands, in their order; a gradient that is None stands for zeros.

    Those of the recurrence are the lowering's business, those of casts and gates are written down: ``torch.func.vjp``
    takes the host longer than the kernels take for a short prompt.
    """
    asked = {operand.name for operand, want in zip(operands(Call), wanted, strict=False) if want}
    primals = {name: x for name, x in given(call).items() if name in asked}
    if all(grad is None for grad in grads):
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in primals.values()]
    asked |= {"g"} if asked & {"A_log", "dt_bias"} else set()
    with differentiation(), torch.no_grad():
        alone = prepared(call).with_bounds_at_hand()
        found = in_front(call, lowering.run_linear_attention_backward(grads, alone, asked, step=step))
        cast = [found[name].to(x.dtype) if name in found else torch.zeros_like(x) for name, x in primals.items()]
    return _fresh(cast, (*grads, *tensors(call)))


def _fresh(outputs: Sequence[Tensor], inputs: OptionalTensors) -> list[Tensor]:
    """Contiguous outputs, copied where they share memory with an input or with each other.

    A pull-back may hand its cotangent through as a gradient, or the same tensor to two inputs.
    """
    taken = {x.untyped_storage().data_ptr() for x in inputs if x is not None}
    fresh = []
    for x in outputs:
        x = x.contiguous()
        if x.untyped_storage().data_ptr() in taken and x.numel():
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        fresh.append(x)
    return fresh


# -- latent attention -------------------------------------------------------------------------------------------------


def run_mla(call: Attention) -> tuple[Tensor, Tensor]:
    """``kdacompile::mla`` of a checked call, on the torch executor."""
    o, lse = run_attention(call)
    return o.to(call.out_dtype).contiguous(), lse.contiguous()


def mla_backward_kernel(*arguments: Any, wanted: list[bool], **options: Any) -> list[Tensor]:
    """``kdacompile::mla_backward``: one gradient for each wanted tensor, in its dtype."""
    (grad_o, grad_lse, o, _), operands = MLA.of_backward(arguments)
    call = Attention(*operands, **options, out_dtype=o.dtype)
    if call.block_table is not None:
        raise PagedCacheError(problem="a paged cache has no gradients: gather it, or detach what reads it")
    return gradients_of(call, wanted, lambda names: run_attention_backward(call, o, grad_o, grad_lse, names))


def gradients_of(
    call: Attention, wanted: Sequence[bool], compute: Callable[[list[str]], dict[str, Tensor]]
) -> list[Tensor]:
    """What ``compute`` gives for the wanted operands, in their order and dtypes."""
    asked = {operand.name for operand, want in zip(MLA.operands, wanted, strict=False) if want}
    likes = {name: x for name, x in given(call).items() if name in asked}
    gradients = compute(list(likes))
    return [gradients[name].to(like.dtype).contiguous() for name, like in likes.items()]


# -- before the recurrence --------------------------------------------------------------------------------------------
# The op takes tensors as a model has them. What follows brings them into the form the lowering runs, in this order: one
# compute dtype (float64 if q, k or v is float64, else float32), gate activation, sigmoid of beta. l2norm of q and k and
# the recurrence itself are :mod:`kdacompile.lowering`'s. Nothing here is in place, and nothing reads a value on the
# host, so CUDA graphs capture it. Its derivative is ``in_front``.
# The gate functions are those of the table in :mod:`kdacompile.lowering.gates`.


def log_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, *, gate: str, gate_fn: str, gate_scale: float
) -> Tensor:
    """The log decay that g stands for; a factor passes through, its logarithm is the lowering's business."""
    if gate_fn in FORMS:
        return g
    return log_decay(g if dt_bias is None else g + dt_bias, rate_of(A_log, g.dtype, gate), gate_fn, gate_scale)


def rate_of(A_log: Tensor | None, dtype: torch.dtype, gate: str) -> Tensor | float:
    """What A_log stands for, as it broadcasts to the gates."""
    if A_log is None:
        return 1.0
    rate = _cast(A_log, dtype).exp()
    return rate.unsqueeze(-1) if gate == "channel" else rate  # [HV] against g's [B, T, HV, K]


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


def in_front(call: Call, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a call's own operands, in the compute dtype, of those of the prepared ones."""
    found, dtype = dict(grads), call.state_dtype
    if call.sigmoid_beta and call.beta is not None and "beta" in grads:
        beta = torch.sigmoid(_cast(call.beta, dtype))
        found["beta"] = grads["beta"] * (beta * (1 - beta))
    if call.gate_fn in FORMS or call.g is None or "g" not in grads:
        return found
    x = _cast(call.g, dtype)
    x = x if call.dt_bias is None else x + _cast(call.dt_bias, dtype)
    by_x, by_rate = slopes(x, rate_of(call.A_log, dtype, call.gate), call.gate_fn, call.gate_scale)
    found["g"] = grads["g"] * by_x
    if call.dt_bias is not None:
        found["dt_bias"] = found["g"].sum_to_size(call.dt_bias.shape)
    if call.A_log is not None:
        by_rate = grads["g"] * by_rate
        by_rate = by_rate.sum(-1) if call.gate == "channel" else by_rate
        found["A_log"] = by_rate.sum_to_size(call.A_log.shape)
    return found


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # asking is cheaper than a cast that does nothing
