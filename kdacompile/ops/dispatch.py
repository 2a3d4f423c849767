"""Torch-private names the ops need to keep a call cheap (torch 2.11 to 2.14).

They would belong in :mod:`kdacompile.compat`; that module imports Inductor, which a program that only calls the ops in
eager mode should not pay for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _after_ADInplaceOrView_keyset,
    _after_autograd_keyset,
    _any_requires_grad,
    _AutoDispatchBelowADInplaceOrView,
    _AutoDispatchBelowAutograd,
)
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

__all__ = [
    "DispatchKey",
    "DispatchKeySet",
    "below_autograd",
    "below_version_counter",
    "differentiation",
    "inside_function",
    "needs_derivative",
    "next_kernel",
    "privateuse1_device",
    "record",
]

below_autograd = _AutoDispatchBelowAutograd

Kernel = Callable[..., Any]


def needs_derivative(tensors: tuple[Any, ...]) -> bool:
    """True if autograd must see this call. Inside forward-mode AD it always must, so that it can refuse."""
    return (torch.is_grad_enabled() and _any_requires_grad(*tensors)) or forward_ad._current_level >= 0


def record(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` from inside an autograd kernel.

    Under a functorch transform ``apply`` would hand over to an operator that has no kernel this far down. Torch's own
    operators record on the one level that is being processed, and so does this.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    single_level: Any = _single_level(function)
    with enable_single_level_autograd_function():
        return single_level.apply(*args)


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> type[_SingleLevelFunction]:
    names = ("forward", "setup_context", "backward")
    return type(function.__name__, (_SingleLevelFunction,), {n: staticmethod(getattr(function, n)) for n in names})


@contextlib.contextmanager
def inside_function() -> Generator[None]:
    """The context of the op that a recorded function calls: below autograd, on this level.

    A function's forward runs with grad mode off. Under nested functorch transforms that would reach the levels further
    out, which would then take the result for a constant.
    """
    with torch.set_grad_enabled(torch._C._are_functorch_transforms_active()), below_autograd():
        yield


def next_kernel(
    keyset: DispatchKeySet, kernels: Mapping[DispatchKey, Kernel], *, mutates: bool = False
) -> tuple[Kernel | None, DispatchKeySet]:
    """The kernel below autograd if it is one of ours, and the keys below autograd for a redispatch if it is not.

    A redispatch from Python converts every argument to C++ and back, some 13 us for the eighteen arguments of a step.
    The key set says what the dispatcher would find: a plain backend key means that no mode, subclass or functorch level
    stands between, and then the kernel may be called as a function.
    """
    below = keyset & (_after_ADInplaceOrView_keyset if mutates else _after_autograd_keyset)
    return kernels.get(below.highestPriorityTypeId()), below


def below_version_counter() -> Any:
    """A context in which an in-place op neither records autograd history nor bumps version counters."""
    return _AutoDispatchBelowADInplaceOrView()


# What a torch_dispatch handler (a mode such as FlopCounterMode, a subclass such as DTensor) switches off around the ops
# it calls, and differentiation by functorch needs.
_DIFFERENTIATION_KEYS = (
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradNestedTensor,
    DispatchKey.ADInplaceOrView,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchGradWrapper,
)


def differentiation() -> Any:
    """A context in which ``torch.func.vjp`` works wherever a kernel was called from."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _DIFFERENTIATION_KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def privateuse1_device() -> str:
    """The device type of the out-of-tree backend, "npu" where torch_npu is loaded."""
    return torch._C._get_privateuse1_backend_name()
