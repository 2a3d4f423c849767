"""The linear-attention family: one row per pattern, with one step of its recurrence; o_t = scale * S_t^T q_t for all.

With a delta term the old value under k_t is replaced by v_t, by a share b_t; without, values are added. A gate is one
decay per token, head and channel ("channel"), per token and head ("token") or per head alone ("head").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """``gates`` are the kinds of gate it covers; ``equation`` is one step of the recurrence, per head."""

    name: str
    title: str
    equation: str
    gates: tuple[str, ...]
    delta: bool
    source: str

    @property
    def gate(self) -> str:
        return self.gates[0]


FAMILY: tuple[Pattern, ...] = (
    Pattern(
        name="kda",
        title="Kimi Delta Attention (KDA)",
        equation="S_t = (I - b_t k_t k_t^T) diag(exp g_t) S_{t-1} + b_t k_t v_t^T,  g_t in R^K",
        gates=("channel",),
        delta=True,
        source="Kimi Linear, arXiv 2510.26692, eq. 1",
    ),
    Pattern(
        name="gated_delta_rule",
        title="Gated delta rule (GDN)",
        equation="S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,  g_t in R",
        gates=("token", "head"),
        delta=True,
        source="Gated DeltaNet, arXiv 2412.06464, eq. 10",
    ),
    Pattern(
        name="delta_rule",
        title="Delta rule (DeltaNet)",
        equation="S_t = (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T",
        gates=("none",),
        delta=True,
        source="DeltaNet, arXiv 2406.06484, eq. 2",
    ),
    Pattern(
        name="gla",
        title="Gated linear attention (GLA)",
        equation="S_t = diag(exp g_t) S_{t-1} + k_t v_t^T,  g_t in R^K",
        gates=("channel",),
        delta=False,
        source="GLA, arXiv 2312.06635, eq. 3",
    ),
    Pattern(  # in Mamba-2's names: q = C, k = B, v = dt * x, g = dt * A
        name="simple_gla",
        title="Simple GLA, Mamba-2 SSD",
        equation="S_t = exp(g_t) S_{t-1} + k_t v_t^T,  g_t in R",
        gates=("token",),
        delta=False,
        source="Mamba-2, arXiv 2405.21060, eq. 16",
    ),
    Pattern(
        name="retention",
        title="Retention, lightning attention",
        equation="S_t = exp(g) S_{t-1} + k_t v_t^T,  g in R, the same for all tokens",
        gates=("head",),
        delta=False,
        source="RetNet, arXiv 2307.08621, eq. 6; lightning attention, arXiv 2401.04658",
    ),
    Pattern(  # feature maps on q and k stay outside
        name="linear_attention",
        title="Linear attention",
        equation="S_t = S_{t-1} + k_t v_t^T",
        gates=("none",),
        delta=False,
        source="Katharopoulos et al., arXiv 2006.16236, eq. 18, without its normaliser",
    ),
)


@dataclass(frozen=True)
class Form:
    """A recurrence that the ops of ``names`` compute with tokens arranged otherwise; reports call it by those names."""

    title: str
    names: tuple[str, ...]
    equation: str
    source: str

    @property
    def rows(self) -> list[Pattern]:
        return [row for row in FAMILY if row.name in self.names]


FORMS: tuple[Form, ...] = (
    Form(  # n tokens of the delta rule each: the gate of the first alone is not 0, the last alone is read
        title="Gated DeltaProduct, n writes a token",
        names=("kda", "gated_delta_rule", "delta_rule"),
        equation="S_t = W_tn(.. W_t1(diag(exp g_t) S_{t-1})),  W_tj(S) = (I - b_tj k_tj k_tj^T) S + b_tj k_tj v_tj^T",
        source="DeltaProduct, arXiv 2502.10297, eq. 3",
    ),
    Form(  # the op reads the state of the token before; the bonus is computed beside it
        title="RWKV-5 and 6, a bonus u on a token's own write",
        names=("gla", "simple_gla", "linear_attention"),
        equation="o_t = (S_{t-1} + diag(u) k_t v_t^T)^T q_t,  S_t as in its row",
        source="RWKV-5 and 6, arXiv 2404.05892, eq. 16 to 19",
    ),
    Form(  # the same, with nothing beside the op but the decay
        title="A state read before the token's own write",
        names=tuple(row.name for row in FAMILY),
        equation="o_t = S_{t-1}^T q_t,  or o_t = (diag(exp g_t) S_{t-1})^T q_t,  S_t as in its row",
        source="those of its rows",
    ),
)


def pattern_of(gate: str, *, delta: bool) -> Pattern:
    """The row for a kind of gate (none, head, token, channel) with or without the delta term."""
    return next(row for row in FAMILY if row.delta == delta and gate in row.gates)
