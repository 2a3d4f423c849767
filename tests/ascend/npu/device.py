"""A device of type "npu" in Python: memory of this CPU under torch's key for out-of-tree devices, as torch_npu's is.

torch dispatches to it, differentiates, traces and compiles for it as for any device. Its operators are the CPU's on the
same memory; its kernels are launched by whatever :data:`npu` is given. What a captured graph of the device may not do,
wait for the host, is an error while one is captured, and the graph can be replayed.

A process has one such backend and cannot lose it again: import this in a process of its own.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_VIEWS = {f"aten::{name}" for name in ("as_strided", "view", "_reshape_alias", "unfold", "alias")}
_ALLOCATES = {"aten::empty", "aten::empty_strided"}
_memory: dict[int, torch.UntypedStorage] = {}  # of the device, by address: never given back


class HostWaitError(RuntimeError):
    """The host asks for something that the device has not computed yet, while a graph is captured."""


@dataclass
class Npu:
    """What happened on the device: operators by name, and what a graph replays."""

    operators: list[str] = field(default_factory=list[str])
    captured: list[Callable[[], None]] | None = None

    def does(self, work: Callable[[], Any]) -> Any:
        """Work of the device, done at once, and again by whoever replays it."""
        if self.captured is not None:
            self.captured.append(work)
        return work()

    def host_waits(self, what: str) -> None:
        if self.captured is not None:
            raise HostWaitError(what)

    @contextmanager
    def capture(self) -> Generator[list[Callable[[], None]]]:
        """Everything the device does, to be called again in this order."""
        self.captured = steps = []
        try:
            yield steps
        finally:
            self.captured = None


npu = Npu()


def _place(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """The same memory, as another device's."""
    construct: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore[reportAttributeAccessIssue]
    return construct(storage.data_ptr(), device, storage.nbytes())


def _point(x: Tensor, at: Tensor) -> Tensor:
    """``x``, of the device, on the memory of a CPU tensor."""
    storage = at.untyped_storage()
    _memory[storage.data_ptr()] = storage
    place = _place(storage, torch.device("npu", 0))
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _ON_CPU, x, place, at.storage_offset(), at.size(), at.stride()
    )
    return x


def on_npu(x: Tensor) -> Tensor:
    """A CPU tensor's memory, as the device's."""
    return _point(torch._C._acc.create_empty_tensor((0,), x.dtype), x)  # pyright: ignore[reportAttributeAccessIssue]


def on_cpu(x: Tensor) -> Tensor:
    """The memory of a tensor of the device, as the CPU's."""
    place = _place(x.untyped_storage(), torch.device("cpu"))
    return torch.empty(0, dtype=x.dtype).set_(place, x.storage_offset(), x.size(), x.stride())


def is_here(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == "npu"


def _operator(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: the CPU's on the same memory."""
    name = op._schema.name
    if name in _VIEWS:
        return op.redispatch(_ON_CPU, *args, **kwargs)
    npu.operators.append(name)
    given: list[tuple[Tensor, Tensor]] = []

    def lowered(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not is_here(x):
            return x
        given.append((on_cpu(x) if x.numel() else torch.empty(x.shape, dtype=x.dtype), x))
        return given[-1][0]

    arguments, named = tree_map(lowered, (args, kwargs))
    found = op(*arguments, **named)
    if any(not isinstance(x, Tensor) for x in tree_leaves(found) if x is not None):
        npu.host_waits(name)
    results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
    if npu.captured is not None and name not in _ALLOCATES:

        def again() -> None:
            fresh = [x for x in tree_leaves(op(*arguments, **named)) if isinstance(x, Tensor)]
            for x, now in zip(results, fresh, strict=True):
                if x is not now:
                    x.copy_(now)

        npu.captured.append(again)

    def raised(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        own = next((mine for theirs, mine in given if theirs is x), None)
        if own is None:
            return on_npu(x)
        return own if own.shape == x.shape else _point(own, x)  # an operator may give its result the shape

    return tree_map(raised, found)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not (is_here(source) and is_here(target)):
        npu.host_waits("a copy between host and device")
    npu.operators.append("aten::copy_")
    given, taken = (on_cpu(x) if is_here(x) else x for x in (source, target))
    npu.does(lambda: taken.copy_(given))
    return target


class _Module(backend_registration._DummyBackendModule):
    """torch.npu, as far as it is asked."""

    name = "Ascend910B3"

    def get_device_name(self, device: object = None) -> str:
        return self.name

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def install() -> torch.device:
    """Register the backend, once; returns its device."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend("npu", _Module())
        anything = torch.library.Library("_", "IMPL")
        anything.fallback(_operator, "PrivateUse1")
        copies = torch.library.Library("aten", "IMPL")
        copies.impl("_copy_from", _copy, "PrivateUse1")
        _libraries.extend((anything, copies))
    return torch.device("npu", 0)


_libraries: list[torch.library.Library] = []
