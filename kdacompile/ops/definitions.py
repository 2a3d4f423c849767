"""The semantic ops as torch library ops: schemas, and which function serves which dispatch key.

======================================  ==================================================================
``kdacompile::linear_attention``         a sequence, functional
``kdacompile::linear_attention_step``    one token, functional
``kdacompile::linear_attention_step_``   one token, the state is overwritten
``mla``                                  latent attention: prefill and decoding, contiguous and paged caches
``mla_schedule``                         how its kernels share out requests of different lengths
``..._backward``                         the gradients of a functional op, as a list of the wanted
======================================  ==================================================================

Importing this module registers them. :func:`add_kernel` is how a device gets a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdacompile.compat.dispatcher import DispatchKey, keep_calls_apart, privateuse1_name
from kdacompile.lowering.calls import Call
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops import autograd, kernels, mla_cut
from kdacompile.ops.checks import check_layout
from kdacompile.ops.dispatch import Kernel, Known, Shortcut
from kdacompile.ops.errors import VmapError
from kdacompile.ops.signature import (
    LINEAR_ATTENTION,
    LINEAR_ATTENTION_STEP,
    LINEAR_ATTENTION_STEP_,
    MLA,
    O_DIMENSIONS,
    Signature,
)

# The ops read inputs of any strides, so Inductor need not copy any into the strides eager mode would have had.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_AUTOCAST_KEYS = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastXPU": "xpu", "AutocastPrivateUse1": None}

_library = torch.library.Library("kdacompile", "DEF")
_kernels: dict[str, dict[DispatchKey, Kernel]] = {}
_shortcuts: dict[str, Shortcut] = {}


def add_kernel(name: str, device: str, kernel: Kernel, known: Known | None = None) -> None:
    """Serve op ``name`` on a device's dispatch key ("CPU", "CUDA", "PrivateUse1") with ``kernel``.

    Kernels of ``linear_attention`` return o contiguous and know nothing of ``o_layout``. ``known``: what the kernel
    remembers of a call, as :class:`~kdacompile.ops.dispatch.Shortcut` asks for it.
    """
    if name == LINEAR_ATTENTION.name:
        kernel = kernels.in_layout(kernel)
    if known is not None:
        _shortcuts[name].known[kernel] = known
    _library.impl(name, kernel, device)
    _kernels[name][getattr(DispatchKey, device)] = kernel


def _register(name: str, key: str, kernel: Kernel) -> None:
    """Serve op ``name`` on a key above the backends; the kernel gets the call's key set first."""
    _library.impl(name, kernel, key, with_keyset=True)


def _define(name: str, schema: str, kernel: Kernel, fake: Kernel) -> Any:
    """Register a semantic op: its composite kernel, its fake, and what autocast and vmap make of it."""
    _library.define(name + schema, tags=_TAGS)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _kernels[name] = dict.fromkeys((DispatchKey.CPU, DispatchKey.CUDA), kernel)
    torch.library.register_fake(f"kdacompile::{name}", fake, lib=_library)
    op = getattr(torch.ops.kdacompile, name).default
    keep_calls_apart(op)
    for key, device in _AUTOCAST_KEYS.items():
        _library.impl(name, _outside_autocast(op, device), key)
    _library.impl(name, _refuse_vmap(op), "FuncTorchBatched")
    return op


def _forward(signature: Signature, run: Callable[[Any], Any]) -> Any:
    kernel = kernels.kernel_of(signature, run)
    kernel = kernels.in_layout(kernel) if signature.o_layout else kernel
    op = _define(signature.name, signature.schema, kernel, fake_of(signature))
    options = {**signature.options, **({"o_layout": "str"} if signature.o_layout else {})}
    optional = [operand.optional for operand in signature.operands]
    _shortcuts[signature.name] = Shortcut(op, _kernels[signature.name], optional, options, signature.writes)
    return op


