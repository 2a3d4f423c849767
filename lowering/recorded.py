"""Calls remembered by what decided them: another of the kind allocates its buffers and launches, and nothing else.

Choosing kernels, tiles and grids, naming arguments and finding the compiled kernel takes the host ten times what
launching does, and depends only on the operands' shapes, strides, dtypes, devices and alignment, and on the options.
So the first call of a kind runs with a :class:`Recorder` as its scratch memory, which keeps what was launched, and of
every address where it lies: in an operand, or in a buffer of the call's own. :class:`Recorded` does it again for other
operands. No value is read and no tensor kept; streams, CUDA graphs and threads see what any call would launch.

An implementation can be remembered if all it allocates, launches and has torch do goes through its scratch memory; one
that does more says :meth:`~kdacompile.lowering.scratch.Scratch.once`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .scratch import Scratch

Operands = Sequence[Tensor | None]
Results = tuple[Tensor, ...]

ALIGNED = 16
"""Bytes: whether an address is a multiple of these is all that kernels are compiled differently for."""
APART = 256  # bytes: buffers that share an allocation begin at multiples
MOST = 4096  # calls that are remembered; beyond that, the oldest is forgotten


class Address:
    """What Triton asks a tensor for."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def data_ptr(self) -> int:
        return self.value


@dataclass(frozen=True)
class Place:
    """``offset`` bytes into ``source``: operands are counted first, then buffers. ``at``: of the argument it is for."""

    at: int
    source: int
    offset: int


@dataclass(frozen=True)
class Launch:
    """A compiled kernel on its grid; ``pointers`` are arguments that are addresses, ``descriptors`` have one."""

    run: Callable[..., object]
    arguments: tuple[Any, ...]
    pointers: tuple[Place, ...]
    descriptors: tuple[Place, ...]

    def __call__(self, addresses: Sequence[int], tensors: Operands) -> None:
        arguments = list(self.arguments)
        for place in self.pointers:
            arguments[place.at] = addresses[place.source] + place.offset
        for place in self.descriptors:
            address = Address(addresses[place.source] + place.offset)
            arguments[place.at] = _based(arguments[place.at], address)
        self.run(*arguments)


@dataclass(frozen=True)
class View:
    """Of the source's elements, those from ``offset`` on; ``at``: the argument it is for."""

    at: int
    source: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Apply:
    """A function of torch that writes into one of its tensors."""

    run: Callable[..., object]
    arguments: tuple[Any, ...]
    views: tuple[View, ...]

    def __call__(self, addresses: Sequence[int], tensors: Operands) -> None:
        arguments = list(self.arguments)
        for view in self.views:
            source = tensors[view.source]
            assert source is not None
            arguments[view.at] = source.as_strided(view.shape, view.strides, source.storage_offset() + view.offset)
        self.run(*arguments)


