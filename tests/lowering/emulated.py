"""The synchronous part of Gluon on torch tensors: kernels as Python functions, on a machine without a GPU.

``install()`` puts stand-ins for ``triton.experimental.gluon`` in place; kernels of modules imported after that are
plain functions. Layouts mean nothing here, products are fp32, shared memory is poisoned, and every store rounds. A race
between warps does not show; what a kernel computes does. In a process of its own: see ``test_hopper_backward.py``.
"""

# pyright: basic

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_ASM: dict[str, Callable[[Tensor], Tensor]] = {
    "ex2": torch.exp2,
    "lg2": torch.log2,
    "rcp": torch.reciprocal,
    "mov": lambda x: x,
    "cvt": lambda x: x.to(torch.bfloat16),
    "shl": lambda x: x.float(),
    "pre": lambda x: torch.tensor(0),  # a line asked for ahead
    "{.r": lambda x: (x.float() * 2.0**-58).to(torch.bfloat16),
}


class Layout:
    """Any layout; also what stands for the packages that the synchronous kernels do not call."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.value = self

    def __getattr__(self, name: str) -> Any:
        return Layout()

    def __call__(self, *args: Any, **named: Any) -> Any:
        return Layout()


class Pointer:
    """Into a tensor's elements, one address or a tile of them."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.offset + more)


class Shared:
    """A tile in shared memory, or a view of one."""

    def __init__(self, tile: Tensor) -> None:
        self.tile, self.dtype, self.shape = tile, tile.dtype, tuple(tile.shape)

    def store(self, x: Tensor) -> None:
        assert x.shape == self.tile.shape and x.dtype == self.dtype, (x.shape, x.dtype, self.shape, self.dtype)
        self.tile.copy_(x)

    def load(self, layout: Any) -> Tensor:
        return self.tile.clone()

    def index(self, i: int) -> Shared:
        return Shared(self.tile[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tile.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.tile.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.tile.view(dtype).view(shape))


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))


def _tile(x: Any) -> Tensor:
    return torch.as_tensor(x)


def _memory(x: Tensor) -> Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def _load(at: Pointer, mask: Any = True, other: float = 0.0, volatile: bool = False) -> Tensor:
    where, given = torch.broadcast_tensors(_tile(at.offset), _tile(mask))
    found = _memory(at.base)[torch.where(given, where + at.base.storage_offset(), 0)]
    return torch.where(given, found, torch.full_like(found, other))


def _store(at: Pointer, x: Any, mask: Any = True) -> None:
    where, x, given = torch.broadcast_tensors(_tile(at.offset), _tile(x).to(at.base.dtype), _tile(mask))
    _memory(at.base)[where[given] + at.base.storage_offset()] = x[given]


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    x, y = (z if isinstance(z, Tensor) else torch.tensor(z) for z in (x, y))
    if x.dim() == 0 and y.dim():
        x = x.to(y.dtype)
    elif y.dim() == 0:
        y = y.to(x.dtype)
    return torch.where(_tile(condition), x, y)


def _product(a: Tensor, b: Tensor, acc: Tensor, input_precision: str | None = None) -> Tensor:
    assert a.dtype == b.dtype and acc.dtype == torch.float32
    return acc + a.float() @ b.float()


def _warpgroup_product(
    left: Shared | Tensor, right: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
) -> Tensor:
    return _product(left.tile if isinstance(left, Shared) else left, right.tile, acc if use_acc else 0 * acc)


class Described:
    """A tensor as the copy engine addresses it, a block at a time."""

    def __init__(self, base: Tensor, shape: Any, strides: Any, block: list[int], layout: Any) -> None:
        self.base, self.block = base, block


class Barrier:
    """What mbarriers do, and the copies that count on them; a kernel's partitions are threads."""

    MBarrierLayout = Layout
    turn = threading.Condition()
    states: dict[int, list[int]] = {}  # noqa: RUF012 - by address: phases that are over, arrivals, bytes to come

    @classmethod
    def init(cls, bar: Shared, count: int) -> None:
        assert count == 1
        cls.states[bar.tile.data_ptr()] = [0, 1, 0]

    @classmethod
    def _change(cls, bar: Shared, arrivals: int, more: int) -> None:
        with cls.turn:
            state = cls.states[bar.tile.data_ptr()]
            state[1] -= arrivals
            state[2] += more
            if state[1:] == [0, 0]:
                state[:2] = state[0] + 1, 1
            assert state[1] >= 0
            cls.turn.notify_all()

    @classmethod
    def expect(cls, bar: Shared, count: int) -> None:
        cls._change(bar, 1, count)

    @classmethod
    def arrive(cls, bar: Shared, count: int = 1, pred: Any = True) -> None:
        if pred:
            cls._change(bar, count, 0)

    @classmethod
    def wait(cls, bar: Shared, phase: int, pred: Any = True) -> None:
        state = cls.states[bar.tile.data_ptr()]
        with cls.turn:
            assert not pred or cls.turn.wait_for(lambda: state[0] & 1 != phase, 60)

    @classmethod
    def async_copy_global_to_shared(cls, source: Described, at: list[Any], bar: Shared, to: Shared) -> None:
        assert list(to.shape) == source.block
        found = torch.zeros(to.shape, dtype=to.dtype)
        spans = [
            slice(int(i), min(int(i) + n, size)) for i, n, size in zip(at, source.block, source.base.shape, strict=True)
        ]
        found[tuple(slice(0, max(0, s.stop - s.start)) for s in spans)] = source.base[tuple(spans)]
        to.store(found)
        cls._change(bar, 0, -found.nbytes)

    @classmethod
    def async_copy_shared_to_global(cls, to: Described, at: list[Any], source: Shared) -> None:
        assert list(source.shape) == to.block
        to.base[tuple(slice(int(i), int(i) + n) for i, n in zip(at, to.block, strict=True))] = source.tile

    @classmethod
    def store_wait(cls, pendings: int) -> None:
        """Done already."""


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    with ThreadPoolExecutor(len(partitions)) as pool:
        for done in [pool.submit(function, *given) for function, given in partitions]:
            done.result()


