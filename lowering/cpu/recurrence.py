"""The C kernel of the token recurrence (``recurrence.c``) on tensors."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ..calls import Call
from ..layout import sequence_bounds
from ..scratch import shares_memory
from .compiler import Loop, loaded, may_run

MAX_KEY_WIDTH = 512
"""A strip of the state lives on the thread's stack."""

_ROWS = 4  # as in the source
_TASK_ELEMENTS = 1 << 16  # state elements times tokens worth waking a thread for, some 10 us

# struct problem of the source: operands (pointer and strides), pointers, sizes, scale and norm_eps
_PROBLEM = struct.Struct("@20q 5q 7q 2d")
_NOTHING = (0, 0, 0, 0)

Launch = Callable[[], tuple[Tensor, Tensor]]


class _Kernel(Loop):
    """Strips of the state's columns, all tokens of one after the other."""

    source, function = ("recurrence.c",), "linear_attention"

    def __init__(self, real: str) -> None:
        super().__init__(real)
        self._width = self.constant("strip_width")

    def __call__(self, problem: bytes, lanes: int, tokens: int, key_width: int, value_width: int) -> None:
        """Run all strips of ``lanes`` (sequence, head) pairs with ``tokens`` tokens each."""
        grain = max(1, _TASK_ELEMENTS // max(1, tokens * key_width * self._width))
        self.run(lanes * -(-value_width // self._width), grain, problem)


@cache
def _kernel(dtype: torch.dtype) -> _Kernel | None:
    return loaded(_Kernel, dtype, "the recurrence")


def runs_recurrence(q: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernel takes keys like ``q`` here, in ``dtype``; the first question compiles it."""
    width = q.shape[-1]
    fits = q.device.type == "cpu" and width % _ROWS == 0 and 0 < width <= MAX_KEY_WIDTH
    dtype = dtype or q.dtype
    return fits and may_run(_Kernel, dtype) and _kernel(dtype) is not None


def prepare_recurrence(call: Call, bounds: Tensor | None, *, overwrite: bool = False) -> Launch | None:
    """What computes as :func:`kdacompile.lowering.run_linear_attention`, on plain tensors and without gradients; None
    where the kernel does not run such calls here. Nothing that the caller has is written before it is called.

    ``bounds``: of :func:`bounds_of`; ``overwrite``: the final state takes the place of ``initial_state`` where that is
    contiguous memory of its own. A pool of states is taken in no other case.
    """
    if not runs_recurrence(call.q):
        return None
    operands = in_form(call)
    initial_state = operands[-1]
    out = torch.empty_like(operands[2], memory_format=torch.contiguous_format)
    alone = overwrite and not shares_memory(initial_state, map(address, operands))
    final = initial_state if alone else None  # a strip is read whole before it is written
    slots = None if call.state_indices is None else call.state_indices.long().contiguous()
    if slots is not None and final is not call.initial_state:
        return None
    sequences = call.q.shape[0] if bounds is None else len(bounds) - 1
    if final is None:
        final = torch.empty((sequences, call.v.shape[2], call.q.shape[3], call.v.shape[3]), dtype=call.q.dtype)
    start = Repeated(call, operands, sequences).filled(operands, out, final, bounds, slots)
    results = out, final

    def launch() -> tuple[Tensor, Tensor]:
        start()
        return results

    return launch


Form = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def in_form(call: Call) -> Form:
    """q, k, v, decay, beta and the initial state as the kernel reads them."""
    state, dtype = call.initial_state, call.q.dtype
    if state is not None:
        state = (state if state.dtype is dtype else state.to(dtype)).contiguous()
    return in_rows(call.q), in_rows(call.k), in_rows(call.v), decay_of(call), call.beta, state


class Repeated:
    """The kernel on operands that lie like those of a call; their addresses are filled in."""

    def __init__(self, call: Call, operands: Form, sequences: int) -> None:
        batch, length, key_heads, key_width = call.q.shape
        heads, value_width = call.v.shape[2:]
        kernel = _kernel(call.q.dtype)
        assert kernel is not None  # the call was asked for
        self._kernel = kernel
        self._sizes = sequences * heads, batch * length // max(1, sequences), key_width, value_width
        self._fields: list[float] = [
            *itertools.chain.from_iterable(map(operand, operands[:-1])),
            *(0,) * 5,
            length,
            heads,
            heads // key_heads,
            key_width,
            value_width,
            call.gate == "channel",
            call.delta,
            call.scale,
            call.qk_l2norm_eps,
        ]

    def filled(
        self, operands: Form, out: Tensor, final: Tensor, bounds: Tensor | None = None, slots: Tensor | None = None
    ) -> Callable[[], None]:
        """What runs the kernel on these tensors, and holds them: it has their addresses."""
        *rows, initial_state = map(address, operands)
        fields = self._fields.copy()
        fields[0:20:4] = rows
        fields[20:25] = initial_state, out.data_ptr(), final.data_ptr(), address(bounds), address(slots)
        problem, held = _PROBLEM.pack(*fields), (operands, out, final, bounds, slots)

        def start(_: object = held) -> None:
            self._kernel(problem, *self._sizes)

        return start


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
