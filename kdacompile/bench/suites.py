"""What is measured: a suite is a table of cases. A new suite is a new entry here."""

from __future__ import annotations

from dataclasses import dataclass

_KIMI = "transformers.models.kimi_linear.modeling_kimi_linear"
_QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"


ROUNDS = 5
"""In which contenders take turns."""


@dataclass(frozen=True)
class Goal:
    """How many times better than Inductor alone ours is meant to be; None where there is no mark."""

    first_call: float | None = None
    run: float | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Case:
    """One function of the transformers signature (q, k, v, g, beta, ...), on one shape, in fp32."""

    name: str
    module: str
    function: str
    gate: str  # "channel": g is [B, T, H, K]; "token": g is [B, T, H]
    length: int
    goal: Goal = Goal()
    batch: int = 1
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    train: bool = False  # forward and backward


@dataclass(frozen=True)
class Suite:
    """Cases that share a device, a thread count and their contenders.

    On one thread the time of the processor is taken, which other processes do not lengthen. ``unrolled``: the longest
    sequence that is given to Inductor alone, which compiles a loop turn by turn.
    """

    device: str
    threads: int
    cases: tuple[Case, ...]
    contenders: tuple[str, ...] = ("kda", "op", "eager", "inductor")
    title: str = ""
    unrolled: int | None = None
    packages: tuple[str, ...] = ("transformers",)  # what the cases import beyond torch

    def contenders_of(self, case: Case) -> tuple[str, ...]:
        too_long = self.unrolled is not None and case.length > self.unrolled
        return tuple(name for name in self.contenders if not (too_long and name == "inductor"))


def _gdn(name: str, length: int, *, train: bool = False) -> Case:
    return Case(f"{name}-{length}", _QWEN, "torch_chunk_gated_delta_rule", "token", length, train=train)


SUITES: dict[str, Suite] = {
    "cpu": Suite(
        device="cpu",
        threads=2,
        cases=(
            Case("kda-chunk", _KIMI, "chunk_kimi_delta_attention", "channel", 256, Goal(10, 3, 4)),
            Case("gdn-chunk", _QWEN, "torch_chunk_gated_delta_rule", "token", 1024, Goal(5, 1.5)),
            Case("kda-recurrent", _KIMI, "recurrent_kimi_delta_attention", "channel", 256, Goal(20, 3)),
            Case("gdn-recurrent", _QWEN, "torch_recurrent_gated_delta_rule", "token", 256, Goal(20, 3)),
        ),
    ),
    "lengths": Suite(
        device="cpu",
        threads=1,
        cases=(
            *(_gdn("forward", length) for length in (256, 512, 1024, 2048, 4096)),
            *(_gdn("training", length, train=True) for length in (128, 256, 512, 1024, 2048)),
        ),
        contenders=("kda", "eager", "inductor"),
        title="Gated delta rule of transformers, 4 heads of 64, fp32, one thread, processor time",
        unrolled=512,
    ),
}
