"""The adjoint of the chunked recurrence as a tile program; the equations stand in ``adjoint.py``.

Sections free of the carries, one scan with two carries (the state S forward, its gradient in reverse), and everything
else behind both, for all chunks at once. With W = T (b K_g), U = T (b V) the scans read::

    V'  = U - W S                        S'  = diag(exp G_C) S + K_d^T V'
    dV' = P^T dO + K_d dS'               dS  = diag(exp G_C) dS' + Q_g^T dO - W^T dV'

K_g and W are kept negated, as they are added; P, L and T are called A_qk, A_kk and M, as in the forward's program.
Operands of products that element-wise sums read as well are rounded once, for both: what ``q dq`` and ``k dk`` have in
common then cancels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from .builder import Builder
from .errors import ArgumentError
from .gates import KINDS
from .ir import DType, Program, TileType, Value
from .linear_attention import ROWS


@cache
def adjoint_program(gate: str, delta: bool, *, beta: bool = True) -> Program:
    """The gradients of one row of the family, of log gates.

    Inputs: those of :func:`~.linear_attention.linear_attention_program`, ``grad_o`` [C, V] and, as the start of the
    reverse carry, ``grad_final_state`` [K, V]. Outputs: ``grad_`` and the name of every input q, k, v, g and beta that
    the row has, for every value head and token; ``grad_initial_state`` is the final value of the reverse carry.
    """
    if gate not in KINDS:
        raise ArgumentError(f"no such row: gate={gate!r}")
    return _Adjoint(gate, delta, beta).build()


@dataclass(frozen=True)
class _Decays:
    """exp G, exp(G_C - G) by token, and exp G_C as a column; None without a gate."""

    before: Value | None
    behind: Value | None
    total: Value | None


class _Adjoint:
    """One row's program, phase by phase."""

    def __init__(self, gate: str, delta: bool, beta: bool) -> None:
        b = self.b = Builder(f"{ROWS[gate, delta]}_adjoint")
        self.gate, self.delta = gate, delta
        q = b.scale(self.tokens("q", "K", "key"), "scale", "q_scaled")
        self.q = q if gate == "channel" else self.rounded(q, "q_seen")
        self.k, self.v = self.tokens("k", "K", "key"), self.tokens("v", "V")
        self.g = None if gate == "none" else self.tokens("g", "K" if gate == "channel" else 1)
        self.beta = self.tokens("beta", 1) if beta else None
        self.o = self.tokens("grad_o", "V")

    def tokens(self, name: str, cols: str | int, heads: str = "value") -> Value:
        tile = self.b.input(name, TileType("C", cols, DType.IO), heads=heads)
        return self.b.cast(tile, DType.ACC, f"{name}_acc")

    def rounded(self, x: Value, name: str, kept: str = "") -> Value:
        """``x`` as a product reads it, from where it is ``kept``."""
        return self.b.cast(self.b.cast(x, DType.IO, kept or f"{name}_io"), DType.ACC, name)

    def by(self, x: Value, factor: Value | None, name: str) -> Value:
        return x if factor is None else self.b.mul(x, factor, name)

    def build(self) -> Program:
        b = self.b
        decays = self.decays()
        p = self.gram(self.q, self.k, strict=False, name="A_qk")
        q_gated = self.by(self.q, decays.before, "Q_gated")
        k_decayed = self.by(self.k, decays.behind, "K_decayed")
        # rounded even where nothing gates it: the compiler would send what Vec has loaded to Cube, which loads it too
        k_gated = None
        if self.delta:
            k_gated = b.neg(self.by(self.k, decays.before, "K_gated"), "K_gated_neg")
            k_gated = self.rounded(k_gated, "K_gated_neg_seen", "K_gated_neg_io")
        inverse = lower = w = None
        u = self.by(self.v, self.beta, "U")
        if k_gated is not None:
            lower = self.gram(self.k, self.k, strict=True, name="A_kk")
            inverse = b.unit_lower_inverse(self.by(lower, self.beta, "A_kk_beta"), "M")
            w = b.dot(inverse, self.by(k_gated, self.beta, "K_beta_neg"), name="W_neg")
            u = b.dot(inverse, u, name="U_new")
        state = b.carry("S", TileType("K", "V"), "initial_state", "final_state")
        new_v = u if w is None else b.dot(w, state, u, name="V_new")
        self.step(state, decays, b.dot(k_decayed, new_v, trans_a=True, name="S_change"), "S", reverse=False)
        grad_state = b.carry("GS", TileType("K", "V"), "grad_final_state", "grad_initial_state", reverse=True)
        grad_new = b.dot(k_decayed, grad_state, b.dot(p, self.o, trans_a=True, name="GV_intra"), name="GV_new")
        change = b.dot(q_gated, self.o, trans_a=True, name="GS_change")
        if w is not None:
            change = b.dot(w, grad_new, change, trans_a=True, name="GS_change")
        self.step(grad_state, decays, change, "GS", reverse=True)
        state, grad_state = self.rounded(state, "S_seen", "S_io"), self.rounded(grad_state, "GS_seen", "GS_io")
        new_v = new_v if new_v is self.v else self.rounded(new_v, "V_seen")
        return self.gradients(decays, k_decayed, lower, inverse, k_gated, state, grad_state, new_v, grad_new)

    def decays(self) -> _Decays:
        b, g = self.b, self.g
        if g is None:
            return _Decays(None, None, None)
        before = b.exp(b.cumsum(g, name="G"), "exp_G")
        behind = b.exp(b.cumsum(g, reverse=True, name="G_rest"), "exp_G_rest")
        return _Decays(before, behind, b.transpose(b.exp(b.reduce(g, "G_C"), "exp_G_C"), "decay"))

    def pairs(self, x: Value, name: str) -> Value:
        """Weights of pairs of different tokens. Where every channel has its decays they are multiplied as they are."""
        return self.rounded(x, f"{name}_seen") if self.gate == "channel" else x

    def gram(self, x: Value, y: Value, *, strict: bool, name: str) -> Value:
        if self.g is None:
            return self.b.mask(self.b.dot(x, y, trans_b=True, name=f"{name}_full"), strict=strict, name=name)
        return self.b.gated_gram(x, y, self.g, strict=strict, name=name)

    def step(self, carry: Value, decays: _Decays, change: Value, name: str, *, reverse: bool) -> None:
        kept = self.by(carry, decays.total, f"{name}_decayed")
        self.b.step(self.b.add(kept, change, f"{name}_next"), reverse=reverse)

    def weighted(self, weights: Value, y: Value, name: str, *, trans: bool = False) -> Value:
        """Rows of ``y`` summed with pairs' weights and the decays between them."""
        if self.g is None:
            return self.b.dot(weights, y, trans_a=trans, name=name)
        return self.b.gated_dot(weights, y, self.g, trans=trans, name=name)

    def gradients(
        self,
        decays: _Decays,
        k_decayed: Value,
        lower: Value | None,
        inverse: Value | None,
        k_gated: Value | None,
        state: Value,
        grad_state: Value,
        new_v: Value,
        grad_new: Value,
    ) -> Program:
        """What no carry waits for. ``rows`` is what later decays reach (summed over the tokens from each on), ``ends``
        what decays up to the chunk's end (over the tokens before each)."""
        b, k = self.b, self.k
        if self.gate == "channel":  # as much as q and k: made again from the gates rather than kept for every chunk
            decays = replace(self.decays(), total=decays.total)
        of_delta = None
        if k_gated is not None and lower is not None and inverse is not None:
            of_delta = self.delta_gradients(decays, lower, inverse, k_gated, state, new_v, grad_new)
        pairs = self.pairs(b.mask(b.dot(self.o, new_v, trans_b=True, name="GP_full"), strict=True, name="GP"), "GP")
        own = b.row_sum(b.mul(self.o, new_v, "GO_V"), "own")  # a token with itself: nothing decays it
        q_pairs = self.weighted(pairs, k, "GQ_pairs")
        k_pairs = self.weighted(pairs, self.q, "GK_pairs", trans=True)
        q_state = self.by(b.dot(self.o, state, trans_b=True, name="GQ_gated"), decays.before, "GQ_state")
        of_decayed = b.dot(new_v, grad_state, trans_b=True, name="GK_decayed")
        k_state = self.by(of_decayed, decays.behind, "GK_state")
        grad_q = b.add(q_state, q_pairs, "GQ_later")
        rows = b.mul(self.q, grad_q, "Q_GQ")
        grad_q = b.scale(b.add(grad_q, b.mul(k, own, "K_own"), "GQ"), "scale", "GQ_scaled")
        grad_k = b.add(k_pairs, b.mul(self.q, own, "Q_own"), "GK_own")
        if of_delta is not None:
            grad_new, k_rows, k_cols = of_delta
            rows = b.add(rows, b.mul(k, k_rows, "K_GK_rows"), "GG_rows")
            k_pairs = b.add(k_pairs, k_cols, "GK_cols")
            grad_k = b.add(grad_k, b.add(k_rows, k_cols, "GK_delta"), "GK_both")
        else:
            if self.beta is not None:
                b.store("grad_beta", b.row_sum(b.mul(grad_new, self.v, "GV_V"), "grad_beta"))
            grad_new = self.by(grad_new, self.beta, "GV")
        b.store("grad_q", b.cast(grad_q, DType.IO, "grad_q"))
        b.store("grad_k", b.cast(b.add(grad_k, k_state, "GK"), DType.IO, "grad_k"))
        b.store("grad_v", b.cast(grad_new, DType.IO, "grad_v"))
        if self.g is not None and decays.total is not None:
            rows = b.sub(rows, b.mul(k, k_pairs, "K_GK"), "GG_pairs")
            if self.gate == "channel":  # by tiles that there are, not by decays of each token
                ends = b.mul(self.rounded(k_decayed, "K_decayed_seen"), of_decayed, "K_GK_state")
            else:
                ends = b.mul(k, k_state, "K_GK_state")
            self.gate_gradient(rows, ends, state, grad_state, decays.total)
        return b.build()

    def delta_gradients(
        self,
        decays: _Decays,
        lower: Value,
        inverse: Value,
        k_gated: Value,
        state: Value,
        new_v: Value,
        grad_new: Value,
    ) -> tuple[Value, Value, Value]:
        """The gradient of v, and those of k as the row and as the column of pairs and of what the state recalls."""
        b = self.b
        z = self.rounded(b.dot(inverse, grad_new, trans_a=True, name="Z"), "Z_seen")
        full = b.dot(z, new_v, trans_b=True, name="ZV")
        rest = None if self.beta is None else b.dot(k_gated, state, self.v, name="V_rest")
        grad_v = self.by(z, self.beta, "GV")
        if rest is not None:
            of_rest = b.row_sum(b.mul(z, rest, "Z_R"), "Z_R_sum")
            of_pairs = b.row_sum(b.mul(lower, full, "L_ZV"), "L_ZV_sum")
            b.store("grad_beta", b.sub(of_rest, of_pairs, "grad_beta"))
        pairs = b.neg(b.mask(self.by(full, self.beta, "ZV_beta"), strict=True, name="GL_neg"), "GL")
        pairs = self.pairs(pairs, "GL")
        recalled = self.by(b.dot(grad_v, state, trans_b=True, name="GK_gated_neg"), decays.before, "GK_recalled")
        rows = b.sub(self.weighted(pairs, self.k, "GK_row_pairs"), recalled, "GK_rows")
        return grad_v, rows, self.weighted(pairs, self.k, "GK_col_pairs", trans=True)

    def gate_gradient(self, rows: Value, ends: Value, state: Value, grad_state: Value, total: Value) -> None:
        """``exp(G_C) dE`` to every token, ``rows`` from each token on, ``ends`` before it; by token, or by channel."""
        b = self.b
        whole = b.mul(b.row_sum(b.mul(state, grad_state, "S_GS"), "GE"), total, "GE_decayed")
        if self.gate == "channel":
            whole = b.transpose(whole, "GE_row")
        else:
            rows, ends, whole = b.row_sum(rows, "rows_sum"), b.row_sum(ends, "ends_sum"), b.reduce(whole, "GE_sum")
        later = b.add(b.cumsum(rows, reverse=True, name="rows_after"), rows, "rows_from")
        before = b.sub(b.cumsum(ends, name="ends_to"), ends, "ends_before")
        b.store("grad_g", b.add(b.add(later, before, "GG"), whole, "grad_g"))