def functional(signature: Signature, run: Callable[[Any], Any], backward: Kernel) -> Any:
    """A functional op and its backward op, as autograd knows them."""
    name, backward_name = signature.name, signature.backward_name
    op = _forward(signature, run)
    backward_op = _define(backward_name, signature.backward_schema, backward, backward_fake_of(signature))
    differentiated = autograd.Differentiated(op, backward_op, signature)
    _register(name, "Autograd", autograd.functional_autograd(differentiated, _kernels[name]))
    _register(backward_name, "Autograd", autograd.backward_autograd(backward_op))
    return op


def _in_place(signature: Signature, run: Callable[[Any], Any], functional_op: Any) -> Any:
    """An op that overwrites an operand, over the functional one where a derivative is needed."""
    op, name = _forward(signature, run), signature.name
    bump = autograd.inplace_version_bump(op, signature, _kernels[name])
    _register(name, "ADInplaceOrView", bump)
    _register(name, "Autograd", autograd.inplace_autograd(op, signature, bump, functional_op))
    return op


def _outside_autocast(op: Any, device: str | None) -> Kernel:
    """Autocast casts neither the op's inputs nor what it computes inside.

    The op's precision is part of its meaning: fp32 arithmetic at least, whatever dtypes come in. Without this kernel
    autocast would stay on inside it, and round the operands of every matrix product of the composite to 16 bits.
    """

    def autocast(*args: Any, **options: Any) -> Any:
        with torch.autocast(device or privateuse1_name(), enabled=False):  # "npu" where torch_npu is loaded
            return op(*args, **options)

    return autocast


def _refuse_vmap(op: Any) -> Kernel:
    def vmap(*args: Any, **options: Any) -> Any:
        raise VmapError(op=op.name())

    return vmap


# -- fakes ------------------------------------------------------------------------------------------------------------


def fake_of(signature: Signature) -> Kernel:
    """The fake of an op."""

    def fake(*tensors: Tensor | None, o_layout: str = O_DIMENSIONS, **options: Any) -> Any:
        call: Call | Attention = signature.checked(tensors, options, symbolic=True)
        check_layout(o_layout)
        (shape, dtype), *others = call.results
        o = _empty_o(call.q, shape, dtype, o_layout)
        return (
            (o, *(call.q.new_empty(shape, dtype=dtype) for shape, dtype in others)) if len(signature.results) > 1 else o
        )

    return fake


def backward_fake_of(signature: Signature) -> Kernel:
    """The fake of its backward op: one contiguous gradient for each wanted operand."""

    def fake(*tensors: Tensor | None, wanted: list[bool], **options: Any) -> list[Tensor]:
        inputs = signature.of_backward(tensors)[1]
        return [x.new_empty(x.shape) for x, want in zip(inputs, wanted, strict=False) if want and x is not None]

    return fake


def _empty_o(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, o_layout: str) -> Tensor:
    if o_layout == O_DIMENSIONS:
        return like.new_empty(shape, dtype=dtype)
    order = [O_DIMENSIONS.index(letter) for letter in o_layout]
    o = like.new_empty([shape[i] for i in order], dtype=dtype)
    return o.permute([o_layout.index(letter) for letter in O_DIMENSIONS])


linear_attention = functional(LINEAR_ATTENTION, kernels.run_sequence, kernels.backward_kernel_of(LINEAR_ATTENTION))
linear_attention_step = functional(
    LINEAR_ATTENTION_STEP, kernels.run_step, kernels.backward_kernel_of(LINEAR_ATTENTION_STEP)
)
linear_attention_step_ = _in_place(LINEAR_ATTENTION_STEP_, kernels.run_inplace_step, linear_attention_step)
mla = functional(MLA, kernels.run_mla, kernels.mla_backward_kernel)
mla_schedule = _define(mla_cut.NAME, mla_cut.SCHEMA, mla_cut.composite, mla_cut.fake)
