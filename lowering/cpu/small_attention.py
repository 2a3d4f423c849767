"""Small calls of MLA on a CPU by one function in C (``attention.c``): a step over a short cache, or a short prompt.

The operators of ``attention_rows.py`` take torch some 150 us to start, however little there is to compute, more than
the C kernel takes for a whole small call. Their products are faster than its own where they are large: see ``MOST``.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kdacompile.compat.launches import empty_strided
from kdacompile.lowering.attention import choose_form
from kdacompile.lowering.run import is_any_watched
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch

from .backward import is_memory_filled
from .compiler import Call, loaded, may_run
from .operands import KINDS, addresses_of, contiguous, described, laid_out

MOST = {"expanded": 16_000_000_000, "absorbed": 1_500_000}
"""Operations of the products, two for a multiply-add, up to which the C kernel took at most half the time of torch's
operators on one thread; absorbed calls read weights and cache for a few queries only, and every head turns the cache.
"""
TASK = 400_000
"""Operations that are worth a thread of their own, some 20 us."""
SCRATCH = 1 << 22
"""Numbers that a task may keep."""

# struct problem of the source: operands (pointer, kind, strides), results, sizes, scale, a function, tasks
_PROBLEM = struct.Struct("@48q 2q 13q d P q")
_ADDRESSES = struct.Struct("@11q")
_READABLE = {torch.float32, torch.bfloat16, torch.float16}
_MASK = 6
_READ = ("q", "q_rope", "latent", "k_rope", "w_uk", "w_uv", "mask", "sinks")  # the first operands of the op
_CACHED = {2: 1, 3: 1, 6: 3}
"""Which dimension of these operands counts cached tokens: latent and k_rope ``[B, S, ..]``, mask ``[.., S]``."""


class _Kernel(Call):
    """A batch entry and some of its heads."""

    source, function = ("vectors.c", "functions.c", "operands.c", "attention.c"), "latent_attention"


@cache
def _kernel() -> _Kernel | None:
    return loaded(_Kernel, torch.float32, "latent attention")


class SmallAttention:
    """Masks and sinks too; without lengths and pages, whose values are read and checked every time."""

    name = "C"

    def declines(self, call: Attention) -> str | None:
        if call.lengths is not None or call.block_table is not None or call.length is not None:
            return "lengths and pages are read every time"
        operands = tuple(getattr(call, name) for name in _READ)
        dtypes = {x.dtype for x in operands if x is not None} - ({torch.bool} if call.mask is not None else set())
        if not dtypes <= _READABLE or any(x is not None and x.device.type != "cpu" for x in operands):
            return "a dtype that the kernel does not read"
        if call.out_dtype not in _READABLE:
            return "a result that the kernel does not write"
        if 0 in (call.q.numel(), call.latent.numel()):
            return "there is nothing to attend to"
        if is_any_watched(operands):
            return "torch.func follows the torch executor"
        if not is_small(_sizes(call), call.absorbed):
            return "not a small call"
        compiled = may_run(_Kernel, torch.float32) and _kernel() is not None
        return None if compiled else "the C kernel does not run here"

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` in the call's ``out_dtype`` and lse ``[B, H, T]`` in fp32."""
        operands = [getattr(call, name) for name in _READ]
        return PreparedAttention(call).run(operands, addresses_of(operands))


SMALL = SmallAttention()

Sizes = tuple[int, int, int, int, int, int, int, int]
"""As :func:`~kdacompile.lowering.attention.choose_form` takes them."""


def _sizes(call: Attention) -> Sizes:
    batch, tokens, heads, width = call.q.shape
    rank = call.latent.shape[2]
    nope, value = (0, rank) if call.w_uk is None or call.w_uv is None else (width, call.w_uv.shape[1])
    rope = 0 if call.q_rope is None else call.q_rope.shape[3]
    return batch, tokens, call.latent.shape[1], heads, nope, rope, rank, value


def operations(sizes: Sizes, absorbed: bool) -> int:
    """Of the kernel's products for one head of one request."""
    _, tokens, cached, _, nope, rope, rank, value = sizes
    if absorbed:
        return 2 * tokens * cached * (2 * rank + rope) + 2 * tokens * rank * (nope + value) * (nope > 0)
    return 2 * tokens * cached * (nope + rope + value) + 2 * cached * rank * (nope + value)


