"""The C kernels of the recurrence and of MLA as the ops' on a CPU: calls like one before fill in addresses and start.

Finding out what a call needs takes the host three times what starting the kernel does, and is most of what a step or a
short prompt costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kdacompile.containment import contain
from kdacompile.lowering.calls import Call
from kdacompile.lowering.cpu import Repeated, in_form, runs_recurrence
from kdacompile.lowering.cpu.attention import choose_attention
from kdacompile.lowering.cpu.small_attention import SMALL, Prepared
from kdacompile.lowering.operands import operands as operands_of
from kdacompile.lowering.recorded import Operands, Results
from kdacompile.lowering.run import is_any_watched, run_linear_attention
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops.dispatch import Known
from kdacompile.ops.fused import FusedAttention, FusedKernels, Run
from kdacompile.ops.kernels import prepared, run_mla
from kdacompile.ops.signature import MLA

_NAMES = tuple(operand.name for operand in operands_of(Call))


class Again:
    """The recurrence of a call on other operands like the call's, into the results that stand behind them."""

    def __init__(self, call: Call) -> None:
        self._call = call.having(dict.fromkeys(_NAMES))  # no tensor is kept
        self._repeated: Repeated | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        *operands, o, final = tensors
        assert o is not None and final is not None
        call = prepared(self._call.having(dict(zip(_NAMES, operands, strict=True))))
        start = contain("preparing a call like one before", lambda: self._prepared(call, o, final), lambda _: None)
        if start is not None:
            start()
            return
        for result, found in zip((o, final), run_linear_attention(call), strict=True):
            result.copy_(found)

    def _prepared(self, call: Call, o: Tensor, final: Tensor) -> Callable[[], None]:
        form = in_form(call)
        if self._repeated is None:
            self._repeated = Repeated(call, form, call.q.shape[0])
        return self._repeated.filled(form, o, final)


class CpuRecurrence:
    """Dense calls. Bounds of packed sequences and slots of a pool are read and checked by the host, every time."""

    name = "C"

    def declines(self, call: Call) -> str | None:
        if call.cu_seqlens is not None or call.state_indices is not None:
            return "bounds and slots are read every time"
        if 0 in (call.q.numel(), call.v.numel()):
            return "there is nothing to compute"
        if is_any_watched(tuple(getattr(call, name) for name in _NAMES)):
            return "torch.func follows the torch executor"
        return None if runs_recurrence(call.q, call.state_dtype) else "the C kernel does not run such calls here"

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, HV, V]`` and the final state, both contiguous and fresh."""
        return self.step(call, None, scratch)

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """The same for any number of tokens; the new state goes into ``state`` if given."""
        scratch = Scratch() if scratch is None else scratch
        (shape, dtype), (state_shape, state_dtype) = call.results
        o = scratch.result(shape, state_dtype, call.q.device)
        inside = state is not None and state.dtype is state_dtype and state.is_contiguous()
        final = state if inside else scratch.result(state_shape, state_dtype, call.q.device)
        assert final is not None
        scratch.apply(Again(call), *(getattr(call, name) for name in _NAMES), o, final)
        if state is not None and not inside:
            scratch.apply(Tensor.copy_, state, final)
        return scratch.cast(o, dtype), final


RECURRENCE = CpuRecurrence()


def choose(call: Call) -> CpuRecurrence | None:
    """What takes a call; the device-independent kernels do the rest."""
    return RECURRENCE if RECURRENCE.declines(call) is None else None


class CpuKernels(FusedKernels):
    """Remembers calls of tensors with addresses whose values nobody reads."""

    def __init__(self) -> None:
        super().__init__(choose, remember=True)

    def launched(self, run: Run, operands: Operands, options: dict[str, Any], **how: Any) -> Results:
        read = any(x is not None and not x.dtype.is_floating_point for x in operands)
        if read or is_any_watched(tuple(operands)):
            return run(Scratch(), operands, options)
        return super().launched(run, operands, options, written=how.get("written"))


KERNELS = CpuKernels()


# -- latent attention -------------------------------------------------------------------------------------------------


class SmallAgain:
    """A small call of MLA on other operands like its own, over a cache that may be longer or shorter."""

    alignment, uses_torch, free = Prepared.alignment, Prepared.uses_torch, Prepared.free

    def __init__(self, call: Attention, options: dict[str, Any]) -> None:
        self._prepared, self._options = Prepared(call), options

    def fits(self, operands: Sequence[Any]) -> bool:
        return contain("looking at a call like one before", lambda: self._prepared.fits(operands), lambda _: False)

    def run(self, operands: Sequence[Any], addresses: Sequence[int]) -> tuple[Tensor, Tensor]:
        return contain(
            "preparing a call like one before",
            lambda: self._prepared.run(operands, addresses),
            lambda _: run_mla(MLA.call_of(operands, self._options)),
        )


class CpuAttention(FusedAttention):
    """Remembers small calls."""

    def __init__(self) -> None:
        super().__init__(choose_attention)

    def known(self, run: Run, written: int | None = None) -> Known:
        def small(operands: Sequence[Any], options: dict[str, Any]) -> SmallAgain | None:
            call: Attention = MLA.call_of(operands, options)
            took = SMALL.name not in self._failed and SMALL.declines(call) is None
            return SmallAgain(call, options) if took else None

        return small


ATTENTION = CpuAttention()
