"""When one token of linear attention is faster as Inductor compiles the model's own code than as an op, on a CPU.

Inductor fuses a step with what stands around it; an op is a call of some 6 us that cuts that in two, 10 to 20 us in
all. What it saves are passes over the state. So its size decides: below so many numbers of all requests and heads
together, by the kind of gate and the delta term, whole layers of transformers' models took longer with the op, in
fp32 and bf16 on one thread (docs/performance.md has the rows, ``python -m tests.models.small_layers --states`` measures
them).
"""

from __future__ import annotations

WORTH = {
    ("token", False): 1 << 16,  # Mamba-2
    ("head", False): 1 << 18,  # lightning attention
    ("none", False): 1 << 18,
}
OTHERS = 1 << 17
"""The gated delta rule, KDA, and what was not measured."""


def least_states(gate: str, delta: bool) -> int:
    """Numbers of the states of all requests and heads from which on the op is worth its call."""
    return WORTH.get((gate, delta), OTHERS)
