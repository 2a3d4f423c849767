"""Which kernels run a prepared call on an Ascend NPU, and how triton-ascend launches the emitted ones."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .. import pools
from ..adjoint import GradientKernels, Gradients
from ..attention_calls import AttentionImplementation
from ..calls import Call, Implementation
from ..run_attention import Attention
from ..scratch import Scratch
from ..triton.load import load_source
from . import gradients
from .attention_launch import decline as decline_attention
from .attention_launch import run as run_attention
from .emit import FIRST
from .launch import Launch, Launcher, decline, missing_width, run_chunks, run_step, target_of_arch
from .operators import GatedDeltaRuleOperators
from .prepare import single


def triton_launch(launch: Launch) -> None:
    """Compile (once, triton keeps what it has compiled) and launch with triton-ascend, on the current stream."""
    kernel: Any = getattr(load_source(launch.module.name, launch.module.source), launch.kernel.name)
    kernel[(launch.grid,)](**launch.arguments, **launch.constants, **launch.kernel.options)


def missing() -> str | None:
    """Why triton-ascend cannot launch anything here; the triton of other devices has the same name."""
    if find_spec("triton") is None or find_spec("triton.backends.ascend") is None:
        return "triton-ascend is not installed"
    return None


def _driver() -> Any:
    return import_module("triton.runtime.driver").driver.active


@cache
def cube_cores() -> int:
    """Cube cores of the current device."""
    return int(_driver().utils.get_device_properties(torch.accelerator.current_device_index())["num_aicore"])


@cache
def planned_for() -> str:
    """The target whose plans suit the current device."""
    return target_of_arch(str(_driver().get_current_target().arch))


MOST_STEP = 8  # tokens: more are done as a chunk, which costs the same for any number of them


class EmittedKernels:
    """:class:`kdacompile.lowering.calls.Implementation`: the emitted kernels.

    ``launch`` stands in for triton-ascend, ``cores`` and ``target`` for what it knows of its device.
    """

    name = "triton-ascend"

    def __init__(self, launch: Launcher | None = None, cores: int = 0, target: str = FIRST) -> None:
        self._launch, self._cores, self._target = launch, cores, target

    def declines(self, call: Call) -> str | None:
        if self._launch is None and (reason := missing()):
            return reason
        return decline(call.q.shape[-1], call.v.shape[-1], call.compute_dtype) or None

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """A few tokens of every request, as a speculative step has them, go through the kernel of steps."""
        if call.cu_seqlens is None and call.q.shape[1] <= MOST_STEP:
            return self.step(call, None, scratch)
        target = planned_for() if self._launch is None else self._target
        o, state = run_chunks(single(call), **self._device(), scratch=scratch, target=target)
        return o.to(call.out_dtype), state

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """In place where the state is fp32 and contiguous, and its sizes are powers of two in a pool; another one is
        copied to fp32 and back, of a pool the slots that are named."""
        direct = state is not None and state.dtype is torch.float32 and state.is_contiguous()
        if state is not None and call.state_indices is not None and (not direct or any(missing_width(call))):
            o = pools.step_apart(call, lambda own: run_step(single(own), **self._device()))
            return o.to(call.out_dtype), state
        o, new = run_step(single(call), **self._device(), out=state if direct else None)
        if state is not None and not direct:
            state.copy_(new)
        return o.to(call.out_dtype), new if state is None else state

    def _device(self) -> dict[str, Any]:
        return {"cores": self._cores or cube_cores(), "launch": self._launch or triton_launch}


class EmittedGradients:
    """:class:`kdacompile.lowering.adjoint.GradientKernels`: the emitted kernels of the adjoint.

    ``launch`` and ``cores`` stand in for triton-ascend and its device.
    """

    name = "triton-ascend"

    def __init__(self, launch: Launcher | None = None, cores: int = 0) -> None:
        self._launch, self._cores = launch, cores

    def declines(self, call: Call) -> str | None:
        if self._launch is None and (reason := missing()):
            return reason
        if self._launch is None and planned_for() != FIRST:
            return "gradients are planned for the 910B"
        return gradients.declines(call)

    def gradients(
        self, call: Call, grad_o: Tensor | None, grad_state: Tensor | None, scratch: Scratch | None = None
    ) -> Gradients:
        cores, launch = self._cores or cube_cores(), self._launch or triton_launch
        return gradients.gradients(call, grad_o, grad_state, cores=cores, launch=launch, scratch=scratch)


class EmittedAttention:
    """:class:`kdacompile.lowering.attention_calls.AttentionImplementation`: the emitted kernels of latent attention.

    ``launch`` and ``cores`` stand in for triton-ascend and its device.
    """

    name = "triton-ascend"

    def __init__(self, launch: Launcher | None = None, cores: int = 0) -> None:
        self._launch, self._cores = launch, cores

    def declines(self, call: Attention) -> str | None:
        if self._launch is None and (reason := missing()):
            return reason
        return decline_attention(call)

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        return run_attention(call, self._cores or cube_cores(), self._launch or triton_launch, scratch)


# In the order they are asked. What none of them takes is the torch executor's.
IMPLEMENTATIONS: list[Implementation] = [GatedDeltaRuleOperators(), EmittedKernels()]
ADJOINTS: list[GradientKernels] = [EmittedGradients()]
ATTENTION: list[AttentionImplementation] = [EmittedAttention()]


def choose(call: Call) -> Implementation | None:
    """The first implementation that takes the call; none on another out-of-tree device."""
    if call.q.device.type != "npu":
        return None
    return next((kernels for kernels in IMPLEMENTATIONS if kernels.declines(call) is None), None)


def choose_adjoint(call: Call) -> GradientKernels | None:
    """The first implementation that has the gradients of the call."""
    if call.q.device.type != "npu":
        return None
    return next((kernels for kernels in ADJOINTS if kernels.declines(call) is None), None)


def choose_attention(call: Attention) -> AttentionImplementation | None:
    """The same for a call of MLA."""
    if call.q.device.type != "npu":
        return None
    return next((kernels for kernels in ATTENTION if kernels.declines(call) is None), None)
