"""Which kernels run a call on a CUDA device: hand-tuned ones where they take it, else the emitted ones."""

from __future__ import annotations

from torch import Tensor

from .adjoint import GradientKernels
from .attention_calls import AttentionGradients, AttentionImplementation
from .calls import Call, Implementation
from .cudnn import CudnnAttention
from .hopper import HopperDecode, HopperGradients, HopperKernels
from .hopper import passes as hopper_passes
from .passes import BackwardPasses, ForwardPasses
from .run_attention import Attention
from .scratch import Scratch
from .triton import TritonDecode, TritonGradients, TritonKernels

# In the order they are asked. What none of them takes is the torch executor's.
IMPLEMENTATIONS: list[Implementation] = [HopperKernels(), TritonKernels()]
ADJOINTS: list[GradientKernels] = [HopperGradients(), TritonGradients()]
ATTENTION: list[AttentionImplementation] = [CudnnAttention(), HopperDecode(), TritonDecode()]
GRADIENTS: list[AttentionGradients] = [CudnnAttention()]


def choose(call: Call) -> Implementation | None:
    """The first implementation that takes the call."""
    return next((kernels for kernels in IMPLEMENTATIONS if kernels.declines(call) is None), None)


def choose_adjoint(call: Call) -> GradientKernels | None:
    """The first implementation that has the gradients of the call."""
    return next((kernels for kernels in ADJOINTS if kernels.declines(call) is None), None)


def cuts_in_two_passes(call: Call, runs: int) -> int:
    """In how many parts each of the ``runs`` of a row's tokens is best cut for two passes; 0 where no kernels do it."""
    return 0 if hopper_passes.declines(call) else hopper_passes.cuts(call, runs)


def forward_passes(call: Call, parts: int) -> ForwardPasses:
    """Of a call that is done in two passes, its rows in so many parts."""
    return hopper_passes.passes(call, parts)


def backward_passes(call: Call, grad_o: Tensor) -> BackwardPasses | None:
    """Of a call with an initial state, if kernels have its gradients."""
    kernels = choose_adjoint(call)
    return kernels.execution(call, grad_o, None, Scratch()) if isinstance(kernels, TritonGradients) else None


def choose_attention(call: Attention) -> AttentionImplementation | None:
    """The first implementation that takes the call of MLA."""
    return next((kernels for kernels in ATTENTION if kernels.declines(call) is None), None)


def choose_gradients(call: Attention) -> AttentionGradients | None:
    """The first implementation that has the gradients of the call of MLA."""
    return next((kernels for kernels in GRADIENTS if kernels.declines(call) is None), None)
