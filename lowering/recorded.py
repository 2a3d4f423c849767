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
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kdacompile.compat.launches import current_device, empty_strided, launch, launch_stream

from .replay import Described, Place, Program, program_of
from .scratch import Scratch, shares_memory

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


Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset, in elements."""


class Launch(NamedTuple):
    """A compiled kernel on its grid. ``descriptors``: the places of addresses that stand in a descriptor."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    pointers: tuple[Place, ...]
    descriptors: tuple[Place, ...]

    def run(self, addresses: Sequence[int], sources: Operands, stream: int | None) -> None:
        launch(self.kernel, self.grid, self._on(addresses), stream)

    def described(self, addresses: Sequence[int]) -> Described:
        """The launch on these addresses, as a program is made of it."""
        return self.kernel, self.grid, self._on(addresses), (*self.pointers, *self.descriptors)

    def _on(self, addresses: Sequence[int]) -> list[Any]:
        arguments = list(self.arguments)
        for at, source, before in self.pointers:
            arguments[at] = addresses[source] + before
        for at, source, before in self.descriptors:
            arguments[at] = _based(arguments[at], Address(addresses[source] + before))
        return arguments


class Apply(NamedTuple):
    """A function of torch that writes into its tensors; ``views``: position, source and, for a part, its layout."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    views: tuple[tuple[int, int, Layout | None], ...]

    def run(self, addresses: Sequence[int], sources: Operands, stream: int | None) -> None:
        arguments = list(self.arguments)
        for at, number, layout in self.views:
            source = sources[number]
            if layout is not None and source is not None:
                shape, strides, before = layout
                source = source.as_strided(shape, strides, source.storage_offset() + before)
            arguments[at] = source
        self.function(*arguments)


class Buffer(NamedTuple):
    """An allocation of its own, or the bytes from ``begin`` of the one that buffers share."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    begin: int | None


@dataclass
class Recorded:
    """What a call does. ``shared``: bytes of the allocation that buffers share; ``results``: numbers of sources."""

    device: torch.device
    buffers: tuple[Buffer, ...]
    shared: int
    steps: tuple[Launch | Apply, ...]
    results: tuple[int, ...]
    in_programs: tuple[Launch | Apply | Program, ...] | None = field(default=None, compare=False)
    """The steps with runs of launches as programs, from the first time that nobody is to be told of launches."""

    @property
    def alignment(self) -> int:
        return ALIGNED

    @property
    def free(self) -> Mapping[int, int]:
        """Operands that may be of other sizes: none."""
        return {}

    @property
    def uses_torch(self) -> bool:
        """Whether functions of torch are among the steps."""
        return any(isinstance(step, Apply) for step in self.steps)

    def fits(self, operands: Operands) -> bool:
        return True

    def run(self, operands: Operands, addresses: Sequence[int]) -> Results:
        if self.device.type != "cuda" or current_device() == self.device.index:
            return self._run(operands, addresses)
        with torch.cuda.device(self.device):
            return self._run(operands, addresses)

    def _run(self, operands: Operands, addresses: Sequence[int]) -> Results:
        device, sources, places = self.device, list(operands), list(addresses)
        empty = empty_strided[device.type]
        shared = empty((self.shared,), (1,), torch.uint8) if self.shared else None
        first = 0 if shared is None else shared.data_ptr()
        for shape, strides, dtype, begin in self.buffers:
            own = empty(shape, strides, dtype) if begin is None else None
            sources.append(own)
            places.append(first + (begin or 0) if own is None else own.data_ptr())
        stream = launch_stream(device)
        if stream is None:
            for step in self.steps:
                step.run(places, sources, stream)
        else:
            if self.in_programs is None:
                self.in_programs = tuple(_programs(self.steps, places))
            for step in self.in_programs:
                if isinstance(step, Program):
                    step.run(places, stream)
                else:
                    step.run(places, sources, stream)
        return tuple(sources[number] for number in self.results)  # pyright: ignore[reportReturnType]


def _programs(steps: Iterable[Launch | Apply], addresses: Sequence[int]) -> Iterator[Launch | Apply | Program]:
    """The steps, runs of launches as one program each where they can be."""
    for launches, run in itertools.groupby(steps, key=lambda step: isinstance(step, Launch)):
        some = list(run)
        program = None
        if launches:
            program = program_of([step.described(addresses) for step in some if isinstance(step, Launch)])
        yield from some if program is None else [program]


