"""A proven region, with everything upstream that the semantic op takes over: what the rewrite needs to know."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kdacompile.patterns.recurrence.candidates import Candidate
from kdacompile.patterns.recurrence.family import Pattern, pattern_of
from kdacompile.patterns.recurrence.roles import Hypothesis, Placement


@dataclass(frozen=True)
class Fused:
    """Arguments of the semantic op, as placements in the functional graph and plain numbers."""

    candidate: Candidate
    inputs: dict[str, Placement]
    output: Placement
    final_state: Placement | None
    sizes: dict[str, int]
    gate: str
    delta: bool
    scale: float
    max_error: float
    gate_rate: float = 1.0
    """What the gate is multiplied by before the op gets it."""
    gate_fn: str = "log"
    gate_scale: float = 1.0
    sigmoid_beta: bool = False
    qk_l2norm_eps: float = 0.0
    decay: tuple[float, ...] = ()
    absorbed: tuple[str, ...] = field(default=())
    upcast: frozenset[str] = frozenset()
    """Roles whose half-precision tensors the op gets in float32, where the model's own upcasts are to be kept."""

    @property
    def pattern(self) -> Pattern:
        return pattern_of(self.gate, delta=self.delta)

    @property
    def mode(self) -> str:
        return "step" if self.sizes["T"] == 1 else "sequence"

    def taking(self, what: str, inputs: dict[str, Placement], **changes: object) -> Fused:
        """This, with ``what`` absorbed: roles moved to ``inputs`` and options changed."""
        absorbed = self.absorbed if what in self.absorbed else (*self.absorbed, what)
        return replace(self, inputs={**self.inputs, **inputs}, absorbed=absorbed, **changes)  # type: ignore[arg-type]


def from_hypothesis(candidate: Candidate, proven: Hypothesis, max_error: float) -> Fused:
    """The match before anything upstream is absorbed."""
    gate = proven.gate
    return Fused(
        candidate=candidate,
        inputs={placement.role: placement for placement in proven.inputs},
        output=proven.output,
        final_state=proven.final_state,
        sizes=proven.sizes,
        gate=gate,
        delta=proven.delta,
        scale=proven.scale,
        max_error=max_error,
        gate_rate=proven.gate_rate,
        gate_fn="factor" if gate != "none" and not proven.decay and proven.gate_form == "factor" else "log",
        decay=proven.decay,
    )
