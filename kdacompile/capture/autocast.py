"""Functions called under autocast: what they compute is proven without it, then compared under it.

Autocast rounds the operands of products to 16 bits and changes nothing else of what a function means. So the recurrence
is recognised, and compared to the last digits, with autocast off. What is left to see under it is the dtypes of
results, which follow from products, and that nothing was decided by a dtype.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kdacompile.compat.operators import tree_leaves, tree_map_only

Autocast = tuple[tuple[str, torch.dtype], ...]
"""The devices autocast is on for, and what it casts to there."""

_PRODUCTS = frozenset(
    "matmul __matmul__ __rmatmul__ mm bmm mv dot vdot tensordot einsum linear addmm addmv addbmm baddbmm".split()
)
"""What autocast gives operands of one dtype, and what refuses operands of two without it."""


def ambient(devices: Iterable[str]) -> Autocast:
    """The autocast that calls on these devices are under."""
    possible = filter(torch.amp.is_autocast_available, sorted(set(devices)))
    return tuple((device, torch.get_autocast_dtype(device)) for device in possible if torch.is_autocast_enabled(device))


@contextlib.contextmanager
def off(autocast: Autocast) -> Generator[None]:
    """Without this autocast."""
    with contextlib.ExitStack() as stack:
        for device, _ in autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def widening(autocast: Autocast) -> contextlib.AbstractContextManager[Any]:
    """Products of two dtypes in the wider one: they are allowed under this autocast, so they have to be without it."""
    return _Widening() if autocast else contextlib.nullcontext()


@contextlib.contextmanager
def uncached(autocast: Autocast) -> Generator[None]:
    """Under this autocast, which is on already, but with no cast kept for the program that is being captured."""
    with contextlib.ExitStack() as stack:
        for device, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        yield


class _Widening(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _PRODUCTS:
            return func(*args, **kwargs)
        found = {x.dtype for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()}
        if len(found) < 2:
            return func(*args, **kwargs)
        wide = functools.reduce(torch.promote_types, found)
        args, kwargs = tree_map_only(Tensor, lambda x: x.to(wide) if x.is_floating_point() else x, (args, kwargs))
        return func(*args, **kwargs)
