"""The semantic ops as torch library ops: schemas, and which function serves which dispatch key.

======================================  ==================================================================
``kdacompile::linear_attention``         a sequence, functional
``kdacompile::linear_attention_step``    one token, functional
``kdacompile::linear_attention_step_``   one token, the state is overwritten
``..._backward``                         the gradients of the two functional ops, as a list of the wanted
======================================  ==================================================================

The ops of MLA are in :mod:`kdacompile.ops.mla_definitions`.

Importing this module registers them. :func:`add_kernel` is how a device gets a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kdacompile.ops import autograd, fakes, kernels
from kdacompile.ops.dispatch import DispatchKey, Kernel, privateuse1_device
from kdacompile.ops.errors import VmapError

_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, {state}, Tensor? A_log, Tensor? dt_bias"
_FUNCTIONAL = _OPERANDS.format(state="Tensor? initial_state")
_INPLACE = _OPERANDS.format(state="Tensor(a!) state")
_OPTIONS = "float scale, bool delta, str gate, str gate_fn, float gate_scale, bool sigmoid_beta, float qk_l2norm_eps"
_GRADIENTS = "Tensor? grad_o, Tensor? grad_state"

_SCHEMAS = {
    "linear_attention": f"({_FUNCTIONAL}, Tensor? cu_seqlens, *, {_OPTIONS}, ScalarType? out_dtype, int chunk_size,"
    ' str o_layout="BTHV") -> (Tensor o, Tensor final_state)',
    "linear_attention_step": f"({_FUNCTIONAL}, *, {_OPTIONS}, ScalarType? out_dtype) -> (Tensor o, Tensor final_state)",
    "linear_attention_step_": f"({_INPLACE}, *, {_OPTIONS}, ScalarType? out_dtype) -> Tensor",
    "linear_attention_backward": f"({_GRADIENTS}, {_FUNCTIONAL}, Tensor? cu_seqlens, *, {_OPTIONS}, int chunk_size,"
    " bool[] wanted) -> Tensor[]",
    "linear_attention_step_backward": f"({_GRADIENTS}, {_FUNCTIONAL}, *, {_OPTIONS}, bool[] wanted) -> Tensor[]",
}

# The ops read inputs of any strides, so Inductor need not copy any into the strides eager mode would have had.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_AUTOCAST_KEYS = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastXPU": "xpu", "AutocastPrivateUse1": None}

_library = torch.library.Library("kdacompile", "DEF")
_kernels: dict[str, dict[DispatchKey, Kernel]] = {}


def add_kernel(name: str, device: str, kernel: Kernel) -> None:
    """Serve op ``name`` on a device's dispatch key ("CPU", "CUDA", "PrivateUse1") with ``kernel``.

    Kernels of ``linear_attention`` return o contiguous and know nothing of ``o_layout``.
    """
    if name == "linear_attention":
        kernel = kernels.in_layout(kernel)
    _library.impl(name, kernel, device)
    _kernels[name][getattr(DispatchKey, device)] = kernel


def define(name: str, schema: str, kernel: Kernel, fake: Kernel) -> Any:
    """Register a semantic op: its composite kernel, its fake, and what autocast and vmap make of it."""
    _library.define(name + schema, tags=_TAGS)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _kernels[name] = dict.fromkeys((DispatchKey.CPU, DispatchKey.CUDA), kernel)
    torch.library.register_fake(f"kdacompile::{name}", fake, lib=_library)
    op = getattr(torch.ops.kdacompile, name).default
    for key, device in _AUTOCAST_KEYS.items():
        _library.impl(name, _outside_autocast(op, device), key)
    _library.impl(name, _refuse_vmap(op), "FuncTorchBatched")
    return op


def _outside_autocast(op: Any, device: str | None) -> Kernel:
    """Autocast casts neither the op's inputs nor what it computes inside.

    The op's precision is part of its meaning: fp32 arithmetic at least, whatever dtypes come in. Without this kernel
    autocast would stay on inside it, and round the operands of every matrix product of the composite to 16 bits.
    """

    def autocast(*args: Any, **options: Any) -> Any:
        with torch.autocast(device or privateuse1_device(), enabled=False):
            return op(*args, **options)

    return autocast


def _refuse_vmap(op: Any) -> Kernel:
    def vmap(*args: Any, **options: Any) -> Any:
        raise VmapError(op=op.name())

    return vmap


def _linear_attention_op(name: str, kernel: Kernel, fake: Kernel) -> Any:
    return define(name, _SCHEMAS[name], kernel, fake)


linear_attention = _linear_attention_op(
    "linear_attention", kernels.in_layout(kernels.sequence_kernel), fakes.sequence_fake
)
linear_attention_step = _linear_attention_op("linear_attention_step", kernels.step_kernel, fakes.step_fake)
linear_attention_step_ = _linear_attention_op(
    "linear_attention_step_", kernels.inplace_step_kernel, fakes.inplace_step_fake
)
linear_attention_backward = _linear_attention_op(
    "linear_attention_backward", kernels.sequence_backward_kernel, fakes.backward_fake
)
linear_attention_step_backward = _linear_attention_op(
    "linear_attention_step_backward", kernels.step_backward_kernel, fakes.backward_fake
)


def register(name: str, kernel: Kernel, key: str = "Autograd") -> None:
    """Serve op ``name`` on a key above the backends; the kernel gets the call's key set first."""
    _library.impl(name, kernel, key, with_keyset=True)


def backend_kernels(name: str) -> Mapping[DispatchKey, Kernel]:
    """The kernels of op ``name`` by device, as :func:`add_kernel` leaves them."""
    return _kernels[name]


def _register_autograd() -> None:
    for op, backward_op in (
        (linear_attention, linear_attention_backward),
        (linear_attention_step, linear_attention_step_backward),
    ):
        name = op._opname
        register(name, autograd.functional_autograd(op, backward_op, _kernels[name]))
        register(backward_op._opname, autograd.backward_autograd(backward_op))
    inplace = linear_attention_step_
    name = inplace._opname
    register(name, autograd.inplace_autograd(inplace, linear_attention_step, _kernels[name]))
    register(name, autograd.inplace_version_bump(inplace, _kernels[name]), "ADInplaceOrView")


_register_autograd()
