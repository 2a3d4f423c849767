"""The gradients of the recurrence in C (``recurrence_backward.c``) on tensors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from .compiler import Loop, loaded, may_run
from .operands import addresses_of
from .recurrence import bounds_of, runs_recurrence

# struct problem of the source: operands (pointer and strides), pointers, sizes, scale, eps, and what became of it
_PROBLEM = struct.Struct("@24q 9q 12q 2d 2q")

HISTORY = 1 << 22
"""Elements of states that a thread keeps, about; where there are more, it keeps some and computes the rest again."""

_ROWS = 16  # of V are padded to a multiple
_TASKS = 8  # there should be, whatever the number of threads: results have the same bits on every machine

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class _Kernel(Loop):
    """A (sequence, head), or some of its values."""

    source = ("vectors.c", "functions.c", "backward_chunk.c", "recurrence_backward.c")
    function = "linear_attention_backward"

    def __init__(self, real: str) -> None:
        super().__init__(real)
        self._pages: Any = self.compiled.linear_attention_pages
        self._pages.argtypes, self._pages.restype = [ctypes.c_void_p, ctypes.c_int64], None

    def memory(self, like: Tensor, *shape: int) -> Tensor:
        """For a gradient."""
        x = like.new_empty(shape)
        self._pages(x.data_ptr(), x.nbytes)
        return x

    def __call__(self, problem: bytes, tasks: int) -> bool:
        """Whether all that was written is finite."""
        memory = ctypes.create_string_buffer(problem, len(problem))
        self.run(tasks, 1, memory)
        failed, strange = marks(memory.raw)
        if failed:
            raise MemoryError("no memory for the states between checkpoints")
        return not strange


def marks(problem: bytes) -> tuple[int, int]:
    """What the kernel left in its problem: whether memory ran out, and whether a gradient is not finite."""
    failed, strange = _PROBLEM.unpack(problem)[-2:]
    return failed, strange


def parts_of(lanes: int, value_width: int) -> int:
    """Into how many tasks a (sequence, head) is cut, each with some of the values."""
    wish = max(1, min(_TASKS // max(1, lanes), value_width // (2 * _ROWS)))
    share = -(-value_width // (wish * _ROWS)) * _ROWS
    return max(1, -(-value_width // share)) if share else 1


@cache
def _kernel(dtype: torch.dtype) -> _Kernel | None:
    return loaded(_Kernel, dtype, "the recurrence's gradients")


def runs_backward(q: Tensor) -> bool:
    """Whether :func:`run_recurrence_backward` takes keys like ``q`` here; the first question compiles the kernels."""
    return runs_recurrence(q) and may_run(_Kernel, q.dtype) and _kernel(q.dtype) is not None


def run_recurrence_backward(grads: Sequence[Tensor | None], call: Call) -> tuple[Gradients, bool]:
    """Gradients of q, k, v, g, beta and the initial state (None for what is None), all in q's dtype, and whether they
    are finite.

    ``grads`` are those of the results of :func:`prepare_recurrence`, None for zeros.
    """
    grad_o, grad_state = grads
    kernel = _kernel(call.q.dtype)
    assert kernel is not None  # the caller asked runs_backward
    batch, length, key_heads, key_width = call.q.shape
    heads, value_width = call.v.shape[2:]
    gate, beta, bounds = call.gate, call.beta, bounds_of(call)
    sequences = batch if bounds is None else len(bounds) - 1
    # Every tensor is held by a name until the kernel is done: it is given addresses.
    q, k, v, decay = in_rows(call.q), in_rows(call.k), in_rows(call.v), call.g
    if decay is not None and gate == "channel":
        decay = in_rows(decay)
    grad_o = None if grad_o is None else in_rows(grad_o.to(q.dtype))
    initial_state, grad_state = (
        None if state is None else state.to(q.dtype).contiguous() for state in (call.initial_state, grad_state)
    )
    parts = parts_of(sequences * heads, value_width)
    per_token = (parts, batch, length, heads)
    dq, dk, dv = (kernel.memory(q, *shape) for shape in ((*per_token, key_width), (*per_token, key_width), v.shape))
    per_decay = (*per_token, key_width) if gate == "channel" else per_token
    ddecay, dbeta = None if decay is None else kernel.memory(q, *per_decay), q.new_empty(per_token)
    dinitial = q.new_empty(sequences, heads, key_width, value_width)
    problem = _PROBLEM.pack(
        *(number for x in (q, k, v, decay, beta, grad_o) for number in operand(x)),
        *addresses_of((initial_state, grad_state, dq, dk, dv, ddecay, dbeta, dinitial, bounds)),
        *(batch, length, heads, heads // key_heads, key_width, value_width, parts),
        *(gate == "channel", call.gate_fn == "log", call.delta),
        *(HISTORY, is_memory_filled()),
        *(call.scale, call.qk_l2norm_eps),
        *(0, 0),
    )
    finite = kernel(problem, sequences * heads * parts)
    dq, dk = (_sum(_sum(x, 0).unflatten(2, (key_heads, -1)), 3) for x in (dq, dk))
    dg = None if ddecay is None else ddecay.sum((0, 1, 2)) if gate == "head" else _sum(ddecay, 0)
    dbeta, dinitial = None if beta is None else _sum(dbeta, 0), None if initial_state is None else dinitial
    return (dq, dk, dv, dg, dbeta, dinitial), finite


def in_rows(x: Tensor) -> Tensor:
    """``x`` with its last dimension contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def operand(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides of batch, token and head; one value a head serves all tokens."""
    if x is None:
        return (0, 0, 0, 0)
    strides = x.stride()
    return (x.data_ptr(), 0, 0, strides[0]) if len(strides) == 1 else (x.data_ptr(), *strides[:3])


def is_memory_filled() -> bool:
    """Whether new memory holds NaN, as torch has it where algorithms must be deterministic."""
    filled: bool = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    return torch.are_deterministic_algorithms_enabled() and filled


def _sum(x: Tensor, dim: int) -> Tensor:
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)
