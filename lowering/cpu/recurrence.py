"""The C kernel of the token recurrence (``recurrence.c``) on tensors."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch
from torch import Tensor

from kdacompile.containment import contain

from ..calls import Call
from ..layout import sequence_bounds
from ..scratch import shares_memory
from .compiler import CannotCompile, library, parallel_for, say_slow

MAX_KEY_WIDTH = 512
"""A strip of the state lives on the thread's stack."""

_ROWS = 4  # as in the source
NAMES = {torch.float32: "float", torch.float64: "double"}
"""Dtypes the kernels are compiled for, in C."""
_TASK_ELEMENTS = 1 << 16  # state elements times tokens worth waking a thread for, some 10 us

# struct problem of the source: operands (pointer and strides), pointers, sizes, scale and norm_eps
_PROBLEM = struct.Struct("@20q 4q 7q 2d")
_NOTHING = (0, 0, 0, 0)


class _Kernel:
    """The compiled library for one dtype, and how its strips are spread over threads."""

    def __init__(self, real: str) -> None:
        compiled = library("recurrence.c", real)
        compiled.strip_width.restype = ctypes.c_int64
        self.compiled = compiled  # keeps the library loaded
        self.function = ctypes.cast(compiled.linear_attention, ctypes.c_void_p)
        self.width: int = compiled.strip_width()
        self.parallel_for = parallel_for()

    def __call__(self, problem: bytes, lanes: int, tokens: int, key_width: int, value_width: int) -> None:
        """Run all strips of ``lanes`` (sequence, head) pairs with ``tokens`` tokens each."""
        grain = max(1, _TASK_ELEMENTS // max(1, tokens * key_width * self.width))
        if self.parallel_for(0, lanes * -(-value_width // self.width), grain, self.function, problem):
            raise RuntimeError("torch_parallel_for failed")


@cache
def _kernel(dtype: torch.dtype) -> _Kernel | None:
    def load() -> _Kernel | None:
        try:
            return _Kernel(NAMES[dtype])
        except CannotCompile as error:
            say_slow(str(error))
            return None

    return contain("loading the CPU's kernel", load, lambda _: None)


def runs_recurrence(q: Tensor) -> bool:
    """Whether :func:`run_recurrence` takes keys like ``q`` on this machine; the first question compiles the kernel."""
    width = q.shape[-1]
    fits = q.device.type == "cpu" and width % _ROWS == 0 and 0 < width <= MAX_KEY_WIDTH and q.dtype in NAMES
    return fits and _kernel(q.dtype) is not None


def run_recurrence(call: Call, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """As :func:`kdacompile.lowering.run_linear_attention`, on plain tensors and without gradients.

    ``overwrite``: the final state takes the place of ``initial_state`` where that is contiguous memory of its own.
    """
    kernel = _kernel(call.q.dtype)
    assert kernel is not None  # the caller asked runs_recurrence
    batch, length, key_heads, key_width = call.q.shape
    heads, value_width = call.v.shape[2:]
    bounds = bounds_of(call)
    sequences = batch if bounds is None else len(bounds) - 1
    # Every tensor is held by a name until the kernel is done: it is given addresses.
    q, k, v, decay, beta = in_rows(call.q), in_rows(call.k), in_rows(call.v), decay_of(call), call.beta
    initial_state = call.initial_state
    if initial_state is not None:
        initial_state = initial_state.to(q.dtype).contiguous()
    out = torch.empty((batch, length, heads, value_width), dtype=q.dtype)
    addresses = [address(x) for x in (initial_state, q, k, v, decay, beta)]
    if overwrite and initial_state is not None and not shares_memory(initial_state, addresses):
        final = initial_state  # a strip is read whole before it is written
    else:
        final = torch.empty((sequences, heads, key_width, value_width), dtype=q.dtype)
    problem = _PROBLEM.pack(
        *operand(q),
        *operand(k),
        *operand(v),
        *operand(decay),
        *operand(beta),
        address(initial_state),
        address(out),
        address(final),
        address(bounds),
        length,
        heads,
        heads // key_heads,
        key_width,
        value_width,
        call.gate == "channel",
        call.delta,
        call.scale,
        call.qk_l2norm_eps,
    )
    kernel(problem, sequences * heads, batch * length // max(1, sequences), key_width, value_width)
    return out, final


def bounds_of(call: Call) -> Tensor | None:
    """The bounds of packed sequences, checked, as the kernels read them."""
    return None if call.cu_seqlens is None else torch.tensor(sequence_bounds(call.cu_seqlens, call.q.shape[1]))


def decay_of(call: Call) -> Tensor | None:
    """The factors by which the state decays."""
    g = call.g
    if g is None:
        return None
    decay = torch.exp(g) if call.gate_fn == "log" else g
    return in_rows(decay) if call.gate == "channel" else decay


def in_rows(x: Tensor) -> Tensor:
    """``x`` with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def operand(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides of batch, token and head; one value a head serves all tokens."""
    if x is None:
        return _NOTHING
    strides = x.stride()
    return (x.data_ptr(), 0, 0, strides[0]) if len(strides) == 1 else (x.data_ptr(), *strides[:3])
