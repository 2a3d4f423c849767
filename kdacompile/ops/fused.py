"""Serving the semantic ops on a device that has fused kernels, with the device-independent ones for the rest.

Kernels that fail are not asked again; calls like earlier ones only launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kdacompile.containment import contain
from kdacompile.lowering import pools
from kdacompile.lowering.adjoint import GradientKernels
from kdacompile.lowering.attention_calls import AttentionGradients, AttentionImplementation
from kdacompile.lowering.calls import Call, Implementation
from kdacompile.lowering.operands import operands as operands_of
from kdacompile.lowering.recorded import Memory, Operands, Results
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch, shares_memory
from kdacompile.ops import definitions, kernels
from kdacompile.ops.dispatch import Kernel, Known, differentiation
from kdacompile.ops.kernels import gradients_of, mla_backward_kernel, run_mla
from kdacompile.ops.signature import LINEAR_ATTENTION, LINEAR_ATTENTION_STEP, LINEAR_ATTENTION_STEP_, MLA, Signature

T = TypeVar("T")


class Named(Protocol):
    name: str


K = TypeVar("K", bound=Named)
Run = Callable[[Scratch, Operands, dict[str, Any]], Results]


class Serving:
    """``remember``: whether the kernels do everything through their scratch memory, so that calls like earlier ones
    only launch.
    """

    def __init__(self, *, remember: bool) -> None:
        self._memory = Memory() if remember else None
        self._failed: set[str] = set()
        """Kernels that met an error of ours: not asked again."""

    def launched(
        self,
        run: Run,
        operands: Operands,
        options: dict[str, Any],
        *,
        multiplied: Sequence[Tensor] = (),
        written: int | None = None,
    ) -> Results:
        """``run``, or what it did for operands like these before.

        ``multiplied``: operands of matrix products, which round as the user asked torch for where they are fp32;
        ``written``: the operand that it writes into.
        """
        if self._memory is None:
            return run(Scratch(), operands, options)
        single = torch.float32 in {x.dtype for x in multiplied} if multiplied else False
        precision = torch.get_float32_matmul_precision() if single else None
        decides = (run.__name__, precision, *options.items())
        return self._memory.run(decides, operands, lambda scratch: run(scratch, operands, options), written)

    def known(self, run: Run, written: int | None = None) -> Known | None:
        """What finds a remembered call of ``run``'s op, where torch's precision of fp32 products has no say."""
        memory = self._memory
        if memory is None:
            return None
        return lambda operands, options: memory.known((run.__name__, None, *options.items()), operands, written)

    def chosen(self, choose: Callable[[], K | None], what: str = "") -> K | None:
        """What takes a call; None after an error of ours, too. ``what``: for ``attempted``."""
        found = contain("choosing a kernel", choose, lambda _: None)
        return None if found is None or what + found.name in self._failed else found

    def attempted(
        self, kernels: K | None, run: Callable[[K], T], scratch: Scratch | None = None, what: str = ""
    ) -> T | None:
        """What the kernels give; None without any and after an error of ours: nothing but fresh tensors has been
        written then. ``what`` they are asked for: those that fail at one thing may do at another.
        """
        if kernels is None:
            return None

        def fail(_: str) -> None:
            self._failed.add(what + kernels.name)
            if scratch is not None:
                scratch.once()

        return contain(f"running the {what}{kernels.name} kernels", lambda: run(kernels), fail)


Choose = Callable[[Call], Implementation | None]
ChooseGradients = Callable[[Call], GradientKernels | None]
BACKWARD = "backward "


class FusedKernels(Serving):
    """The kernels of the ops over whatever ``choose`` finds for a call, and ``gradients`` for their backward ops.

    ``remember`` as of :class:`Serving`. Without ``gradients`` the backward ops are the device-independent ones: they
    differentiate the torch executor.
    """

    def __init__(self, choose: Choose, gradients: ChooseGradients | None = None, *, remember: bool = False) -> None:
        super().__init__(remember=remember)
        self._choose, self._gradients = choose, gradients
        self._compiled: set[tuple[Any, ...]] = set()
        """Kinds of in-place steps and of backward ops that have run."""

    def serve(self, device: str) -> None:
        """Register on a device's dispatch key ("CUDA", "PrivateUse1")."""
        definitions.add_kernel(LINEAR_ATTENTION.name, device, self.sequence, self.known(self._sequence))
        definitions.add_kernel(LINEAR_ATTENTION_STEP.name, device, self.step, self.known(self._step))
        known = self.known(self._inplace_step, LINEAR_ATTENTION_STEP_.writes)
        definitions.add_kernel(LINEAR_ATTENTION_STEP_.name, device, self.inplace_step, known)
        if self._gradients is not None:
            for signature in (LINEAR_ATTENTION, LINEAR_ATTENTION_STEP):
                definitions.add_kernel(signature.backward_name, device, self._backward_of(signature, self._gradients))

    def sequence(self, *operands: Any, **options: Any) -> Results:
        """``kdacompile::linear_attention``."""
        return self.launched(self._sequence, operands, options, multiplied=operands[:3])

    def step(self, *operands: Any, **options: Any) -> Results:
        """``kdacompile::linear_attention_step``."""
        return self.launched(self._step, operands, options)

    def inplace_step(self, *operands: Any, **options: Any) -> Tensor:
        """``kdacompile::linear_attention_step_``: the state is read and written once, where it lies."""
        return self.launched(self._inplace_step, operands, options, written=LINEAR_ATTENTION_STEP_.writes)[0]

    def _sequence(self, scratch: Scratch, operands: Operands, options: dict[str, Any]) -> Results:
        call: Call = LINEAR_ATTENTION.checked(operands, options).with_bounds_at_hand()
        chosen = self._chosen(call) if call.q.shape[1] else None
        found = self.attempted(chosen, lambda it: it.run(call, scratch), scratch)
        return found or kernels.run_sequence(call)

    def _step(self, scratch: Scratch, operands: Operands, options: dict[str, Any]) -> Results:
        call: Call = LINEAR_ATTENTION_STEP.checked(operands, options)
        chosen = self._chosen(call)
        found = self.attempted(chosen, lambda it: it.step(call, None, scratch), scratch)
        return found or kernels.run_step(call)

    def _inplace_step(self, scratch: Scratch, operands: Operands, options: dict[str, Any]) -> Results:
        call: Call = LINEAR_ATTENTION_STEP_.checked(operands, options)
        # A kernel's blocks overwrite the state while others still read.
        addresses = (x.data_ptr() for x in operands if x is not None)
        chosen = None if shares_memory(call.initial_state, addresses) else self._chosen(call)
        if chosen is None:
            return (kernels.run_inplace_step(call),)
        kind = _kind(chosen.name, options, operands)
        if kind in self._compiled:
            return chosen.step(call, call.initial_state, scratch)
        # Kernels are compiled for every kind of call. One that fails then may have written: the state is put back.
        state = call.initial_state
        assert state is not None  # its schema says so
        before = pools.gather(state, call.state_indices)
        step = self.attempted(chosen, lambda it: it.step(call, state, scratch), scratch)
        if step is None:
            pools.put(state, call.state_indices, before)
            return (kernels.run_inplace_step(call),)
        self._compiled.add(kind)
        return step

    def _backward_of(self, signature: Signature, choose: ChooseGradients) -> Kernel:
        """The backward op of ``signature``'s."""
        otherwise = kernels.backward_kernel_of(signature)

        def backward(*arguments: Any, wanted: list[bool], **options: Any) -> list[Tensor]:
            grads, inputs = signature.of_backward(arguments)
            call: Call = signature.call(*inputs, **options)
            if not (call.q.numel() and call.v.numel() and any(grad is not None for grad in grads)):
                return otherwise(*arguments, wanted=wanted, **options)
            chosen = self.chosen(lambda: choose(call), BACKWARD)
            kind = _kind(signature.backward_name, options, arguments)
            scratch = Scratch(first=kind not in self._compiled)
            with differentiation():  # of what stands in front of the recurrence, where kernels leave it to torch
                given = call.with_bounds_at_hand()
                found = self.attempted(chosen, lambda it: it.gradients(given, *grads, scratch=scratch), what=BACKWARD)
            if found is None:
                return otherwise(*arguments, wanted=wanted, **options)
            self._compiled.add(kind)
            by_name = dict(zip((operand.name for operand in operands_of(Call)), found, strict=False))
            asked = zip(signature.operands, wanted, strict=False)
            pulled = (by_name[operand.name] for operand, want in asked if want)
            return [grad for grad in pulled if grad is not None]

        return backward

    def _chosen(self, call: Call) -> Implementation | None:
        return self.chosen(lambda: self._choose(call))


