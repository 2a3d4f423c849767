"""Which kernels run a call on a CUDA device: hand-tuned ones where they take it, else the emitted ones."""

from __future__ import annotations

from .adjoint import GradientKernels
from .attention_calls import AttentionGradients, AttentionImplementation
from .calls import Call, Implementation
from .cudnn import CudnnAttention
from .hopper import HopperDecode, HopperGradients, HopperKernels
from .run_attention import Attention
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


def choose_attention(call: Attention) -> AttentionImplementation | None:
    """The first implementation that takes the call of MLA."""
    return next((kernels for kernels in ATTENTION if kernels.declines(call) is None), None)


def choose_gradients(call: Attention) -> AttentionGradients | None:
    """The first implementation that has the gradients of the call of MLA."""
    return next((kernels for kernels in GRADIENTS if kernels.declines(call) is None), None)


def declined(call: Call) -> dict[str, str]:
    """Why the implementations that do not take the call do not, by name."""
    reasons = {kernels.name: kernels.declines(call) for kernels in IMPLEMENTATIONS}
    return {name: reason for name, reason in reasons.items() if reason is not None}
