"""The C kernel of the token recurrence (``recurrence.c``) on tensors, as a model has them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kdacompile.compat.launches import empty_strided

from .. import calls
from ..layout import sequence_bounds
from ..scratch import shares_memory
from . import gates
from .compiler import Call, loaded, may_run
from .operands import KINDS, address, addresses_of, contiguous, described, laid_out, overlaps_itself

MAX_KEY_WIDTH = 512
"""A strip of the state lives on the thread's stack."""

_ROWS = 4  # as AT_ONCE in the source

# struct problem of the source: operands and results, two addresses, sizes, what is computed, numbers, a function
_PROBLEM = struct.Struct("@60q 2q 7q 4q 3d P")
_ADDRESSES = struct.Struct("@12q")
_GATES = ("none", "head", "token", "channel")
OPERANDS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
"""As the ops have them, before those whose values the host reads."""
STATE = OPERANDS.index("initial_state")
_DIMENSIONS = "BTHV"

Launch = Callable[[], tuple[Tensor, Tensor]]


class _Kernel(Call):
    """Strips of the state's columns, all tokens of one after the other. ``names``: the gate functions it knows."""

    before = ("vectors.c", "functions.c", "operands.c")
    source = ("recurrence.c", "recurrence_call.c")
    function = "linear_attention"

    def __init__(self, real: str) -> None:
        self.names = gates.functions()
        super().__init__(real, (*self.before, gates.source(self.names), *self.source))


def _kernel(dtype: torch.dtype) -> _Kernel | None:
    return _kernel_of(dtype, gates.functions())


@cache
def _kernel_of(dtype: torch.dtype, _: tuple[str, ...]) -> _Kernel | None:
    return loaded(_Kernel, dtype, "the recurrence")


def runs_recurrence(q: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether the kernel takes keys like ``q`` here, in ``dtype``; the first question compiles it."""
    width = q.shape[-1]
    fits = q.device.type == "cpu" and width % _ROWS == 0 and 0 < width <= MAX_KEY_WIDTH
    dtype = dtype or q.dtype
    return fits and may_run(_Kernel, dtype) and _kernel(dtype) is not None


def reads(call: calls.Call) -> bool:
    """Whether the kernel reads the call's tensors as they are, with the gates' functions before the recurrence."""
    operands = [getattr(call, name) for name in OPERANDS]
    if not all(x is None or (x.dtype in KINDS and x.device.type == "cpu") for x in operands):
        return False
    kernel = _kernel(call.state_dtype) if runs_recurrence(call.q, call.state_dtype) else None
    return kernel is not None and call.out_dtype in KINDS and call.gate_fn in ("factor", *kernel.names)


class Prepared:
    """Calls like one that was made: the same operands but for their addresses, into results of their own.

    ``inside``: the final state takes the place of the initial one. ``o_layout``: the dimensions of o from the outermost
    to the innermost in memory.
    """

    alignment = 1
    """The kernel reads from any address."""
    free: Mapping[int, int] = {}
    uses_torch = False

    def __init__(
        self, call: calls.Call, *, sequences: int | None = None, inside: bool = False, o_layout: str = _DIMENSIONS
    ) -> None:
        batch, length, key_heads, key_width = call.q.shape
        heads, value_width = call.v.shape[2:]
        kernel = _kernel(call.state_dtype)
        assert kernel is not None  # the call was asked for
        self._kernel, self._run, self._pack = kernel, kernel.call, _ADDRESSES.pack
        (shape, dtype), (state_shape, state_dtype) = call.results
        if sequences is not None:
            state_shape = (sequences, *state_shape[1:])
        order = [_DIMENSIONS.index(letter) for letter in o_layout]
        self._o = shape, contiguous(shape, order), dtype
        self._final = None if inside else (state_shape, contiguous(state_shape), state_dtype)
        state = call.initial_state
        assert state is not None or not inside
        final = described(state) if self._final is None else laid_out(state_dtype, self._final[1])
        fields: list[Any] = [number for name in OPERANDS for number in described(getattr(call, name))]
        self._problem = _PROBLEM.pack(
            *fields,
            *laid_out(dtype, self._o[1]),
            *final,
            *(0, 0),
            *(batch, length, state_shape[0], heads, heads // key_heads, key_width, value_width),
            _GATES.index(call.gate) if call.g is not None else 0,
            -1 if call.gate_fn == "factor" else kernel.names.index(call.gate_fn),
            *(call.sigmoid_beta, call.delta),
            *(call.gate_scale, call.scale, call.qk_l2norm_eps),
            kernel.divide,
        )

    def fits(self, operands: Sequence[Any]) -> bool:
        return True

    def run(self, operands: Sequence[Any], addresses: Sequence[int]) -> tuple[Tensor, Tensor]:
        """``operands``: those of the ops, with bounds and slots left out or None."""
        return self.run_on(operands[STATE], addresses[:8])

    def run_on(
        self, state: Tensor | None, addresses: Sequence[int], bounds: int = 0, slots: int = 0
    ) -> tuple[Tensor, Tensor]:
        empty = empty_strided["cpu"]
        o = empty(*self._o)
        final = state if self._final is None else empty(*self._final)
        assert final is not None
        if self._run(self._problem, self._pack(*addresses, o.data_ptr(), final.data_ptr(), bounds, slots)):
            raise MemoryError("no memory for the rows of a call of linear attention")
        return o, final


def prepare_recurrence(call: calls.Call, bounds: Tensor | None, *, overwrite: bool) -> Launch | None:
    """What computes as :func:`kdacompile.lowering.run_linear_attention`, on plain tensors and without gradients; None
    where the kernel does not run such calls here. Nothing that the caller has is written before it is called.

    ``bounds``: of :func:`bounds_of`; ``overwrite``: the final state takes the place of ``initial_state`` where that is
    memory of its own. A pool of states is taken in no other case.
    """
    if not reads(call):
        return None
    operands = [getattr(call, name) for name in OPERANDS]
    addresses = addresses_of(operands)
    state = call.initial_state
    inside = overwrite and state is not None and state.dtype is call.state_dtype and not overlaps_itself(state)
    inside = inside and not shares_memory(state, addresses)
    slots = None if call.state_indices is None else call.state_indices.long().contiguous()
    if slots is not None and not inside:
        return None
    sequences = call.q.shape[0] if bounds is None else len(bounds) - 1
    prepared = Prepared(call.having({"out_dtype": call.q.dtype}), sequences=sequences, inside=inside)

    def launch() -> tuple[Tensor, Tensor]:
        return prepared.run_on(state, addresses, address(bounds), address(slots))

    return launch


def bounds_of(call: calls.Call) -> Tensor | None:
    """The bounds of packed sequences, checked, as the kernels read them."""
    return None if call.cu_seqlens is None else torch.tensor(sequence_bounds(call.cu_seqlens, call.q.shape[1]))
