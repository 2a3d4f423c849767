"""The Hopper MLA decode kernel on torch tensors: warpgroups as threads, real barriers, and copies that take time.

``python -m tests.lowering.mla_emulated``, with TRITON_INTERPRET=1 for the kernels before and after it; run by
``test_mla_kernels.py``. Threads pause at random, copies land late, and what they will replace is NaN until then: a
wait too few shows as NaN, one too many as a deadlock. Tiles lie in shared memory as on the device, but for the swizzle.
"""

# pyright: basic

from __future__ import annotations

import math
import random
import sys
import threading
import time
import types
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import triton.experimental.gluon.nvidia.hopper  # what Triton itself imports of it stays as it is
from torch import Tensor

from tests.lowering import emulated

LANGUAGE: Any = emulated.install()  # before any kernel is imported
triton.experimental.gluon = sys.modules["triton.experimental.gluon"]

from kdacompile.lowering.hopper import mla_run  # noqa: E402
from kdacompile.lowering.run_attention import Attention  # noqa: E402
from kdacompile.lowering.scratch import Scratch  # noqa: E402
from kdacompile.lowering.triton import mla_run as portable_run  # noqa: E402
from kdacompile.lowering.triton.device import device_of  # noqa: E402
from kdacompile.patterns.mla.oracle import latent_attention  # noqa: E402
from tests.lowering.verify import relative_error  # noqa: E402

OPERANDS = ("q", "q_rope", "latent", "k_rope", "w_uk", "w_uv", "mask", "sinks", "lengths", "block_table")
TOLERANCE = 4e-3
PATIENCE = 20.0
"""Seconds until a wait is a deadlock."""
ROW_BYTES = 128
"""Of a row of one of the blocks that a tile in shared memory is made of."""

clock = threading.Condition()
failures: list[BaseException] = []


class Memory:
    """A tile in shared memory, or several: blocks of 128 bytes a row, one block of columns after the other."""

    def __init__(
        self, data: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...], *, turned: bool = False
    ) -> None:
        self.data, self.start, self.dtype, self.shape, self.turned = data, start, dtype, shape, turned

    def _view(self) -> Tensor:
        size, count = self.dtype.itemsize, math.prod(self.shape)
        flat = self.data[self.start : self.start + count * size].view(self.dtype)
        if len(self.shape) == 1:
            return flat
        rows, width = self.shape[-2], ROW_BYTES // size
        return flat.view(-1, rows, width).permute(1, 0, 2)

    @property
    def tile(self) -> Tensor:
        x = self._view().reshape(self.shape[-2:] if len(self.shape) > 1 else self.shape)
        return x.T if self.turned else x

    def load(self, layout: Any) -> Tensor:
        return self.tile.clone()

    def store(self, x: Tensor) -> None:
        assert x.dtype == self.dtype and x.shape == self.shape[-2:], (x.dtype, x.shape, self.dtype, self.shape)
        view = self._view()
        view.copy_(x.reshape(view.shape))

    def index(self, i: Any) -> Memory:
        shape = self.shape[1:]
        assert 0 <= int(i) < self.shape[0]
        return Memory(self.data, self.start + int(i) * math.prod(shape) * self.dtype.itemsize, self.dtype, shape)

    def slice(self, start: int, length: int, dim: int) -> Memory:
        rows, size = self.shape[0], self.dtype.itemsize
        assert dim == 1 and start * size % ROW_BYTES == 0
        return Memory(self.data, self.start + start * rows * size, self.dtype, (rows, length))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data, self.start, self.dtype, self.shape, turned=True)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
        return Memory(self.data, self.start, dtype, tuple(int(n) for n in shape))


class Barriers:
    """mbarriers: arrivals and bytes still awaited, and the phase."""

    def __init__(self, count: int, of: Barriers | None = None, at: int = 0) -> None:
        self.states = [[0, 0, 0, 0] for _ in range(count)] if of is None else [of.states[at]]

    def index(self, i: Any) -> Barriers:
        return Barriers(1, self, int(i))

    def change(self, arrivals: int, expected: int = 0) -> None:
        with clock:
            state = self.states[0]
            state[1] -= arrivals
            state[2] += expected
            assert state[1] >= 0, "more arrivals than the barrier counts"
            if state[1] == 0 and state[2] == 0:
                state[1], state[3] = state[0], state[3] ^ 1
                clock.notify_all()

    def wait(self, phase: Any) -> None:
        pause()
        with clock:
            done = clock.wait_for(lambda: failures or self.states[0][3] != int(phase), PATIENCE)
        if failures or not done:
            raise RuntimeError("the other warpgroup failed" if failures else "deadlock")


def pause() -> None:
    if random.random() < 0.2:
        time.sleep(random.random() * 1e-3)


def _init(bar: Barriers, count: int) -> None:
    bar.states[0][:2] = [count, count]


class Descriptor:
    def __init__(self, x: Tensor, block: tuple[int, ...]) -> None:
        self.x, self.dtype = x, x.dtype
        self.layout = types.SimpleNamespace(element_bitwidth=8 * x.dtype.itemsize)


