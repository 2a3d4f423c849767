"""What the CUDA suite measures, and who runs it."""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("kimi_linear", "qwen3_next")
TUNED_BY_OTHERS = ("softplus", "packed", *MODELS)
"""Kinds whose forward pass launches kernels that FLA tunes for other kinds as well."""


@dataclass(frozen=True)
class Case:
    """One call in bf16, or a model. ``goal``: microseconds of device time to reach.

    ``kind``: "kda" (raw gate, bounded; l2norm and sigmoid of beta fused), "softplus" (the same with Kimi Linear's gate,
    which has no bound), "packed" (that, as sixteen sequences of different lengths in one), "gdn" (log gate), "step"
    (one token of kda, the state overwritten), or one of MODELS: a prompt of ``length`` tokens and decoding steps.
    """

    name: str
    kind: str
    batch: int
    length: int
    heads: int = 32
    value_heads: int = 32
    width: int = 128
    goal: float | None = None


CASES = (
    Case("kda-t8192", "kda", 1, 8192, goal=330),
    Case("kda-h96", "kda", 1, 8192, 96, 96, goal=920),
    Case("kda-b4", "kda", 4, 4096, goal=620),
    Case("kda-t2048", "kda", 1, 2048, goal=105),
    Case("kda-t65536", "kda", 1, 65536, goal=2500),
    Case("kda-h1", "kda", 1, 8191, 1, 1),
    Case("kda-h5", "kda", 1, 8191, 5, 5),
    Case("kda-h12", "kda", 1, 8191, 12, 12),
    Case("kda-odd", "kda", 1, 5001, 5, 5, width=96),
    Case("kda-narrow", "kda", 1, 8192, width=64),
    Case("kda-t256", "kda", 1, 256),
    Case("softplus-t8192", "softplus", 1, 8192),
    Case("packed-t8192", "packed", 1, 8192),
    Case("gdn-t8192", "gdn", 1, 8192, 16, 32, goal=240),
    Case("step-b1", "step", 1, 1, goal=12),
    Case("step-b64", "step", 64, 1),
    Case("step-b256", "step", 256, 1, goal=280),
    Case("kimi-linear", "kimi_linear", 1, 4096),
    Case("qwen3-next", "qwen3_next", 1, 4096),
)

# Where Inductor's capture of the PyTorch function ends within minutes: loops over chunks are unrolled.
_INDUCTOR = ("kda-t256", "step-b1", "step-b64", "step-b256")
# FLA tunes itself anew for each number of heads and width: minutes for figures nobody has a goal for.
_WITHOUT_FLA = ("kda-h1", "kda-h5", "kda-h12", "kda-odd", "kda-narrow")
_MODEL_CONTENDERS = ("eager", "eager+fla", "inductor", "inductor-graphs", "ours", "ours-graphs", "ours+fla")


def contenders(case: Case) -> tuple[str, ...]:
    """Who runs a case.

    "ours" (the op), "portable" (emitted kernels alone), "kda" and "inductor" (backends for the PyTorch function) and
    "fla"; of models "eager", "inductor", "ours" (the backend), with fla installed or with CUDA graphs.
    """
    if case.kind in MODELS:
        return _MODEL_CONTENDERS
    compiled = ("kda", "inductor") if case.name in _INDUCTOR else ("kda",) if case.name == "kda-t8192" else ()
    fla = () if case.name in _WITHOUT_FLA else ("fla",)
    return ("ours", "portable", *compiled, *fla)
