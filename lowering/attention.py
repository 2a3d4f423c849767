"""Softmax attention over blocks of the cache, written once as a tile program.

Per lane, with ``M`` query rows, ``C`` cached tokens a block, keys in two parts (``K`` columns, and ``D`` columns that
all heads share) and ``V`` value columns; the queries come scaled::

    S = Q K^T + Q' K'^T + bias
    m = rowmax S      P = exp(S - m)      l = rowsum P      A = P V

A block's summary is (m, l, A), and summaries merge by log-sum-exp::

    m = max(m0, m1)      l = l0 e^{m0 - m} + l1 e^{m1 - m}      A = A0 e^{m0 - m} + A1 e^{m1 - m}

which is associative: the scan over blocks may be cut anywhere (split-KV). Nothing of a summary depends on what came
before, so the pair is a :class:`~kdacompile.lowering.ir.Combine` without a step of its own. The carry starts as
(lowest finite number, 0, 0); at its end ``o = A / l`` and ``lse = m + log l``.

MLA is this program twice. *Absorbed*, the latent is both key and value (K = V = the latent's rank) and heads are rows
of one lane. *Expanded*, every head has keys and values of its own. ``cost`` says which is cheaper.

Where one walk over the cache is one loop, as on Ascend, a step takes the carry in at once (:func:`decode_program`)::

    m = max(m0, rowmax S)      w = exp(m0 - m)      P = exp(S - m)      l = l0 w + rowsum P      A = A0 w + P c

which is the same merge with ``e^{m1 - m}`` multiplied into P: a pass over the accumulator less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import sympy

from .builder import Builder
from .ir import Combine, Per, Program, TileType

_MAX, _SUM, _ACC = TileType("M", 1), TileType("M", 1), TileType("M", "V")


@cache
def attention_program(*, second_key: bool = True, bias: bool = True) -> Combine:
    """The summary of one block and the merge of two; ``second_key``: whether keys have the shared part."""
    return Combine(_summary(second_key, bias), _merge())


def _summary(second_key: bool, bias: bool) -> Program:
    b = Builder("attention_block", axis="block", notes="queries come scaled; a bias of -inf masks")
    q = b.input("q", TileType("M", "K"), per=Per.LANE)
    k = b.input("k", TileType("C", "K"), heads="key")
    scores = b.dot(q, k, trans_b=True, name="S")
    if second_key:
        q_shared = b.input("q_shared", TileType("M", "D"), per=Per.LANE)
        k_shared = b.input("k_shared", TileType("C", "D"), heads="shared")
        scores = b.dot(q_shared, k_shared, scores, trans_b=True, name="S_shared")
    if bias:
        scores = b.add(scores, b.input("bias", TileType("M", "C"), per=Per.STEP), "S_masked")
    v = b.input("v", TileType("C", "V"), heads="key")
    largest = b.row_max(scores, "m")
    weights = b.exp(b.sub(scores, largest, "S_shifted"), "P")
    b.store("max", largest, per=Per.STEP)
    b.store("sum", b.row_sum(weights, "l"), per=Per.STEP)
    b.store("acc", b.dot(weights, v, name="A"), per=Per.STEP)
    return b.build()


def _merge() -> Program:
    b = Builder("attention_merge", axis="")
    m0, m1 = (b.input(f"max{i}", _MAX, per=Per.STEP) for i in (0, 1))
    l0, l1 = (b.input(f"sum{i}", _SUM, per=Per.STEP) for i in (0, 1))
    a0, a1 = (b.input(f"acc{i}", _ACC, per=Per.STEP) for i in (0, 1))
    largest = b.max(m0, m1, "m")
    w0 = b.exp(b.sub(m0, largest, "d0"), "w0")
    w1 = b.exp(b.sub(m1, largest, "d1"), "w1")
    b.store("max", largest, per=Per.STEP)
    b.store("sum", b.add(b.mul(l0, w0, "l0"), b.mul(l1, w1, "l1"), "l"), per=Per.STEP)
    b.store("acc", b.add(b.mul(a0, w0, "A0"), b.mul(a1, w1, "A1"), "A"), per=Per.STEP)
    return b.build()


@cache
def decode_program(*, rope: bool = True, masks: bool = False) -> Program:
    """One block of the latent ``c`` into the carry, absorbed: inputs ``max0``, ``sum0`` and ``acc0`` are what outputs
    ``max``, ``sum`` and ``acc`` were a block before. ``rope``: whether keys have the part that all heads share;
    ``masks``: whether every head has a mask of its own."""
    notes = "hidden is 0 for tokens that may be seen, and so low for others that their weight is 0"
    b = Builder("latent_attention", axis="block", notes=notes)
    m0, l0 = (b.input(name, _MAX, per=Per.LANE) for name in ("max0", "sum0"))
    a0 = b.input("acc0", TileType("M", "K"), per=Per.LANE)
    latent = b.input("latent", TileType("C", "K"), heads="shared")
    q = b.input("q", TileType("M", "K"), per=Per.LANE)
    scores = b.dot(q, latent, trans_b=True, name="S_latent" if rope else "S")
    if rope:
        q_rope = b.input("q_rope", TileType("M", "D"), per=Per.LANE)
        k_rope = b.input("k_rope", TileType("C", "D"), heads="shared")
        scores = b.dot(q_rope, k_rope, scores, trans_b=True, name="S")
    hidden = b.input("hidden", TileType("M" if masks else 1, "C"), per=Per.STEP)
    seen = b.add(b.scale(scores, "scale", "S_scaled"), hidden, "S_seen")
    m = b.max(m0, b.row_max(seen, "m_block"), "m")
    weights = b.exp(b.sub(seen, m, "S_shifted"), "P")
    w = b.exp(b.sub(m0, m, "m_change"), "w")
    b.store("max", m, per=Per.LANE)
    b.store("sum", b.add(b.mul(l0, w, "l_kept"), b.row_sum(weights, "l_block"), "l"), per=Per.LANE)
    added = b.dot(weights, latent, name="PC")
    b.store("acc", b.add(b.mul(a0, w, "A_kept"), added, "A"), per=Per.LANE)
    return b.build()


# -- cost --------------------------------------------------------------------------------------------------------------

DIMS = sympy.symbols("B T S H N D R V", positive=True, integer=True)
"""Batch, queries, cached tokens, heads; no-rope, rope, latent and value dimensions."""


def cost(form: str, *, causal: bool = False) -> sympy.Expr:
    """Floating-point operations of ``form`` ("absorbed" or "expanded"): the products, two per multiply-add."""
    B, T, S, H, N, D, R, V = DIMS
    pairs = B * H * (T * S - T * (T - 1) / 2 if causal else T * S)
    if form == "absorbed":
        return 2 * pairs * (2 * R + D) + 2 * B * T * H * R * (N + V)
    return 2 * pairs * (N + D + V) + 2 * B * S * H * R * (N + V)


@cache
def _compiled(causal: bool) -> Callable[..., int]:
    return sympy.lambdify(DIMS, cost("absorbed", causal=causal) - cost("expanded", causal=causal), modules="math")


def choose_form(B: int, T: int, S: int, H: int, N: int, D: int, R: int, V: int, *, causal: bool = False) -> str:
    """The form with fewer operations for these sizes."""
    return "absorbed" if _compiled(causal)(B, T, S, H, N, D, R, V) <= 0 else "expanded"