class Recorder(Scratch):
    """Runs a call and notes what it does; ``operands`` have different addresses."""

    def __init__(self, operands: Operands) -> None:
        super().__init__(first=True)
        self._operands = operands
        self._begins = {x.data_ptr(): number for number, x in enumerate(operands) if x is not None}
        self._buffers: list[Tensor] = []  # held until the end, so that no two have had the same address
        self.steps: list[Launch | Apply] = []
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
        pointers = [(at, *self._place(x)) for at, x in enumerate(values) if isinstance(x, Tensor)]
        descriptors = [(at, *self._place(x.base)) for at, x in enumerate(values) if _is_descriptor(x)]
        kept = (None if isinstance(x, Tensor) else _based(x, None) if _is_descriptor(x) else x for x in values)
        self.steps.append(Launch(compiled, (*grid, 1, 1)[:3], tuple(kept), tuple(pointers), tuple(descriptors)))

    def apply(self, function: Callable[..., object], *args: Any) -> None:
        function(*args)
        views = [(at, *self._view(x)) for at, x in enumerate(args) if isinstance(x, Tensor)]
        kept = (None if isinstance(x, Tensor) else x for x in args)
        self.steps.append(Apply(function, tuple(kept), tuple(views)))

    def once(self) -> None:
        self._known = False

    def recorded(self, results: Results) -> Recorded | None:
        """The call for other operands; None if it did what was not seen here."""
        numbers = [next((n for n, x in enumerate(self._sources()) if x is result), None) for result in results]
        returned = tuple(number for number in numbers if number is not None)
        if not self._known or len(returned) < len(numbers):
            return None
        device = next(x.device for x in self._operands if x is not None)
        seen = self._layouts_seen()
        layouts = [self._layout(number, seen.get(number), number in returned) for number in range(len(self._sources()))]
        buffers: list[Buffer] = []
        end = 0
        for number, x in enumerate(self._buffers, len(self._operands)):
            own = number in seen or number in returned
            buffers.append(Buffer(*layouts[number][:2], x.dtype, None if own else end))
            end += 0 if own else -(-x.nbytes // APART) * APART
        steps = tuple(step if isinstance(step, Launch) else _compact(step, layouts) for step in self.steps)
        return Recorded(device, tuple(buffers), end, steps, returned)

    def _sources(self) -> list[Tensor | None]:
        return [*self._operands, *self._buffers]

    def _place(self, x: Tensor) -> tuple[int, int]:
        """Of an address: the operand that begins there, or what has it inside and the bytes before: a buffer, or an
        operand whose elements lie together.
        """
        address = x.data_ptr()
        if address in self._begins:
            return self._begins[address], 0
        for number, source in enumerate(self._sources()):
            own = number >= len(self._operands) or (source is not None and source.is_contiguous())
            if source is not None and own and 0 <= address - source.data_ptr() < max(1, source.nbytes):
                return number, address - source.data_ptr()
        self.once()
        return 0, 0

    def _view(self, x: Tensor) -> tuple[int, Layout]:
        number, before = self._place(x)
        source = self._sources()[number]
        if source is None or source.dtype is not x.dtype:
            self.once()
        return number, (tuple(x.shape), x.stride(), before // x.element_size())

    def _layouts_seen(self) -> dict[int, set[Layout | None]]:
        """By source: how functions of torch see it."""
        seen: dict[int, set[Layout | None]] = {}
        for step in self.steps:
            for _, number, layout in step.views if isinstance(step, Apply) else ():
                seen.setdefault(number, set()).add(layout)
        return seen

    def _layout(self, number: int, seen: set[Layout | None] | None, returned: bool) -> Layout:
        """A source's own; a buffer that all see in one other layout is made with that."""
        source = self._sources()[number]
        if source is None:
            return (), (), 0
        only = next(iter(seen)) if seen and len(seen) == 1 else None
        if only is not None and number >= len(self._operands) and not returned:
            shape, strides, before = only
            reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if before == 0 and reach == source.numel() == math.prod(shape):
                return only
        return tuple(source.shape), source.stride(), 0


def _compact(step: Apply, layouts: Sequence[Layout]) -> Apply:
    """Tensors that are a whole source are taken as they are."""
    views = ((at, number, None if layout == layouts[number] else layout) for at, number, layout in step.views)
    return step._replace(views=tuple(views))


class Memory:
    """Calls of one kind of operator, by everything that decides what they launch."""

    def __init__(self) -> None:
        self._recorded: dict[Hashable, Recorded | None] = {}
        self._lock = threading.Lock()

    def run(
        self, options: Hashable, operands: Operands, call: Callable[[Scratch], Results], written: int | None = None
    ) -> Results:
        """``call``, or what it did the last time for operands like these. ``options``: all else that it depends on.

        ``written``: the operand it writes into, if any; whether another one shares memory with that counts as well.
        """
        key, addresses = signature_of(options, operands, written)
        recorded = self._recorded.get(key)
        if recorded is not None:
            return recorded.run(operands, addresses)
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

    def known(self, options: Hashable, operands: Operands, written: int | None = None) -> Recorded | None:
        """What ``run`` does for operands like these, if it is remembered."""
        return self._recorded.get(signature_of(options, operands, written)[0])


def signature_of(options: Hashable, operands: Operands, written: int | None) -> tuple[Hashable, list[int]]:
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
    if written is not None:
        key.append(shares_memory(operands[written], addresses))
    return tuple(key), addresses


def _is_descriptor(x: object) -> bool:
    return hasattr(x, "block_shape")


def _based(descriptor: Any, base: Address | None) -> Any:
    """A descriptor of the same layout elsewhere; its class would check once more what does not change."""
    moved = object.__new__(type(descriptor))
    moved.__dict__.update(descriptor.__dict__)
    moved.base = base
    return moved