def _kind(name: str, options: dict[str, Any], operands: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """What kernels are compiled for: the options, and of every operand what they look at."""
    seen = (None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in operands)
    return (name, *options.items(), *seen)


# -- latent attention -------------------------------------------------------------------------------------------------

ChooseAttention = Callable[[Attention], AttentionImplementation | None]
ChooseAttentionGradients = Callable[[Attention], AttentionGradients | None]


class FusedAttention(Serving):
    """The kernels of ``kdacompile::mla`` and its gradients, over what ``choose`` and ``gradients`` find for a call."""

    def __init__(
        self, choose: ChooseAttention, gradients: ChooseAttentionGradients | None = None, *, remember: bool = False
    ) -> None:
        super().__init__(remember=remember)
        self._choose, self._gradients = choose, gradients

    def serve(self, device: str) -> None:
        """Register on a device's dispatch key ("CUDA", "PrivateUse1")."""
        definitions.add_kernel(MLA.name, device, self.attention, self.known(self._attention))
        definitions.add_kernel(MLA.backward_name, device, self.backward)

    def attention(self, *operands: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """``kdacompile::mla``."""
        o, lse = self.launched(self._attention, operands, options, multiplied=operands[:1])
        return o, lse

    def _attention(self, scratch: Scratch, operands: Operands, options: dict[str, Any]) -> Results:
        call: Attention = MLA.checked(operands, options)
        if 0 in (call.q.numel(), call.latent.numel(), call.width):
            return run_mla(call)
        chosen = self.chosen(lambda: self._choose(call))
        return self.attempted(chosen, lambda it: it.run(call, scratch), scratch) or run_mla(call)

    def backward(self, *arguments: Any, wanted: list[bool], **options: Any) -> list[Tensor]:
        """``kdacompile::mla_backward``."""
        choose, ((grad_o, grad_lse, o, lse), operands) = self._gradients, MLA.of_backward(arguments)
        if grad_o is not None and grad_lse is None and grad_o.numel() and choose is not None:
            call = Attention(*operands, **options, out_dtype=o.dtype)

            def gradients(chosen: AttentionGradients) -> list[Tensor]:
                return gradients_of(call, wanted, lambda names: chosen.gradients(call, o, lse, grad_o, names))

            found = self.attempted(self.chosen(lambda: choose(call)), gradients)
            if found is not None:
                return found
        return mla_backward_kernel(*arguments, wanted=wanted, **options)
