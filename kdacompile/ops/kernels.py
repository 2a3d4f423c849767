"""The device-independent kernels of the semantic ops: check, compute through the lowering, return fresh tensors.

A kernel runs below autograd and autocast on real tensors. Outputs and gradients are contiguous (o in the order of
``o_layout``) and own their memory: the fakes promise it, and an op that returned a view of an input would be aliasing
the compiler does not know of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kdacompile import lowering
from kdacompile.lowering.attention_backward import run_attention_backward
from kdacompile.lowering.calls import RECURRENT, Call
from kdacompile.lowering.operands import given, operands, tensors
from kdacompile.lowering.run_attention import Attention, run_attention
from kdacompile.ops import semantics
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
    o, state = lowering.run_linear_attention(semantics.prepared(call.with_bounds_at_hand()))
    return o.to(call.out_dtype).contiguous(), state.contiguous()


def run_step(call: Call) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention_step`` of a checked call."""
    o, state = lowering.run_linear_attention_step(semantics.prepared(call))
    return o.to(call.out_dtype).contiguous(), state.contiguous()


def run_inplace_step(call: Call) -> Tensor:
    """``kdacompile::linear_attention_step_``: the new state is rounded to the state's dtype, o is computed first."""
    o, new_state = lowering.run_linear_attention_step(semantics.prepared(call), overwrite=True)
    # Whoever overwrites the state has read everything else before, inputs that share memory with the state too.
    if call.initial_state is not None and new_state is not call.initial_state:
        call.initial_state.copy_(new_state)
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

    Those of the recurrence are the lowering's business. Casts and gate functions in front of it are differentiated by
    ``torch.func.vjp``, not ``autograd.grad``: inside an op's kernel the autograd keys may be off, and functorch's
    transforms bring their own.
    """
    asked = {operand.name for operand, want in zip(operands(Call), wanted, strict=False) if want}
    primals = {name: x for name, x in given(call).items() if name in asked}
    if all(grad is None for grad in grads):
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in primals.values()]

    def prepared(*values: Tensor) -> tuple[Tensor, ...]:
        changed = replace(call, **dict(zip(primals, values, strict=True)))
        return tuple(x for x in semantics.prepared_operands(changed).values() if x is not None)

    names = [name for name in RECURRENT if getattr(call, name) is not None]
    asked |= {"g"} if asked & {"A_log", "dt_bias"} else set()
    with differentiation():
        values, pull_back, *_ = torch.func.vjp(prepared, *primals.values())
        inputs = dict(zip(names, values, strict=True))
        with torch.no_grad():
            recurrence = semantics.recurrence(call, inputs).with_bounds_at_hand()
            found = lowering.run_linear_attention_backward(grads, recurrence, asked, step=step)
            pulled = pull_back(
                tuple(found[name] if name in found else x.new_zeros(x.shape) for name, x in inputs.items())
            )
    return _fresh(pulled, (*grads, *tensors(call)))


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
    (grad_o, grad_lse, o, lse), operands = MLA.of_backward(arguments)
    call = Attention(*operands, **options, out_dtype=o.dtype)
    if call.block_table is not None:
        raise PagedCacheError(problem="a paged cache has no gradients: gather it, or detach what reads it")
    return gradients_of(call, wanted, lambda names: run_attention_backward(call, o, lse, grad_o, grad_lse, names))


def gradients_of(
    call: Attention, wanted: Sequence[bool], compute: Callable[[list[str]], dict[str, Tensor]]
) -> list[Tensor]:
    """What ``compute`` gives for the wanted operands, in their order and dtypes."""
    asked = {operand.name for operand, want in zip(MLA.operands, wanted, strict=False) if want}
    likes = {name: x for name, x in given(call).items() if name in asked}
    gradients = compute(list(likes))
    return [gradients[name].to(like.dtype).contiguous() for name, like in likes.items()]