def _asm(text: str, constraints: str, args: list[Tensor], dtype: Any, pure: bool, pack: int) -> Tensor:
    return _ASM[text[:3]](args[0]) if args else torch.tensor(0)  # without: an order to the device


def _atomic_add(at: Pointer, x: int, sem: str, scope: str) -> Tensor:
    place = at.base.view(-1)[at.offset : at.offset + 1]
    before = place.clone()
    place.add_(x)
    return before[0]


class Language(types.ModuleType):
    """``gluon.language``. ``program``: the block that runs."""

    def __init__(self) -> None:
        super().__init__("triton.experimental.gluon.language")
        self.program: tuple[int, ...] = (0,)
        self.warp_specialize = _specialize
        for name in ("float16", "bfloat16", "float32", "int32", "int64"):
            setattr(self, name, getattr(torch, name))
        for name in "BlockedLayout SliceLayout DotOperandLayout NVMMADistributedLayout".split():
            setattr(self, name, Layout)
        self.NVMMASharedLayout = self.SwizzledSharedLayout = Layout
        self.constexpr = lambda x: x
        self.arange = lambda a, b, layout=None: torch.arange(a, b)
        self.zeros = lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype)
        self.full = lambda shape, x, dtype, layout=None: torch.full(shape, x, dtype=dtype)
        self.convert_layout = lambda x, layout: x
        self.reshape = lambda x, shape: x.reshape(shape)
        self.permute = lambda x, order: x.permute(order)
        self.join = lambda x, y: torch.stack((x, y), -1)
        self.sum = lambda x, axis: x.sum(axis)
        self.exp2 = lambda x: torch.exp2(_tile(x))
        self.abs, self.rsqrt = torch.abs, torch.rsqrt
        self.maximum = lambda x, y: torch.maximum(_tile(x), _tile(y))
        self.min = lambda x, axis: _tile(x).amin(axis)
        self.minimum = lambda x, y: torch.minimum(_tile(x), _tile(y))
        self.static_range = range
        self.where, self.load, self.store, self.inline_asm_elementwise = _where, _load, _store, _asm
        self.atomic_add = _atomic_add
        self.allocate_shared_memory, self.barrier = _allocate, lambda: None
        self.program_id = lambda axis: torch.tensor(self.program[axis])


def _named(function: Any) -> Any:
    """Arguments' names, as compiled kernels have them."""
    function.arg_names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return function


def install() -> Language:
    """Put the stand-ins in place; before any module of kernels is imported."""
    language = Language()
    gluon: Any = types.ModuleType("triton.experimental.gluon")
    gluon.jit = lambda f=None, **options: _named(f) if f is not None else _named
    gluon.constexpr_function = lambda f: f
    gluon.language = language
    ampere: Any = types.ModuleType("ampere")
    copies: Any = types.ModuleType("async_copy")
    copies.async_copy_global_to_shared = lambda to, at, mask=True: to.store(_load(at, mask))
    copies.commit_group, copies.wait_group = lambda: None, lambda n: None
    ampere.mma_v2, ampere.async_copy = _product, copies
    hopper: Any = types.ModuleType("hopper")
    hopper.tma = hopper.mbarrier = Barrier
    host: Any = types.ModuleType("host")
    host.TensorDescriptor = Described
    hopper.fence_async_shared, hopper.warpgroup_mma = lambda: None, _warpgroup_product
    hopper.warpgroup_mma_wait = lambda n, deps: deps[0] if len(deps) == 1 else tuple(deps)
    base = "triton.experimental.gluon"
    sys.modules |= {base: gluon, f"{base}.language": language, f"{base}.language.nvidia.ampere": ampere}
    sys.modules |= {
        f"{base}.nvidia.hopper": host,
        f"{base}.language.nvidia.ampere.async_copy": copies,
        f"{base}.language.nvidia.hopper": hopper,
    }
    return language


def run(language: Language, kernel: Any, grid: tuple[int, ...], values: dict[str, Any]) -> None:
    """A kernel on its grid, its arguments taken from ``values`` by name."""
    given = {n: Pointer(values[n]) if isinstance(values[n], Tensor) else values[n] for n in kernel.arg_names}
    for program in itertools.product(*(range(size) for size in grid)):
        language.program = program
        kernel(**given)
