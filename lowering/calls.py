"""One call of linear attention as a device's kernels receive it: tensors as the model has them, nothing prepared.

The torch executor is handed prepared tensors (fp32, l2-normalised, log gates); a kernel prepares them as it loads
them, so that every input is read once. An :class:`Implementation` is a set of kernels that says which calls it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Annotated, Any, Protocol, cast

import torch
from torch import Tensor

from .gates import KINDS
from .operands import Kind, Operand, Result
from .scratch import Scratch

RECURRENT: tuple[str, ...] = ("q", "k", "v", "g", "beta", "initial_state")
"""The operands of the recurrence itself: those with a gate function or a parameter of it are applied before."""

_PACKED_STATES = "[N, HV, K, V], N sequences in cu_seqlens"
_POOL = "[P, HV, K, V], P slots of a pool"


def _gate_layout(call: Call) -> str:
    return KINDS[call.gate]


def _bias_layout(call: Call) -> str:
    return "[HV, K]" if call.gate == "channel" else "[HV]"


def _state_layout(call: Call) -> str:
    if call.state_indices is not None:
        return _POOL
    return "[B, HV, K, V]" if call.cu_seqlens is None else _PACKED_STATES


@dataclass(frozen=True)
class Call:
    """The operand table of ``kdacompile::linear_attention`` and its steps, and one call of them.

    q, k, v and g may have any strides; g is what its gate function is applied to. cu_seqlens packs N sequences in one
    batch entry. With state_indices, of the step in place alone, the state is a pool, see
    :mod:`kdacompile.lowering.pools`. ``out_dtype`` is the dtype of o, v's by default.
    """

    q: Annotated[Tensor, Operand("[B, T, H, K]")]
    k: Annotated[Tensor, Operand("[B, T, H, K]")]
    v: Annotated[Tensor, Operand("[B, T, HV, V]")]
    g: Annotated[Tensor | None, Operand(_gate_layout)]
    beta: Annotated[Tensor | None, Operand("[B, T, HV]")]
    initial_state: Annotated[Tensor | None, Operand(_state_layout, Kind.ANY_FLOAT)]
    A_log: Annotated[Tensor | None, Operand("[HV]")] = None
    dt_bias: Annotated[Tensor | None, Operand(_bias_layout)] = None
    cu_seqlens: Annotated[Tensor | None, Operand("[N + 1]", Kind.INDEX, host=True)] = None
    state_indices: Annotated[Tensor | None, Operand("[B]", Kind.INDEX)] = None
    _: KW_ONLY
    scale: float
    delta: bool
    gate: str
    gate_fn: str = "log"
    gate_scale: float = 1.0
    sigmoid_beta: bool = False
    qk_l2norm_eps: float = 0.0
    chunk_size: int = 0
    out_dtype: torch.dtype = field(default=cast("torch.dtype", None))

    def __post_init__(self) -> None:
        if cast("torch.dtype | None", self.out_dtype) is None:
            object.__setattr__(self, "out_dtype", self.v.dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What q, k and v promote to: the dtype of the operands of matrix products."""
        return torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), self.v.dtype)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of sums and of the state: float64 when q, k or v is, else float32."""
        return torch.float64 if torch.float64 in (self.q.dtype, self.k.dtype, self.v.dtype) else torch.float32

    @property
    def recurrent(self) -> tuple[Tensor | None, ...]:
        """The operands of the recurrence itself."""
        return self.q, self.k, self.v, self.g, self.beta, self.initial_state

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def results(self) -> tuple[Result, Result]:
        """Shape and dtype of o and of the final state."""
        batch, _, heads, width = self.v.shape
        sequences = batch if self.cu_seqlens is None else self.sequences
        state = (sequences, heads, self.k.shape[3], width)
        return (tuple(self.v.shape), self.out_dtype), (state, self.state_dtype)

    def having(self, changes: Mapping[str, Any]) -> Call:
        """As ``dataclasses.replace``, in a tenth of its time: every decoding step makes a call of another."""
        call = object.__new__(Call)
        fields = call.__dict__
        fields.update(self.__dict__)
        fields.update(changes)
        return call

    def with_bounds_at_hand(self) -> Call:
        """The call with cu_seqlens, which may be given on the CPU, on the device of the others."""
        bounds, device = self.cu_seqlens, self.q.device
        return self if bounds is None or bounds.device == device else replace(self, cu_seqlens=bounds.to(device))


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