def is_small(sizes: Sizes, absorbed: bool) -> bool:
    batch, tokens, cached, heads, nope, rope, rank, value = sizes
    kept = (cached + rank) * (rank + nope + rope + value) + tokens * (nope + 2 * rank + rope)
    return (
        kept <= SCRATCH and batch * heads * operations(sizes, absorbed) <= MOST["absorbed" if absorbed else "expanded"]
    )


class PreparedAttention:
    """Calls like one that was made: the same operands but for their addresses, the cache as long as it may be."""

    alignment = 1
    """The kernel reads from any address."""
    free = _CACHED
    """The cache may have another length: ``fits`` has a look at it."""
    uses_torch = False

    def __init__(self, call: Attention) -> None:
        self._sizes, self._causal, self._form, self._width = _sizes(call), call.causal, call.form, call.w_uk is not None
        (shape, dtype), (lse_shape, _) = call.results
        self._o, self._lse = (shape, contiguous(shape), dtype), (lse_shape, contiguous(lse_shape), torch.float32)
        self._kind, self._scale = KINDS[dtype], call.scale
        self._fixed = [_described(getattr(call, name), number) for number, name in enumerate(_READ)]
        self._known: dict[int, tuple[bool, int]] = {}
        self._last: tuple[Any, Any, bytes] = None, None, b""
        kernel = _kernel()
        assert kernel is not None  # the call was asked for
        self._kernel, self._run = kernel, kernel.call

    def fits(self, operands: Sequence[Any]) -> bool:
        """Whether operands that are alike but for the cache's length are a call of this kind."""
        latent, rope, mask = operands[2], operands[3], operands[6]
        cached = latent.shape[1]
        if (rope is not None and rope.shape[1] != cached) or (mask is not None and mask.shape[3] != cached):
            return False
        return latent.shape == self._last[0] or (cached > 0 and is_small(self._at(cached), self._how(cached)[0]))

    def _at(self, cached: int) -> Sizes:
        batch, tokens, _, *others = self._sizes
        return (batch, tokens, cached, *others)  # pyright: ignore[reportReturnType]

    def _how(self, cached: int) -> tuple[bool, int]:
        """The form for a cache of this length, and the heads of a task."""
        found = self._known.get(cached)
        if found is None:
            sizes = self._at(cached)
            chosen = choose_form(*sizes, causal=self._causal) if self._form == "auto" else self._form
            absorbed = not self._width or chosen == "absorbed"
            share = max(1, min(sizes[3], TASK // max(1, operations(sizes, absorbed))))
            found = self._known[cached] = absorbed, share
        return found

    def run(self, operands: Sequence[Any], addresses: Sequence[int]) -> tuple[Tensor, Tensor]:
        latent, rope, mask = operands[2], operands[3], operands[6]
        shape, before, problem = self._last
        strides = [None if x is None else x.stride() for x in (latent, rope, mask)]
        if latent.shape != shape or strides != before:
            problem = self._problem(operands)
            self._last = latent.shape, strides, problem
        empty = empty_strided["cpu"]
        o, lse = empty(*self._o), empty(*self._lse)
        if self._run(problem, _ADDRESSES.pack(*addresses[:8], o.data_ptr(), lse.data_ptr(), is_memory_filled())):
            raise MemoryError("no memory for the keys and values of a short prompt")
        return o, lse

    def _problem(self, operands: Sequence[Any]) -> bytes:
        cached = operands[2].shape[1]
        absorbed, share = self._how(cached)
        described = list(self._fixed)
        for number in _CACHED:
            described[number] = _described(operands[number], number)
        sizes = self._at(cached)
        return _PROBLEM.pack(
            *itertools.chain.from_iterable(described),
            *(0, 0, self._kind),
            *sizes,
            *(absorbed, self._causal, share, 0),
            self._scale,
            self._kernel.divide,
            sizes[0] * -(-sizes[3] // share),
        )


def _described(x: Tensor | None, number: int) -> tuple[int, ...]:
    """As :func:`described`, with stride 0 along a dimension of the mask that is shared."""
    if x is None or number != _MASK:
        return described(x)
    return laid_out(x.dtype, [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)])
