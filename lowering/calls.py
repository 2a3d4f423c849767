"""One call of linear attention as a device's kernels receive it: tensors as the model has them, nothing prepared.

The torch executor is handed prepared tensors (fp32, l2-normalised, log gates); a kernel prepares them as it loads
them, so that every input is read once. An :class:`Implementation` is a set of kernels that says which calls it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .scratch import Scratch

GATE_FNS = ("log", "factor", "softplus", "sigmoid", "logsigmoid")
"""Gate functions of ``kdacompile.ops.semantics`` that CUDA kernels compute as they load g; they decline all others."""


@dataclass(frozen=True)
class Call:
    """The operands and options of ``kdacompile::linear_attention``, checked by the op.

    q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, any strides; g by ``gate``: None | ``[HV]`` | ``[B, T, HV]`` |
    ``[B, T, HV, K]``, before its gate function; beta ``[B, T, HV]``; initial_state ``[N, HV, K, V]``; A_log ``[HV]``;
    dt_bias ``[HV]`` or ``[HV, K]``; cu_seqlens ``[N + 1]`` on q's device. ``out_dtype`` is that of o.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    delta: bool
    gate: str
    gate_fn: str
    gate_scale: float
    sigmoid_beta: bool
    qk_l2norm_eps: float
    chunk_size: int
    out_dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.initial_state, self.A_log, self.dt_bias)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What q, k and v promote to: the dtype of the operands of matrix products."""
        return torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), self.v.dtype)

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


class Implementation(Protocol):
    """Kernels for some calls. ``declines`` names what is in the way, or is None where ``run`` will do."""

    name: str

    def declines(self, call: Call) -> str | None: ...

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` in fp32, both contiguous and fresh. T is not 0."""
        ...

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """One token (T = 1); the new state goes into ``state`` if given, which may be the initial state itself."""
        ...
