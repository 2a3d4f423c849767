"""What the ops ask of the dispatcher to keep a call cheap."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from kdacompile.compat import no_saved_tensors_hooks
from kdacompile.compat.dispatcher import (
    DispatchKey,
    DispatchKeySet,
    SingleLevelFunction,
    after_autograd_keys,
    after_version_counter_keys,
    any_requires_grad,
    below_autograd,
    below_version_counter,
    enable_single_level_autograd_function,
    forward_mode_is_on,
    privateuse1_name,
    transforms_are_active,
    without_keys_excluded,
)

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

Kernel = Callable[..., Any]


def needs_derivative(tensors: tuple[Any, ...]) -> bool:
    """True if autograd must see this call. Inside forward-mode AD it always must, so that it can refuse."""
    return (torch.is_grad_enabled() and any_requires_grad(*tensors)) or forward_mode_is_on()


def record(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` from inside an autograd kernel.

    Under a functorch transform ``apply`` would hand over to an operator that has no kernel this far down. Torch's own
    operators record on the one level that is being processed, and so does this.
    """
    if not transforms_are_active():
        return function.apply(*args)
    single_level: Any = _single_level(function)
    with enable_single_level_autograd_function():
        return single_level.apply(*args)


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> type[SingleLevelFunction]:
    names = ("forward", "setup_context", "backward")
    return type(function.__name__, (SingleLevelFunction,), {n: staticmethod(getattr(function, n)) for n in names})


@contextlib.contextmanager
def inside_function() -> Generator[None]:
    """The context of the op that a recorded function calls: below autograd, on this level.

    A function's forward runs with grad mode off. Under nested functorch transforms that would reach the levels further
    out, which would then take the result for a constant.
    """
    with torch.set_grad_enabled(transforms_are_active()), below_autograd():
        yield


def next_kernel(
    keyset: DispatchKeySet, kernels: Mapping[DispatchKey, Kernel], *, mutates: bool = False
) -> tuple[Kernel | None, DispatchKeySet]:
    """The kernel below autograd if it is one of ours, and the keys below autograd for a redispatch if it is not.

    A redispatch from Python converts every argument to C++ and back, some 13 us for the eighteen arguments of a step.
    The key set says what the dispatcher would find: a plain backend key means that no mode, subclass or functorch level
    stands between, and then the kernel may be called as a function.
    """
    below = keyset & (after_version_counter_keys if mutates else after_autograd_keys)
    return kernels.get(below.highestPriorityTypeId()), below


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


@contextlib.contextmanager
def differentiation() -> Generator[None]:
    """A context in which ``torch.func.vjp`` works wherever a kernel was called from.

    Hooks for saved tensors, as of ``torch.autograd.graph.save_on_cpu``, are for what the caller's graph saves: not for
    what is computed here, and torch.func refuses to work under them.
    """
    with no_saved_tensors_hooks(), without_keys_excluded(_DIFFERENTIATION_KEYS):
        yield


def privateuse1_device() -> str:
    """The device type of the out-of-tree backend, "npu" where torch_npu is loaded."""
    return privateuse1_name()
