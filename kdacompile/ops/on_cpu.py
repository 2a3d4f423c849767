"""The C kernels of the recurrence and of MLA as the ops' on a CPU: calls like one before fill in addresses and start.

Finding out what a call needs takes the host three times what starting the kernel does, and is most of what a step or a
short prompt costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from kdacompile.containment import contain
from kdacompile.lowering.calls import Call
from kdacompile.lowering.cpu import Prepared, reads
from kdacompile.lowering.cpu.attention import choose_attention
from kdacompile.lowering.cpu.operands import addresses_of, overlaps_itself
from kdacompile.lowering.cpu.recurrence import OPERANDS
from kdacompile.lowering.cpu.small_attention import SMALL, PreparedAttention
from kdacompile.lowering.operands import operands as operands_of
from kdacompile.lowering.recorded import MOST, Operands, Results, signature_of
from kdacompile.lowering.run import is_any_watched
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch, shares_memory
from kdacompile.ops.dispatch import Known
from kdacompile.ops.fused import FusedAttention, FusedKernels, Run
from kdacompile.ops.kernels import run_mla
from kdacompile.ops.signature import LINEAR_ATTENTION, LINEAR_ATTENTION_STEP, LINEAR_ATTENTION_STEP_, MLA

_NAMES = tuple(operand.name for operand in operands_of(Call))


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
        return None if reads(call) else "the C kernel does not run such calls here"

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, HV, V]`` and the final state, both contiguous and fresh."""
        return self.step(call, None, scratch)

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """The same for any number of tokens; the new state goes into ``state`` if given, which is the initial one."""
        prepared = prepared_call(call, {}, state is not None)
        operands = [getattr(call, name) for name in OPERANDS]
        addresses = addresses_of(operands)
        if prepared is not None:
            return prepared.run(operands, addresses)
        o, final = Prepared(call).run(operands, addresses)
        assert state is not None
        return o, state.copy_(final)


def prepared_call(call: Call, options: Mapping[str, Any], inside: bool) -> Prepared | None:
    """Calls like this one; None where the new state cannot be written as it comes."""
    state = call.initial_state
    if inside and (state is None or overlaps_itself(state)):
        return None
    return Prepared(call, inside=inside, **options)


RECURRENCE = CpuRecurrence()


def choose(call: Call) -> CpuRecurrence | None:
    """What takes a call; the device-independent kernels do the rest."""
    return RECURRENCE if RECURRENCE.declines(call) is None else None


class CpuKernels(FusedKernels):
    """Remembers calls that the C kernel took."""

    def __init__(self) -> None:
        super().__init__(choose)
        self._prepared: dict[Hashable, Prepared | None] = {}

    def launched(
        self,
        run: Run,
        operands: Operands,
        options: dict[str, Any],
        *,
        multiplied: Sequence[Tensor] = (),
        written: int | None = None,
    ) -> Results:
        key, addresses = signature_of((run.__name__, *options.items()), operands, written)
        prepared = None if is_any_watched(operands) else self._prepared.get(key)
        if prepared is not None:
            return prepared.run(operands, addresses)
        results = run(Scratch(), operands, options)
        if key not in self._prepared:
            if len(self._prepared) >= MOST:
                self._prepared.clear()
            self._prepared[key] = contain(
                "keeping a kind of call", lambda: self._found(run, operands, options, written), lambda _: None
            )
        return results

    def known(self, run: Run, written: int | None = None) -> Known:
        return lambda operands, options: self._found(run, operands, options, written)

    def _found(self, run: Run, operands: Operands, options: dict[str, Any], written: int | None) -> Prepared | None:
        """Calls like one that was run; None where they are not the C kernel's."""
        layout = {name: value for name, value in options.items() if name == "o_layout"}
        others = {name: value for name, value in options.items() if name not in layout}
        call: Call = _SIGNATURES[run.__name__].call_of(operands, others)
        took = RECURRENCE.name not in self._failed and RECURRENCE.declines(call) is None
        if took and (written is None or not shares_memory(operands[written], addresses_of(operands))):
            return prepared_call(call, layout, written is not None)
        return None


_SIGNATURES = {
    "_sequence": LINEAR_ATTENTION, "_step": LINEAR_ATTENTION_STEP, "_inplace_step": LINEAR_ATTENTION_STEP_,
}  # fmt: skip


KERNELS = CpuKernels()


# -- latent attention -------------------------------------------------------------------------------------------------


class SmallAgain:
    """A small call of MLA on other operands like its own, over a cache that may be longer or shorter."""

    alignment, uses_torch, free = PreparedAttention.alignment, PreparedAttention.uses_torch, PreparedAttention.free

    def __init__(self, call: Attention, options: dict[str, Any]) -> None:
        self._prepared, self._options = PreparedAttention(call), options

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
