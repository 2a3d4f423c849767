"""The device-independent kernels of the semantic ops: check, compute through the lowering, return fresh tensors.

A kernel runs below autograd and autocast on real tensors. Outputs and gradients are contiguous (o in the order of
``o_layout``) and own their memory: the fakes promise it, and an op that returned a view of an input would be aliasing
the compiler does not know of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kdacompile.ops.checks import check_layout, check_sequence, check_step, check_writable
from kdacompile.ops.dispatch import differentiation
from kdacompile.ops.semantics import prepare, sequence_backward, sequence_forward, step_forward

OptionalTensors = Sequence[Tensor | None]
O_DIMENSIONS = "BTHV"


def in_layout(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """``kernel`` with the option ``o_layout``: the dimensions of o from the outermost to the innermost in memory.

    A rewritten graph must hand on the strides that the user's code gave its result. Copying here rather than in the
    graph saves the compiler a kernel of its own.
    """

    @functools.wraps(kernel)
    def laid_out(*tensors: Tensor | None, o_layout: str = O_DIMENSIONS, **options: Any) -> tuple[Tensor, Tensor]:
        o, state = kernel(*tensors, **options)
        if o_layout != O_DIMENSIONS:
            check_layout(o_layout)
            order = [O_DIMENSIONS.index(letter) for letter in o_layout]
            o = o.permute(order).contiguous().permute([o_layout.index(letter) for letter in O_DIMENSIONS])
        return o, state

    return laid_out


def sequence_kernel(
    q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention``."""
    check_sequence(
        q, k, v, *others, gate=options["gate"], gate_fn=options["gate_fn"], gate_scale=options["gate_scale"],
        qk_l2norm_eps=options["qk_l2norm_eps"], chunk_size=options["chunk_size"],
    )  # fmt: skip
    o, state = sequence_forward(q, k, v, *others, **options)
    return o.to(v.dtype if out_dtype is None else out_dtype).contiguous(), state.contiguous()


def step_kernel(
    q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, out_dtype: torch.dtype | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention_step``."""
    check_step(
        q, k, v, *others, gate=options["gate"], gate_fn=options["gate_fn"], gate_scale=options["gate_scale"],
        qk_l2norm_eps=options["qk_l2norm_eps"],
    )  # fmt: skip
    o, state = step_forward(q, k, v, *others, **options)
    return o.to(v.dtype if out_dtype is None else out_dtype).contiguous(), state.contiguous()


def inplace_step_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    out_dtype: torch.dtype | None,
    **options: Any,
) -> Tensor:
    """``kdacompile::linear_attention_step_``: the new state is rounded to the state's dtype, o is computed first."""
    check_step(
        q, k, v, g, beta, state, A_log, dt_bias, state_name="state", gate=options["gate"], gate_fn=options["gate_fn"],
        gate_scale=options["gate_scale"], qk_l2norm_eps=options["qk_l2norm_eps"],
    )  # fmt: skip
    check_writable(state)
    o, new_state = step_forward(q, k, v, g, beta, state, A_log, dt_bias, overwrite=True, **options)
    # Whoever overwrites the state has read everything else before, inputs that share memory with the state too.
    if new_state is not state:
        state.copy_(new_state)
    return o.to(v.dtype if out_dtype is None else out_dtype).contiguous()


def sequence_backward_kernel(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Tensor | None, wanted: list[bool], **options: Any
) -> list[Tensor]:
    """``kdacompile::linear_attention_backward``."""
    *operands, cu_seqlens = tensors
    return _pull_back((grad_o, grad_state), operands, wanted, cu_seqlens=cu_seqlens, **options)


def step_backward_kernel(
    grad_o: Tensor | None, grad_state: Tensor | None, *tensors: Tensor | None, wanted: list[bool], **options: Any
) -> list[Tensor]:
    """``kdacompile::linear_attention_step_backward``."""
    return _pull_back((grad_o, grad_state), tensors, wanted, step=True, **options)


def _pull_back(
    grads: OptionalTensors,
    tensors: OptionalTensors,
    wanted: list[bool],
    *,
    gate_fn: str,
    gate_scale: float,
    sigmoid_beta: bool,
    **options: Any,
) -> list[Tensor]:
    """Gradients of the wanted tensors, in their order; a gradient that is None stands for zeros.

    Those of the recurrence are the lowering's business. Casts and gate functions in front of it are differentiated by
    ``torch.func.vjp``, not ``autograd.grad``: inside an op's kernel the autograd keys may be off, and functorch's
    transforms bring their own.
    """
    places = [i for i, (x, want) in enumerate(zip(tensors, wanted, strict=True)) if want and x is not None]
    primals = [x for i, x in enumerate(tensors) if i in places and x is not None]
    if all(grad is None for grad in grads):
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in primals]

    def prepared(*values: Tensor) -> tuple[Tensor, ...]:
        arguments: list[Any] = list(tensors)
        for place, value in zip(places, values, strict=True):
            arguments[place] = value
        arguments += [options["gate"], gate_fn, gate_scale, sigmoid_beta]
        return tuple(x for x in prepare(*arguments) if x is not None)

    with differentiation():
        values, pull_back, *_ = torch.func.vjp(prepared, *primals)
        with torch.no_grad():
            gradients = pull_back(_of_prepared(grads, values, tensors, wanted, gate_fn, options))
    return _fresh(gradients, (*grads, *tensors))


def _of_prepared(
    grads: OptionalTensors,
    values: Sequence[Tensor],
    tensors: OptionalTensors,
    wanted: Sequence[bool],
    gate_fn: str,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Gradients of ``values``, what the recurrence reads; zeros for those that nothing wanted depends on."""
    following = iter(values)
    operands = [None if x is None else next(following) for x in tensors[:6]]
    gate_wanted = any(wanted[i] for i in (3, 6, 7))
    found = sequence_backward(
        grads, operands, [*wanted[:3], gate_wanted, *wanted[4:6]], factor=gate_fn == "factor", **options
    )
    pairs = zip(operands, found, strict=True)
    return tuple(x.new_zeros(x.shape) if grad is None else grad for x, grad in pairs if x is not None)


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
