"""Programs to compare with: the chunk as it stands on the page, and the state kernel as public libraries write it.

Both compute the right thing (the first one where gates are mild: it factors ``exp(G_i - G_j)`` over the whole chunk)
and are planned as they are written, one result an op. They are what the planner's gain is measured against.
"""

from __future__ import annotations

from functools import cache

from ..builder import Builder
from ..ir import DType, Per, Program, TileType, Value
from ..linear_attention import ROWS


@cache
def naive_program(gate: str, delta: bool, *, beta: bool = True) -> Program:
    """A chunk of the family in the order of the textbook, every equation's result formed and handed on.

    KDA takes eleven stages: gates and scaled keys (Vec), keys by keys (Cube), the triangular inverse (Vec), W, U and
    W S (Cube), V' (Vec), Q S and queries by keys (Cube), their triangle (Vec), O inside the chunk (Cube), the sum and
    the decayed keys (Vec), the change of the state (Cube), the state (Vec).
    """
    return _Naive(gate, delta, beta).build()


class _Naive:
    """The textbook's program of one row; tensors of a chunk are cast up as they are read."""

    def __init__(self, gate: str, delta: bool, beta: bool) -> None:
        b = self.b = Builder(f"{ROWS[gate, delta]}_naive")
        self.delta = delta
        self.state = b.carry("S", TileType("K", "V"), "initial_state", "final_state")
        self.q = b.scale(self.tokens("q", "K", "key"), "scale", "q_scaled")
        self.k, self.v = self.tokens("k", "K", "key"), self.tokens("v", "V")
        self.g = None if gate == "none" else self.tokens("g", "K" if gate == "channel" else 1)
        self.beta = self.tokens("beta", 1) if beta else None

    def tokens(self, name: str, cols: str | int, heads: str = "value") -> Value:
        tile = self.b.input(name, TileType("C", cols, DType.IO), heads=heads)
        return self.b.cast(tile, DType.ACC, f"{name}_acc")

    def build(self) -> Program:
        b = self.b
        gates = self.gates()
        k_gated, k_inverse, q_gated = self.scaled(gates)
        if self.delta:
            values = self.new_values(k_gated, k_inverse)
        else:
            values = self.v if self.beta is None else b.mul(self.v, self.beta, "U")
        inter = b.dot(q_gated, self.state, name="O_inter")
        scores = b.dot(q_gated, k_inverse, trans_b=True, name="A_qk_raw")
        intra = b.dot(b.mask(scores, strict=False, name="A_qk"), values, name="O_intra")
        b.store("o", b.cast(b.add(inter, intra, "O"), DType.IO, "o"))
        k_decayed, kept = self.k, self.state
        if gates is not None:
            sums, total, _ = gates
            k_decayed = b.mul(self.k, b.exp(b.sub(total, sums, "G_rest"), "exp_G_rest"), "K_decayed")
        change = b.dot(k_decayed, values, trans_a=True, name="dS")
        if gates is not None:
            kept = b.mul(kept, b.transpose(b.exp(gates[1], "exp_G_C"), "decay"), "S_decayed")
        b.step(b.add(kept, change, "S_next"))
        return b.build()

    def gates(self) -> tuple[Value, Value, Value] | None:
        """G, its last row, exp G."""
        if self.g is None:
            return None
        sums = self.b.cumsum(self.g, name="G")
        return sums, self.b.reduce(self.g, "G_C"), self.b.exp(sums, "exp_G")

    def scaled(self, gates: tuple[Value, Value, Value] | None) -> tuple[Value, Value, Value]:
        if gates is None:
            return self.k, self.k, self.q
        b, (sums, _, exp_sums) = self.b, gates
        inverse = b.mul(self.k, b.exp(b.neg(sums, "G_neg"), "exp_G_neg"), "K_inverse")
        return b.mul(self.k, exp_sums, "K_gated"), inverse, b.mul(self.q, exp_sums, "Q_gated")

    def new_values(self, k_gated: Value, k_inverse: Value) -> Value:
        b = self.b
        raw = b.dot(k_gated, k_inverse, trans_b=True, name="A_kk_raw")
        raw = raw if self.beta is None else b.mul(raw, self.beta, "A_kk_beta")
        m = b.unit_lower_inverse(b.mask(raw, strict=True, name="A_kk"), "A_inverse")
        m = m if self.beta is None else b.mul(m, b.transpose(self.beta, "beta_row"), "M")
        w, u = b.dot(m, k_gated, name="W"), b.dot(m, self.v, name="U")
        return b.sub(u, b.dot(w, self.state, name="WS"), "V_new")


@cache
def gdn_state_program() -> Program:
    """The state kernel of the gated delta rule as public Triton libraries have it: W and U come in, V' and S go out.

    Its four crossings a chunk (S, W S, the gated V', dS) are the table of a compiler's own workspace.
    """
    b = Builder("gdn_state")
    state = b.carry("S", TileType("K", "V"), "initial_state", "final_state")
    w = b.input("w", TileType("C", "K", DType.IO))
    u = b.input("u", TileType("C", "V", DType.IO))
    k = b.input("k", TileType("C", "K", DType.IO), heads="key")
    g = b.cast(b.input("g", TileType("C", 1, DType.IO)), DType.ACC, "g_acc")
    rounded = b.cast(state, DType.IO, "S_io")
    b.store("h", rounded, per=Per.STEP)
    values = b.sub(b.cast(u, DType.ACC, "u_acc"), b.dot(w, rounded, name="WS"), "V_new")
    b.store("v_new", b.cast(values, DType.IO, "v_new"))
    rest = b.exp(b.cumsum(g, reverse=True, name="G_rest"), "exp_G_rest")
    gated = b.mul(values, rest, "V_gated")
    decay = b.exp(b.reduce(g, "G_C"), "decay")
    kept = b.mul(state, decay, "S_decayed")
    b.step(b.add(kept, b.dot(k, b.cast(gated, DType.IO, "V_gated_io"), trans_a=True, name="dS"), "S_next"))
    return b.build()
