"""The linear-attention family, written once as a tile program.

Per lane, with state ``S``, ``C`` tokens a chunk and ``G_i = g_1 + ... + g_i`` inside the chunk::

    A_kk[i,j] = b_i sum_d k_id k_jd exp(G_id - G_jd)   i > j        M = (I + A_kk)^-1 diag(b)
    A_qk[i,j] = sum_d q_id k_jd exp(G_id - G_jd)       i >= j       W = M (K exp G)      U = M V
    V' = U - W S
    O  = (Q exp G) S + A_qk V'
    S' = diag(exp G_C) S + (K exp(G_C - G))^T V'

Without the delta term ``V' = diag(b) V`` and neither M nor W exists. Differences of ``G`` never appear in the
program: they are sums over the tokens in between, which stay finite and exact however strong a gate is (``-inf``
included).

A chunk maps the state affinely, ``S' = A S + B``; that is the carry's ``combine``. Everything but V', O and S' is
free of the carry. The rows of the family (KDA, gated delta rule, delta rule, GLA, simple GLA, RetNet, linear
attention) differ only in ``gate`` and ``delta``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .builder import Builder
from .errors import ArgumentError
from .gates import FORMS, KINDS
from .ir import Combine, DType, Per, Program, TileType, Value

ROWS = {
    ("channel", True): "kda",
    ("token", True): "gated_delta_rule",
    ("head", True): "head_gated_delta_rule",
    ("none", True): "delta_rule",
    ("channel", False): "gla",
    ("token", False): "simple_gla",
    ("head", False): "retention",
    ("none", False): "linear_attention",
}


@dataclass(frozen=True)
class _Inputs:
    q: Value | None
    k: Value
    v: Value
    g: Value | None
    beta: Value | None


@dataclass(frozen=True)
class _Chunk:
    """What a chunk computes without reading the state."""

    a_qk: Value | None
    q_gated: Value | None
    k_decayed: Value
    total: Value | None
    u: Value
    w: Value | None


@cache
def linear_attention_program(
    gate: str, delta: bool, *, beta: bool = True, gate_form: str = "log", form: str = "chunk", norm: bool = False
) -> Program:
    """The tile program of one row of the family.

    ``gate``: "none", "head" (one constant a head), "token" or "channel"; ``gate_form``: whether port g holds the log
    gate or the factor exp(g). ``beta``: whether the program has a beta port. ``form``: "chunk" as above, or "token",
    the recurrence itself with one token a step: the decoding step, and the oracle-shaped form for what the chunked
    one cannot differentiate. ``norm``: chunks begin with queries and keys divided by their norms, and rounded.
    """
    if gate not in KINDS or gate_form not in FORMS or form not in ("chunk", "token"):
        raise ArgumentError(f"no such row: gate={gate!r}, gate_form={gate_form!r}, form={form!r}")
    b = Builder(ROWS[gate, delta], axis=form)
    if form == "chunk":
        return _chunk_program(b, gate, delta, beta, gate_form, norm)
    return _token_program(b, gate, delta, beta, gate_form)


def _load(
    b: Builder,
    gate: str,
    beta: bool,
    gate_form: str,
    *,
    rows: str | int = "C",
    query: bool = True,
    norm: bool = False,
) -> _Inputs:
    def tokens(name: str, cols: str | int, heads: str = "value", fill: float = 0.0) -> Value:
        tile = b.input(name, TileType(rows, cols, DType.IO), heads=heads, fill=fill)
        return b.cast(tile, DType.ACC, f"{name}_acc")

    def keys(name: str) -> Value:
        x = tokens(name, "K", "key")
        return b.normalise(x, "l2norm_eps", f"{name}_wide") if norm else x

    q = b.scale(keys("q"), "scale", "q_scaled") if query else None
    k = keys("k")
    k = b.cast(b.cast(k, DType.IO, "k_norm"), DType.ACC, "k_norm_acc") if norm else k
    v = tokens("v", "V")
    g = None if gate == "none" else tokens("g", "K" if gate == "channel" else 1, fill=float(gate_form == "factor"))
    return _Inputs(q, k, v, g, tokens("beta", 1) if beta else None)


def _chunk(b: Builder, x: _Inputs, delta: bool, gate_form: str) -> _Chunk:
    """Emit the part of a chunk that does not read the state."""
    g = None if x.g is None else (b.log(x.g, "g") if gate_form == "factor" else x.g)
    prefix = suffix = total = None
    if g is not None:
        prefix = b.exp(b.cumsum(g, name="G"), "exp_G")
        suffix = b.exp(b.cumsum(g, reverse=True, name="G_rest"), "exp_G_rest")
        total = b.transpose(b.exp(b.reduce(g, "G_C"), "exp_G_C"), "decay")
    a_qk = None if x.q is None else _gram(b, x.q, x.k, g, strict=False, name="A_qk")
    w = None
    if delta:
        a_kk = _gram(b, x.k, x.k, g, strict=True, name="A_kk")
        a_kk = a_kk if x.beta is None else b.mul(a_kk, x.beta, "A_kk")
        m = b.unit_lower_inverse(a_kk, "M")
        m = m if x.beta is None else b.mul(m, b.transpose(x.beta, "beta_row"), "M")
        w = b.dot(m, x.k if prefix is None else b.mul(x.k, prefix, "K_gated"), name="W")
        u = b.dot(m, x.v, name="U")
    else:
        u = x.v if x.beta is None else b.mul(x.v, x.beta, "U")
    k_decayed = x.k if suffix is None else b.mul(x.k, suffix, "K_decayed")
    q_gated = x.q if x.q is None or prefix is None else b.mul(x.q, prefix, "Q_gated")
    return _Chunk(a_qk, q_gated, k_decayed, total, u, w)


def _gram(b: Builder, x: Value, y: Value, g: Value | None, *, strict: bool, name: str) -> Value:
    if g is None:
        return b.mask(b.dot(x, y, trans_b=True, name=f"{name}_full"), strict=strict, name=name)
    return b.gated_gram(x, y, g, strict=strict, name=name)


def _chunk_program(b: Builder, gate: str, delta: bool, beta: bool, gate_form: str, norm: bool) -> Program:
    c = _chunk(b, _load(b, gate, beta, gate_form, norm=norm), delta, gate_form)
    assert c.a_qk is not None and c.q_gated is not None
    if c.w is None:  # nothing but the decay touches the state: both products leave the scan
        written = b.dot(c.k_decayed, c.u, trans_a=True, name="dS")
        intra = b.dot(c.a_qk, c.u, name="O_intra")
        state = b.carry("S", TileType("K", "V"), "initial_state", "final_state")
        kept = state if c.total is None else b.mul(state, c.total, "S_decayed")
        b.step(b.add(kept, written, "S_next"), _combine(gate, delta, beta, gate_form))
        out = b.dot(c.q_gated, state, intra, name="O")
    else:
        state = b.carry("S", TileType("K", "V"), "initial_state", "final_state")
        new_v = b.dot(c.w, state, c.u, negate=True, name="V_new")
        kept = state if c.total is None else b.mul(state, c.total, "S_decayed")
        b.step(b.dot(c.k_decayed, new_v, kept, trans_a=True, name="S_next"), _combine(gate, delta, beta, gate_form))
        inter = b.dot(c.q_gated, state, name="O_inter")
        out = b.dot(c.a_qk, new_v, inter, name="O")
    b.store("o", b.cast(out, DType.IO, "o"))
    return b.build()


def _combine(gate: str, delta: bool, beta: bool, gate_form: str) -> Combine:
    """``S' = A S + B``: a chunk's (A, B), and (A1, B1) after (A0, B0) = (A1 A0, A1 B0 + B1).

    Without the delta term A is diagonal and kept as a column; without a gate it is 1 and left out.
    """
    b = Builder(f"{ROWS[gate, delta]}_segment_block", axis="")
    c = _chunk(b, _load(b, gate, beta, gate_form, query=False), delta, gate_form)
    written = b.dot(c.k_decayed, c.u, trans_a=True, name="B")
    decay = c.total
    if c.w is not None:
        decay = b.eye("K", "I") if decay is None else b.mul(b.eye("K", "I"), decay, "decay_diag")
        decay = b.dot(c.k_decayed, c.w, decay, trans_a=True, negate=True, name="A")
    if decay is not None:
        b.store("A", decay, per=Per.STEP)
    b.store("B", written, per=Per.STEP)
    return Combine(b.build(), _merge(None if decay is None else decay.type))


def _merge(map_type: TileType | None) -> Program:
    b = Builder("merge", axis="")
    state = TileType("K", "V")
    if map_type is None:
        b0, b1 = (b.input(name, state, per=Per.STEP) for name in ("B0", "B1"))
        b.store("B", b.add(b0, b1, "B"), per=Per.STEP)
        return b.build()
    a0, a1 = (b.input(name, map_type, per=Per.STEP) for name in ("A0", "A1"))
    b0, b1 = (b.input(name, state, per=Per.STEP) for name in ("B0", "B1"))
    if map_type.rows == map_type.cols == "K":
        b.store("A", b.dot(a1, a0, name="A"), per=Per.STEP)
        b.store("B", b.dot(a1, b0, b1, name="B"), per=Per.STEP)
    else:
        b.store("A", b.mul(a1, a0, "A"), per=Per.STEP)
        b.store("B", b.add(b.mul(b0, a1), b1, "B"), per=Per.STEP)
    return b.build()


def _token_program(b: Builder, gate: str, delta: bool, beta: bool, gate_form: str) -> Program:
    x = _load(b, gate, beta, gate_form, rows=1)
    assert x.q is not None
    decay = None
    if x.g is not None:
        decay = b.transpose(x.g if gate_form == "factor" else b.exp(x.g, "alpha"), "decay")
    state = b.carry("S", TileType("K", "V"), "initial_state", "final_state")
    kept = state if decay is None else b.mul(state, decay, "S_decayed")
    write = b.dot(x.k, kept, x.v, negate=True, name="V_new") if delta else x.v
    write = write if x.beta is None else b.mul(write, x.beta, "V_write")
    after = b.dot(x.k, write, kept, trans_a=True, name="S_next")
    b.step(after)
    b.store("o", b.cast(b.dot(x.q, after, name="O"), DType.IO, "o"))
    return b.build()
