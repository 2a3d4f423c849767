"""The attention program: its text, that its summaries merge in any grouping, and the cost that chooses a form."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor

from kdacompile.lowering.attention import DIMS, attention_program, choose_form, cost, decode_program
from kdacompile.lowering.builder import Builder
from kdacompile.lowering.errors import TileProgramError
from kdacompile.lowering.ir import Per, TileType
from kdacompile.lowering.straight import compiled, generate
from kdacompile.lowering.text import to_text
from tests.lowering.test_program import check_golden

DEEPSEEK = (128, 64, 512, 128)
B, T, S, H, N, D, R, V = DIMS


def test_text_golden() -> None:
    program = attention_program()
    check_golden("attention.txt", to_text(program.summary) + to_text(program.merge))


def test_source_golden() -> None:
    program = attention_program()
    check_golden("attention.py.txt", generate(program.summary) + generate(program.merge))


def summary(scores: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Of a block whose scores are given: the queries are the identity."""
    identity = torch.eye(scores.shape[-2], dtype=scores.dtype).expand(1, 1, -1, -1)
    program = attention_program(second_key=False, bias=False).summary
    return compiled(program)(q=identity, k=scores.mT, v=values)


def merge(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    m0, l0, a0 = first
    m1, l1, a1 = second
    return compiled(attention_program().merge)(max0=m0, max1=m1, sum0=l0, sum1=l1, acc0=a0, acc1=a1)


def test_merging_is_associative_and_nothing_is_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 9 * torch.randn(1, 1, 4, 30, generator=generator, dtype=torch.float64)
    values = torch.randn(1, 1, 30, 5, generator=generator, dtype=torch.float64)
    blocks = [summary(scores[..., i : i + 10], values[..., i : i + 10, :]) for i in (0, 10, 20)]
    left = merge(merge(blocks[0], blocks[1]), blocks[2])
    right = merge(blocks[0], merge(blocks[1], blocks[2]))
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y)
    torch.testing.assert_close(left[2] / left[1], scores.softmax(-1) @ values)


def test_a_step_of_decoding_is_a_summary_merged() -> None:
    """Three blocks, the last half empty: the carry in at once, and block by block through the merge."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, 1, *shape, generator=generator, dtype=torch.float64)

    q, q_rope, latent, k_rope = draw(4, 6), draw(4, 2), draw(30, 6), draw(30, 2)
    hidden = torch.where(torch.arange(30) < 25, 0.0, -1.0e30).double().view(1, 1, 1, 30)
    carry = (torch.full((1, 1, 4, 1), -1.0e30, dtype=torch.float64), torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 4, 6))
    merged = carry = tuple(x.double() for x in carry)
    step, block = compiled(decode_program()), compiled(attention_program().summary)
    for i in (0, 10, 20):
        c, r, unseen = latent[..., i : i + 10, :], k_rope[..., i : i + 10, :], hidden[..., i : i + 10]
        state = dict(zip(("max0", "sum0", "acc0"), carry, strict=True))
        carry = step(**state, latent=c, q=q, q_rope=q_rope, k_rope=r, hidden=unseen, scale=0.5)
        bias = unseen.expand(1, 1, 4, 10)
        merged = merge(merged, block(q=0.5 * q, k=c, q_shared=0.5 * q_rope, k_shared=r, bias=bias, v=c))
    for x, y in zip(carry, merged, strict=True):
        torch.testing.assert_close(x, y)
    scores = 0.5 * (q @ latent.mT + q_rope @ k_rope.mT) + hidden
    torch.testing.assert_close(carry[2] / carry[1], scores.softmax(-1) @ latent)


def test_a_block_that_is_all_masked_changes_nothing() -> None:
    scores, values = torch.randn(1, 1, 4, 10), torch.randn(1, 1, 10, 5)
    masked = torch.eye(4).expand(1, 1, -1, -1)
    bias = torch.full((1, 1, 4, 10), -torch.inf)
    program = attention_program(second_key=False).summary
    empty = compiled(program)(q=masked, k=scores.mT, v=values, bias=bias)
    assert float(empty[1].abs().max()) == 0.0 and bool(empty[0].isfinite().all())
    full = summary(scores, values)
    for x, y in zip(merge(empty, full), full, strict=True):
        assert torch.equal(x, y)


def test_inputs_are_never_overwritten() -> None:
    state = [torch.randn(1, 1, 4, n) for n in (1, 1, 1, 1, 5, 5)]
    kept = [x.clone() for x in state]
    names = ("max0", "max1", "sum0", "sum1", "acc0", "acc1")
    compiled(attention_program().merge)(**dict(zip(names, state, strict=True)))
    assert all(torch.equal(x, y) for x, y in zip(state, kept, strict=True))


def test_straight_refuses_what_it_cannot_run() -> None:
    b = Builder("sums", axis="")
    b.store("o", b.reduce(b.input("x", TileType("C", "V"), per=Per.STEP)), per=Per.STEP)
    with pytest.raises(TileProgramError, match="no straight form"):
        generate(b.build())


def test_cost_counts_what_the_reference_counts() -> None:
    """640 and 2176 operations per pair and head, 262,144 per head and token to expand, at DeepSeek-V3's sizes."""
    sizes = {N: 128, D: 64, R: 512, V: 128, B: 1}
    naive, absorbed = (sympy.Poly(cost(form).subs(sizes), T, S, H) for form in ("expanded", "absorbed"))
    assert naive.coeff_monomial(T * S * H) == 640 and naive.coeff_monomial(S * H) == 262_144
    assert absorbed.coeff_monomial(T * S * H) == 2176 and absorbed.coeff_monomial(T * H) == 262_144


@pytest.mark.parametrize(
    ("tokens", "cached", "form"), [(1, 4096, "absorbed"), (163, 4096, "absorbed"), (165, 4096, "expanded")]
)
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_the_crossover(tokens: int, cached: int, form: str, heads: int) -> None:
    assert choose_form(1, tokens, cached, heads, *DEEPSEEK) == form


def test_prefill_expands() -> None:
    assert choose_form(1, 512, 512, 16, *DEEPSEEK, causal=True) == "expanded"
