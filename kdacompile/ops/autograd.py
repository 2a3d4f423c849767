"""Autograd of the semantic ops: a graph node that calls a separate backward op.

The ops are defined with :class:`torch.library.Library` and an autograd kernel of our own rather than with
``torch.library.custom_op``: with the eighteen arguments of a step the decorator costs 46 us a call in dispatch,
``Library`` with ``register_autograd`` 36 us, this file 23 us (one thread, CPU, torch 2.13), and decoding calls the
step once per layer and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdacompile.lowering import pools
from kdacompile.ops.dispatch import (
    DispatchKey,
    DispatchKeySet,
    Kernel,
    below_version_counter,
    inside_function,
    needs_derivative,
    next_kernel,
    record,
)
from kdacompile.ops.dtensor import holds_dtensors, on_shards
from kdacompile.ops.errors import DoubleBackwardError, ForwardModeError
from kdacompile.ops.signature import OF_THE_OUTPUT, Signature

Kernels = Mapping[DispatchKey, Kernel]


class Differentiated(NamedTuple):
    """A functional op and the op that has its gradients."""

    op: Any
    backward_op: Any
    signature: Signature


class _Recorded(torch.autograd.Function):
    """Run an op below autograd and remember its inputs, and its results where they are wanted, for the backward op."""

    # forward and setup_context are separate because functorch (torch.func.grad, torch.func.vjp) needs them so.
    @staticmethod
    def forward(differentiated: Differentiated, options: dict[str, Any], *tensors: Tensor | None) -> Any:
        with inside_function():
            return differentiated.op(*tensors, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.differentiated, options, *tensors = inputs
        signature = ctx.differentiated.signature
        kept = [x for name, x in zip(signature.results, output, strict=True) if name in signature.kept]
        ctx.save_for_backward(*kept, *tensors)
        ctx.set_materialize_grads(False)  # an unused final state must not cost a backward pass over zeros
        if not any(ctx.needs_input_grad[3:]):  # the queries' alone, as after ``requires_grad`` of nothing else
            named = zip(signature.results, output, strict=True)
            ctx.mark_non_differentiable(*(x for name, x in named if name in signature.unqueried))
        ctx.options = {name: value for name, value in options.items() if name not in OF_THE_OUTPUT}

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ForwardModeError(op=ctx.differentiated.op.name())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, backward_op, signature = ctx.differentiated
        needed = ctx.needs_input_grad[2:]
        if signature.unqueried.issuperset(
            name for name, grad in zip(signature.results, grads, strict=True) if grad is not None
        ):
            needed = (False, *needed[1:])
        if all(grad is None for grad in grads):
            return (None,) * (2 + len(needed))
        wanted = list(needed[: signature.differentiable])
        gradients = iter(backward_op(*grads, *ctx.saved_tensors, wanted=wanted, **ctx.options))
        return (None, None, *(next(gradients) if want else None for want in needed))


class _Gradients(torch.autograd.Function):
    """Run a backward op whose result someone may differentiate again; that derivative is an error, never zero.

    ``once_differentiable`` does not do: it refuses only what comes in through the output gradients, and would drop the
    second derivative with respect to q, k, v, ... in silence.
    """

    @staticmethod
    def forward(backward_op: Any, options: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with inside_function():
            return tuple(backward_op(*tensors, **options))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.backward_op = inputs[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ForwardModeError(op=ctx.backward_op.name())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise DoubleBackwardError(op=ctx.backward_op.name())


def functional_autograd(differentiated: Differentiated, kernels: Kernels) -> Kernel:
    """The autograd kernel of a functional op."""
    op, signature = differentiated.op, differentiated.signature

    def autograd(keyset: DispatchKeySet, *tensors: Tensor | None, **options: Any) -> Any:
        differentiates = needs_derivative(tensors)
        kernel, below = (None, keyset) if differentiates else next_kernel(keyset, kernels)
        if kernel is None and holds_dtensors(tensors):
            return on_shards(op, signature, tensors, options)
        if differentiates:
            return record(_Recorded, differentiated, options, *tensors)
        with below_version_counter():
            return kernel(*tensors, **options) if kernel is not None else op.redispatch(below, *tensors, **options)

    return autograd


def inplace_autograd(op: Any, signature: Signature, count_and_run: Kernel, functional_op: Any) -> Kernel:
    """The autograd kernel of an op that overwrites an operand, which ``count_and_run`` does.

    Where a derivative is needed the call becomes the functional op and a ``copy_``, both of which autograd knows, and
    states of a pool are gathered before and put back after.
    """

    writes = signature.writes
    assert writes is not None

    def autograd(keyset: DispatchKeySet, *tensors: Any, **options: Any) -> Tensor:
        if not needs_derivative(tensors):
            return count_and_run(keyset, *tensors, **options)
        if holds_dtensors(tensors):
            return on_shards(op, signature, tensors, options)
        # The copy is what autograd saves: the state itself is about to change.
        state: Tensor = tensors[writes]
        *after, indices = tensors[writes + 1 :]
        if indices is None:
            o, new_state = functional_op(*tensors[:writes], state.clone(), *after, **options)
            state.copy_(new_state)
            return o
        signature.checked(tensors, options, symbolic=type(indices) is not Tensor)
        o, new_states = functional_op(*tensors[:writes], pools.gather(state, indices), *after, **options)
        state.copy_(pools.replaced(state, indices, new_states))
        return pools.blank(o, state, indices)

    return autograd


def inplace_version_bump(op: Any, signature: Signature, kernels: Kernels) -> Kernel:
    """Count the mutation of the operand that is written, then run the op below the version counter's key.

    Registered for that key as well: in inference mode autograd is off altogether, and a normal tensor still counts.
    """

    writes = signature.writes
    assert writes is not None

    def bump(keyset: DispatchKeySet, *tensors: Any, **options: Any) -> Tensor:
        kernel, below = next_kernel(keyset, kernels, mutates=True)
        if kernel is None and holds_dtensors(tensors):
            return on_shards(op, signature, tensors, options)  # the shard counts
        torch.autograd.graph.increment_version(tensors[writes])
        with below_version_counter():
            return kernel(*tensors, **options) if kernel is not None else op.redispatch(below, *tensors, **options)

    return bump


def backward_autograd(op: Any) -> Kernel:
    """The autograd kernel of a backward op: plain, unless the backward pass is itself recorded (``create_graph``)."""

    def autograd(keyset: DispatchKeySet, *tensors: Tensor | None, **options: Any) -> list[Tensor]:
        if needs_derivative(tensors):
            return list(record(_Gradients, op, options, *tensors))
        _, below = next_kernel(keyset, {})
        with below_version_counter():
            return op.redispatch(below, *tensors, **options)

    return autograd