def _copy_in(source: Descriptor, at: list[Any], bar: Barriers, to: Memory) -> None:
    outer, row, column = (int(x) for x in at)
    _, rows, columns = to.shape
    to.store(torch.full((rows, columns), torch.nan, dtype=to.dtype))

    def land() -> None:
        time.sleep(random.random() * 2e-3)
        tile = torch.zeros(rows, columns, dtype=to.dtype)
        if outer >= 0:  # the copy engine reads zeros outside
            found = source.x[outer, row : row + rows, column : column + columns]
            tile[: found.shape[0]] = found
        to.store(tile)
        bar.change(0, -tile.numel() * tile.itemsize)

    threading.Thread(target=land).start()


def _copy_out(target: Descriptor, at: list[Any], source: Memory) -> None:
    outer, row, column = (int(x) for x in at)
    _, rows, columns = source.shape
    place = target.x[outer, row : row + rows, column : column + columns]
    place.copy_(source.tile[: place.shape[0]])


def _product(a: Any, b: Memory, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    pause()
    left = a.tile if isinstance(a, Memory) else a
    assert left.dtype == b.dtype
    return (acc if use_acc else 0) + left.float() @ b.tile.float()


def _specialize(parts: list[Any], warps: list[int], registers: list[int]) -> None:
    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Memory | Barriers:
    if dtype == torch.int64:
        return Barriers(shape[0])
    return Memory(torch.full((math.prod(shape) * dtype.itemsize,), 255, dtype=torch.uint8), 0, dtype, tuple(shape))


class EmulatedScratch(Scratch):
    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Any:
        def call(*given: Any, num_warps: int = 0, launch_pdl: bool = False, **named: Any) -> None:
            if isinstance(kernel, types.FunctionType):
                emulated.run(LANGUAGE, kernel, grid, named)
            else:
                kernel[grid](*given, **named)

        return call


def check(
    lengths: list[int], tokens: int, heads: int, programs: int, page: int = 64, over: float = 1.0, **other: Any
) -> None:
    """A call beside the oracle, on a device of so many multiprocessors; NaN in all that no request owns."""
    generator = torch.Generator().manual_seed(len(lengths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    batch, pages = len(lengths), max(1, -(-max(lengths) // page)) if page else 1
    width = page * pages if page else max(lengths) + 3
    own = normal(batch, width, 576)
    owned = torch.tensor(lengths, dtype=torch.int32)
    own[torch.arange(width) >= owned[:, None]] = torch.nan
    cache, table = own, None
    if page:
        table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int()
        cache = torch.empty(batch * pages, page, 576, dtype=torch.bfloat16)
        cache[table.long()] = own.view(batch, pages, page, 576)
    q = (over * normal(batch, tokens, heads, 576).float()).bfloat16()
    options: dict[str, Any] = {"mask": None, "sinks": None, "scale": 192**-0.5, "causal": True, "form": "auto"} | other
    call = Attention(
        q=q[..., :512], q_rope=q[..., 512:], latent=cache[..., :512], k_rope=cache[..., 512:], w_uk=None, w_uv=None,
        lengths=owned, block_table=table, **options,
    )  # fmt: skip
    device = replace(device_of(q.device), multiprocessors=programs)
    where = (patch.object(module, "device_of", lambda _: device) for module in (mla_run, portable_run))
    with next(where), next(where), patch.object(mla_run, "described", Descriptor):
        o, lse = mla_run._attend(call, EmulatedScratch(poison=True))
    tensors = (getattr(call, name) for name in OPERANDS)
    want, want_lse = latent_attention(*tensors, scale=call.scale, causal=call.causal)
    error = relative_error(o, want)
    assert error <= TOLERANCE, (lengths, error)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def _install() -> None:
    hopper: Any = sys.modules["triton.experimental.gluon.language.nvidia.hopper"]
    hopper.mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=_init,
        wait=lambda bar, phase: bar.wait(phase),
        arrive=lambda bar, count, pred=True: bar.change(count) if pred else None,
        expect=lambda bar, size, pred=True: bar.change(1, size) if pred else None,
    )
    hopper.tma = types.SimpleNamespace(
        async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=lambda count: None
    )
    hopper.warpgroup_mma = _product
    cuda: Any = types.ModuleType("triton.language.extra.cuda")
    cuda.gdc_launch_dependents = cuda.gdc_wait = lambda: None
    sys.modules["triton.language.extra.cuda"] = cuda
    LANGUAGE.allocate_shared_memory, LANGUAGE.warp_specialize = _allocate, _specialize
    LANGUAGE.max = lambda x, axis: x.amax(axis)
    LANGUAGE.log2, LANGUAGE.zeros_like, LANGUAGE.split = torch.log2, torch.zeros_like, lambda x: x.unbind(-1)
    LANGUAGE.to_tensor = torch.as_tensor


def cases() -> None:
    """Requests whole and in parts; odd and even blocks, none; masks, sinks; scores that grow."""
    check([700], 1, 64, programs=4)
    check([300, 129, 0, 1, 65, 640, 20, 400], 1, 16, programs=3)
    check([64] * 9, 1, 20, programs=2, sinks=torch.randn(20))
    check([700, 900, 300, 129, 0, 1, 65, 640], 1, 64, programs=7, over=20.0)
    check([300, 77], 3, 40, programs=2, page=0)
    check([3, 7], 8, 20, programs=6)
    check([300, 129], 2, 50, programs=5, page=128)
    check([200] * 30, 1, 64, programs=2)  # more than enough requests: none is cut
    mask = torch.rand(3, 1, 1, 256) < 0.7
    check([250, 100, 130], 1, 64, programs=2, mask=mask)


if __name__ == "__main__":
    _install()
    cases()
