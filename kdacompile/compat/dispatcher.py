"""The dispatcher's keys, key sets and guards, for operators whose kernels call each other cheaply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.autograd_function
import torch.autograd.function
from torch._C._autograd import _profiler_enabled
from torch._C._dynamo import guards
from torch._C._functorch import is_functorch_wrapped_tensor as _is_functorch_wrapped_tensor
from torch.autograd import forward_ad

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
after_autograd_keys = torch._C._after_autograd_keyset
after_version_counter_keys = torch._C._after_ADInplaceOrView_keyset
any_requires_grad = torch._C._any_requires_grad
below_version_counter = torch._C._AutoDispatchBelowADInplaceOrView
enable_single_level_autograd_function = torch._functorch.autograd_function.enable_single_level_autograd_function
function_modes = torch._C._len_torch_function_stack
is_functorch_wrapped_tensor = _is_functorch_wrapped_tensor
privateuse1_name = torch._C._get_privateuse1_backend_name
profiler_is_on = _profiler_enabled
transforms_are_active = torch._C._are_functorch_transforms_active
_local_include = torch._C._dispatch_tls_local_include_set
_local_exclude = torch._C._dispatch_tls_local_exclude_set


def forward_mode_is_on() -> bool:
    return forward_ad._current_level >= 0


def forward_mode_switched_on() -> contextlib.AbstractContextManager[Any]:
    """A context in which tangents are followed, where a function's forward has switched that off."""
    return forward_ad._set_fwd_grad_enabled(True)


def count_write(x: torch.Tensor) -> None:
    """As ``torch.autograd.graph.increment_version``."""
    torch._C._increment_version((x,))


def without_keys_excluded(keys: tuple[DispatchKey, ...]) -> Any:
    """A context in which ``keys`` are not switched off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def call_instead(op: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``op(...)`` be ``call(...)``; what it was before, which goes through the dispatcher."""
    dispatched: Callable[..., Any] = op._op
    op._op = call
    return dispatched


def keep_calls_apart(op: Any) -> None:
    """Have AOTAutograd leave equal calls of an operator as they are, where it would make one of them.

    What is returned of two such calls would be one tensor: a write to one reaches the other, and where one was made
    without gradients both lose theirs. Torch spares operators with one result, and does not look into tuples.
    """
    from torch._functorch import compile_utils  # with all of torch.fx behind it

    if op.overloadpacket not in compile_utils.rand_ops:
        compile_utils.rand_ops.append(op.overloadpacket)


def dispatch_state() -> tuple[int, int]:
    """The keys that this thread adds to a call's, modes and autocast among them, and those it leaves out, as bits."""
    return _local_include().raw_repr(), _local_exclude().raw_repr()


def likeness(*tensors: torch.Tensor, free: Sequence[int | None] = ()) -> Callable[..., bool]:
    """Whether as many tensors are of the same classes, keys, dtypes, devices, shapes and strides as these, and need
    gradients alike; the keys with those that the thread adds and leaves out. One tensor twice is like nothing.

    ``free``: for each tensor the dimension whose size may be another, and then its strides as well, or None.
    """
    sizes: Any = None
    strides: Any = None
    if any(at is not None for at in free):
        pairs = list(zip(tensors, free, strict=True))
        sizes = [[None if number == at else size for number, size in enumerate(x.shape)] for x, at in pairs]
        strides = [list(x.stride()) if at is None else [None] * x.dim() for x, at in pairs]
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def backend_key(x: torch.Tensor) -> DispatchKey | None:
    """The key of the kernel that a call with tensors like ``x`` comes to, if autograd's are all it passes before."""
    keys = (torch._C._dispatch_keys(x) | _local_include()) - _local_exclude()
    backend = (keys & after_version_counter_keys).remove(DispatchKey.BackendSelect).highestPriorityTypeId()
    autograd = getattr(DispatchKey, f"Autograd{backend.name}", None)
    passed = (autograd, DispatchKey.ADInplaceOrView, DispatchKey.BackendSelect, backend)
    return backend if keys.highestPriorityTypeId() in passed else None
