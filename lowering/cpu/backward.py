"""The gradients of the token recurrence in C (``recurrence_backward.c``) on tensors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ..calls import Call
from .compiler import Loop, loaded
from .recurrence import address, bounds_of, decay_of, in_rows, operand, runs_recurrence

# struct problem of the source: operands (pointer and strides), pointers, sizes, scale, and whether memory ran out
_PROBLEM = struct.Struct("@24q 9q 9q d q")

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class _Kernel(Loop):
    """Blocks of the state's columns; each has its own sums over V."""

    source, function = "recurrence_backward.c", "linear_attention_backward"

    def __init__(self, real: str) -> None:
        super().__init__(real)
        self._rows = self.constant("block_rows")

    def parts(self, lanes: int, value_width: int) -> int:
        """Into how many tasks a (sequence, head) is cut, so that every thread has one."""
        return max(1, min(torch.get_num_threads() // max(1, lanes), -(-value_width // self._rows)))

    def __call__(self, problem: bytes, tasks: int) -> None:
        memory = ctypes.create_string_buffer(problem, len(problem))
        self.run(tasks, 1, memory)
        if failed(memory.raw):
            raise MemoryError("no memory for the states between two checkpoints")


def failed(problem: bytes) -> bool:
    """Whether the kernel left its mark: memory ran out."""
    return bool(_PROBLEM.unpack(problem)[-1])


@cache
def _kernel(dtype: torch.dtype) -> _Kernel | None:
    return loaded(_Kernel, dtype, "the recurrence's gradients")


def runs_backward(q: Tensor) -> bool:
    """Whether :func:`run_recurrence_backward` takes keys like ``q`` here; the first question compiles the kernels."""
    return runs_recurrence(q) and _kernel(q.dtype) is not None


def run_recurrence_backward(grads: Sequence[Tensor | None], call: Call) -> Gradients:
    """Gradients of q, k, v, g, beta and the initial state (None for what is None), all in q's dtype.

    ``grads`` are those of the results of :func:`run_recurrence`, None for zeros; q and k come normalised.
    """
    grad_o, grad_state = grads
    kernel = _kernel(call.q.dtype)
    assert kernel is not None  # the caller asked runs_backward
    batch, length, key_heads, key_width = call.q.shape
    heads, value_width = call.v.shape[2:]
    gate, beta, bounds = call.gate, call.beta, bounds_of(call)
    sequences = batch if bounds is None else len(bounds) - 1
    # Every tensor is held by a name until the kernel is done: it is given addresses.
    q, k, v, decay = in_rows(call.q), in_rows(call.k), in_rows(call.v), decay_of(call)
    grad_o = None if grad_o is None else in_rows(grad_o.to(q.dtype))
    initial_state, grad_state = (
        None if state is None else state.to(q.dtype).contiguous() for state in (call.initial_state, grad_state)
    )
    parts = kernel.parts(sequences * heads, value_width)
    per_token = (parts, batch, length, heads)
    dq, dk = q.new_zeros(*per_token, key_width), q.new_zeros(*per_token, key_width)
    ddecay = q.new_zeros(*per_token, *([key_width] if gate == "channel" else []))
    dv, dbeta = q.new_zeros(v.shape), q.new_zeros(per_token)
    dinitial = q.new_zeros(sequences, heads, key_width, value_width)
    problem = _PROBLEM.pack(
        *(number for x in (q, k, v, decay, beta, grad_o) for number in operand(x)),
        *(address(x) for x in (initial_state, grad_state, dq, dk, dv, ddecay, dbeta, dinitial, bounds)),
        *(batch, length, heads, heads // key_heads, key_width, value_width, parts, gate == "channel", call.delta),
        call.scale,
        0,
    )
    kernel(problem, sequences * heads * parts)
    dq, dk = (_sum(_sum(x, 0).unflatten(2, (key_heads, -1)), 3) for x in (dq, dk))
    dg = None
    if decay is not None:
        dg = ddecay.sum((0, 1, 2)) if gate == "head" else _sum(ddecay, 0)
        dg = dg * decay if call.gate_fn == "log" else dg
    return dq, dk, dv, dg, None if beta is None else _sum(dbeta, 0), None if initial_state is None else dinitial


def _sum(x: Tensor, dim: int) -> Tensor:
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)