@dataclass(frozen=True)
class Buffer:
    """``begin``: where it lies in the allocation that buffers share; None for one of its own."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int | None


@dataclass(frozen=True)
class Recorded:
    """What a call does. ``shared``: bytes of the allocation that buffers share; ``results``: numbers of sources."""

    device: torch.device
    buffers: tuple[Buffer, ...]
    shared: int
    steps: tuple[Launch | Apply, ...]
    results: tuple[int, ...]

    def __call__(self, operands: Operands, addresses: Sequence[int]) -> Results:
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return self._run(operands, addresses)
        with torch.cuda.device(self.device):
            return self._run(operands, addresses)

    def _run(self, operands: Operands, addresses: Sequence[int]) -> Results:
        device, sources, places = self.device, list(operands), list(addresses)
        shared = torch.empty(self.shared, dtype=torch.uint8, device=device) if self.shared else None
        begin = 0 if shared is None else shared.data_ptr()
        for buffer in self.buffers:
            own = None if buffer.begin is not None else torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            sources.append(own)
            places.append(begin + (buffer.begin or 0) if own is None else own.data_ptr())
        for step in self.steps:
            step(places, sources)
        return tuple(sources[number] for number in self.results)  # pyright: ignore[reportReturnType]


class Recorder(Scratch):
    """Runs a call and notes what it does; ``operands`` have different addresses."""

    def __init__(self, operands: Operands) -> None:
        super().__init__()
        self._operands = operands
        self._buffers: list[Tensor] = []  # held until the end, so that no two have had the same address
        self._steps: list[Launch | Apply] = []
        self._known = True

    def result(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._buffers.append(super().result(shape, dtype, device))
        return self._buffers[-1]

    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        return functools.partial(self._launch, kernel, grid)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        compiled = kernel[grid](*args, **named)
        if compiled is None:  # Triton's interpreter
            self.once()
            return
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        values = [given[name] for name in kernel.arg_names]
        pointers = [self._place(at, x) for at, x in enumerate(values) if isinstance(x, Tensor)]
        descriptors = [self._place(at, x.base) for at, x in enumerate(values) if _is_descriptor(x)]
        kept = (None if isinstance(x, Tensor) else _based(x, None) if _is_descriptor(x) else x for x in values)
        whole = (*grid, 1, 1)[:3]
        self._steps.append(Launch(compiled[whole], tuple(kept), tuple(pointers), tuple(descriptors)))

    def apply(self, function: Callable[..., object], *args: Any) -> None:
        function(*args)
        views = [self._view(at, x) for at, x in enumerate(args) if isinstance(x, Tensor)]
        kept = (None if isinstance(x, Tensor) else x for x in args)
        self._steps.append(Apply(function, tuple(kept), tuple(views)))

    def once(self) -> None:
        self._known = False

    def recorded(self, results: Results) -> Recorded | None:
        """The call for other operands; None if it did what was not seen here."""
        sources = [*self._operands, *self._buffers]
        numbers = [next((n for n, x in enumerate(sources) if x is result), None) for result in results]
        if not self._known or None in numbers:
            return None
        taken = {view.source for step in self._steps if isinstance(step, Apply) for view in step.views}
        taken.update(number for number in numbers if number is not None)
        buffers: list[Buffer] = []
        end = 0
        for number, x in enumerate(self._buffers, len(self._operands)):
            buffers.append(Buffer(tuple(x.shape), x.dtype, None if number in taken else end))
            end += 0 if number in taken else -(-x.nbytes // APART) * APART
        return Recorded(
            self._device(), tuple(buffers), end, tuple(self._steps), tuple(n for n in numbers if n is not None)
        )

    def _device(self) -> torch.device:
        return next(x.device for x in self._operands if x is not None)

    def _place(self, at: int, x: Tensor) -> Place:
        """Of an address: the operand's that begins there, or the buffer's that has it inside."""
        address = x.data_ptr()
        for number, operand in enumerate(self._operands):
            if operand is not None and operand.data_ptr() == address:
                return Place(at, number, 0)
        for number, buffer in enumerate(self._buffers, len(self._operands)):
            if 0 <= address - buffer.data_ptr() < max(1, buffer.nbytes):
                return Place(at, number, address - buffer.data_ptr())
        self.once()
        return Place(at, 0, 0)

    def _view(self, at: int, x: Tensor) -> View:
        place = self._place(at, x)
        source = [*self._operands, *self._buffers][place.source]
        if source is None or source.dtype is not x.dtype:
            self.once()
        return View(at, place.source, place.offset // x.element_size(), tuple(x.shape), x.stride())


class Memory:
    """Calls of one kind of operator, by everything that decides what they launch."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, Recorded | None] = {}
        self._lock = threading.Lock()

    def run(self, options: Hashable, operands: Operands, call: Callable[[Scratch], Results]) -> Results:
        """``call``, or what it did the last time for operands like these. ``options``: all else that it depends on."""
        key, addresses = _signature(options, operands)
        recorded = self._recorded.get(key)
        if recorded is not None:
            return recorded(operands, addresses)
        given = [address for x, address in zip(operands, addresses, strict=True) if x is not None]
        if key in self._recorded or len(set(given)) < len(given):  # it cannot be told whose an address is
            return call(Scratch())
        recorder = Recorder(operands)
        results = call(recorder)
        with self._lock:
            if len(self._recorded) >= MOST:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = recorder.recorded(results)
        return results


def _signature(options: Hashable, operands: Operands) -> tuple[Hashable, list[int]]:
    """What decides a call's launches, and the operands' addresses."""
    key: list[Hashable] = [options]
    addresses: list[int] = []
    for x in operands:
        if x is None:
            key.append(None)
            addresses.append(0)
            continue
        address = x.data_ptr()
        key += (x.shape, x.stride(), x.dtype, x.device, address % ALIGNED == 0)
        addresses.append(address)
    return tuple(key), addresses


def _is_descriptor(x: object) -> bool:
    return hasattr(x, "block_shape")


def _based(descriptor: Any, base: Address | None) -> Any:
    """A descriptor of the same layout elsewhere; its class would check once more what does not change."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = base
    return moved
