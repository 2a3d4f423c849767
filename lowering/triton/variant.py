"""What decides the text of the kernels: the row of the family, what is fused into its loads, and what is optional."""

from __future__ import annotations

from dataclasses import dataclass

from ..calls import Call
from ..ir import Program
from ..linear_attention import linear_attention_program


@dataclass(frozen=True)
class Variant:
    """One emitted source. Sizes, dtypes and strides are not part of it; Triton specialises on those.

    ``rate`` and ``bias``: whether A_log and dt_bias are given. ``state``: whether there is an initial state;
    ``pool``: whether it is a slot of a pool.
    """

    gate: str
    delta: bool
    beta: bool
    gate_fn: str = "log"
    rate: bool = False
    bias: bool = False
    sigmoid_beta: bool = False
    l2norm: bool = False
    state: bool = False
    packed: bool = False
    pool: bool = False
    form: str = "chunk"

    @classmethod
    def of(cls, call: Call, form: str = "chunk") -> Variant:
        return cls(
            call.gate,
            call.delta,
            call.beta is not None,
            "log" if call.gate == "none" else call.gate_fn,
            call.A_log is not None,
            call.dt_bias is not None,
            call.sigmoid_beta and call.beta is not None,
            call.qk_l2norm_eps > 0.0,
            call.initial_state is not None,
            call.cu_seqlens is not None,
            call.state_indices is not None,
            form,
        )

    @property
    def program(self) -> Program:
        """The tile program; its gate port holds log gates whatever the gate function, which the load applies."""
        return linear_attention_program(self.gate, self.delta, beta=self.beta, form=self.form)

    @property
    def name(self) -> str:
        words = [self.program.name, self.form]
        words += [] if self.gate_fn == "log" else [self.gate_fn]
        words += [flag for flag in ("sigmoid_beta", "l2norm", "state", "packed", "pool") if getattr(self, flag)]
        return "_".join(words)
