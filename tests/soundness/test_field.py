"""Arithmetic over the prime fields, and the recurrence there."""

from __future__ import annotations

import math
import runpy
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from kdacompile.graph.laws import Law, NotAffine, in_dtype
from kdacompile.patterns.engine import field
from kdacompile.patterns.engine.field import Numbers, P, R, Silent, matmul
from kdacompile.patterns.engine.meanings import (
    Field,
    Residues,
    exponential,
    exponential2,
    largest,
    mul,
    pow_,
    raised_to,
)
from kdacompile.patterns.recurrence.exact import recurrence


def draw(*shape: int, modulus: int = P, seed: int = 0) -> Tensor:
    return field.random(shape, modulus, torch.Generator().manual_seed(seed))


def test_the_primes() -> None:
    assert P == 2 * R + 1
    assert all(pow(prime, (m - 1) // 2, m) == 1 for prime in field.SMOOTH for m in (P, R))
    assert P % 4 == R % 4 == 3  # so that -1 is no square
    assert pow(field.BASE, R, P) == 1 and field.BASE != 1
    assert all(pow(base, P - 1, P) == 1 and pow(base, R - 1, R) == 1 for base in range(2, 40))


def test_every_process_draws_its_own_primes() -> None:
    """Any of them serves, and there are many: what a program multiplies by is nothing modulo hardly any of them."""
    drawn = {field.draw() for _ in range(40)}
    assert len(drawn) > 20
    for p in drawn:
        assert 1 << 30 < p < 1 << 31
        assert all(pow(prime, m // 2, m) == 1 for prime in field.SMOOTH for m in (p, p // 2))
        assert all(pow(base, p - 1, p) == pow(base, p // 2 - 1, p // 2) == 1 for base in range(2, 40))
    assert len({(own["P"], own["BASE"]) for own in (runpy.run_path(field.__file__) for _ in range(3))}) == 3


def test_exponentials_turn_sums_into_products() -> None:
    a, b = draw(50, modulus=R), draw(50, modulus=R, seed=1)
    assert torch.equal(field.exp((a + b) % R), field.exp(a) * field.exp(b) % P)
    assert torch.equal(field.exp(a), torch.tensor([pow(field.BASE, int(x), P) for x in a]))


@pytest.mark.parametrize("modulus", [P, R], ids=["values", "exponents"])
def test_products_and_inverses(modulus: int) -> None:
    a, b = draw(2, 5, 7, modulus=modulus), draw(2, 7, 3, modulus=modulus, seed=1)
    wanted = torch.tensor(
        [
            [[sum(int(x) * int(y) for x, y in zip(row, col, strict=True)) % modulus for col in m.T] for row in n]
            for n, m in zip(a, b, strict=True)
        ]
    )
    assert torch.equal(matmul(a, b, modulus), wanted)
    x = draw(9, 31, modulus=modulus, seed=2)
    assert bool((field.inverse(x, modulus) * x % modulus == 1).all())
    lower = draw(3, 21, 21, modulus=modulus, seed=3).tril(-1)
    one = torch.eye(21, dtype=torch.int64)
    assert torch.equal(matmul(field.unit_lower_inverse(lower, modulus), lower + one, modulus), one.expand(3, -1, -1))
    square = draw(2, 7, 7, modulus=modulus, seed=4)
    assert torch.equal(matmul(square, field.solve(square, b, modulus), modulus), b)


def test_literals_stand_for_what_they_mean() -> None:
    numbers = Numbers()

    def read(number: float, modulus: int = P) -> int:
        return numbers.read(number, modulus)

    assert read(0.1) * read(0.1) % P == read(0.01)
    assert read(1 / 3) * 3 % P == 1
    assert read(0.05 * 7) == read(0.35)
    assert read(1e-18) * pow(10, 18, P) % P == 1
    assert read(-2.5) * 2 % P == P - 5
    for width in (16, 64, 96, 128, 192):
        assert read(width**-0.5) * read(width**-0.5) % P == read(1 / width)
        assert read(width**-0.25) * read(width**-0.25) % P == read(width**-0.5)
    assert read(math.log(2.0), R) * read(1 / math.log(2.0), R) % R == 1
    assert not numbers.rough
    read(math.pi / 7)
    assert numbers.rough == {math.pi / 7}
    assert read(1.0 + 1e-12) != 1 and read(1e-300) != 0


@pytest.mark.parametrize("modulus", [P, R], ids=["values", "exponents"])
def test_literals_that_are_nothing_modulo_the_prime_are_not_read(modulus: int) -> None:
    for number in (modulus, -3.0 * modulus, modulus * 2.0**-71, 1.0 / modulus):
        with pytest.raises(Silent):
            Numbers().read(number, modulus)
        with pytest.raises(Silent):
            Numbers().tensor(torch.tensor([0.5, number], dtype=torch.float64), modulus)
    numbers = Numbers()
    table = torch.tensor([-1e9, 0.25, torch.finfo(torch.float32).min])
    assert numbers.tensor(table, modulus).tolist() == [numbers.read(float(number), modulus) for number in table]
    with pytest.raises(Silent):
        pow_(Field(modulus, numbers), Residues(draw(3, modulus=modulus)), float(modulus))  # Fermat: x ** P == x


def test_two_literals_that_stand_for_the_same_are_not_read() -> None:
    numbers = Numbers()
    assert numbers.read(0.3, P) == numbers.read(0.1 + 0.2, P)  # what is left of the two is their rounding
    with pytest.raises(Silent):
        numbers.read(0.3000000000000003, P)


def test_what_hides_under_e_need_not_hide_under_another_base() -> None:
    """-110 in float32: the exponential is zero, 2 ** -110 and 1.05 ** -110 are not."""
    f = Field(R, Numbers(), field.GONE[torch.float32], field.unreached(torch.float32))
    hidden = f.of(-110.0, replaces=True)
    assert int(exponential(f, hidden).x) == 0
    for other in (lambda: exponential2(f, hidden), lambda: raised_to(f, 1.05, hidden)):
        with pytest.raises(Silent):
            other()
    assert int(exponential2(f, f.of(-160.0, replaces=True)).x) == 0
    lowest = f.of(torch.finfo(torch.float32).min, replaces=True)
    assert bool(mul(f, lowest, 0.125).gone)
    with pytest.raises(Silent):
        mul(f, lowest, 1e-38)


def test_the_largest_of_rows_is_not_that_of_columns() -> None:
    x = Residues(draw(4, 4, modulus=R))
    f = Field(R, Numbers())
    assert not torch.equal(largest(f, x, -1).x, largest(f, x, -2).x)
    assert torch.equal(largest(f, x, -1).x, largest(f, x, [1]).x)


def test_positions_that_do_not_fit_their_dtype() -> None:
    """2^19 times a position is beyond 32 bits at 4096."""
    steep = Law("affine", steps=(Fraction(1 << 19),))
    assert in_dtype(steep, torch.int64) == steep
    with pytest.raises(NotAffine):
        in_dtype(steep, torch.int32)
    assert in_dtype(Law("affine", steps=(Fraction(128),)), torch.int32).kind == "affine"


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_the_reference_is_the_recurrence_token_by_token(gate: str, delta: bool) -> None:
    N, T, K, V = 2, 131, 5, 3
    q, k, v, beta = draw(N, T, K), draw(N, T, K, seed=1), draw(N, T, V, seed=2), draw(N, T, 1, seed=3)
    state = draw(N, K, V, seed=4)
    decay = None if gate == "none" else field.exp(draw(N, T, K if gate == "channel" else 1, modulus=R, seed=5))
    o, last = recurrence(q, k, v, decay, beta, state, delta=delta)
    for t in range(T):
        key, query = k[:, t, :, None], q[:, t, None]
        state = state if decay is None else state * decay[:, t, :, None] % P
        write = v[:, t, None]
        if delta:
            write = (write - matmul(key.mT, state, P)) % P
        state = (state + key * (write * beta[:, t, None] % P) % P) % P
        assert torch.equal(o[:, t], matmul(query, state, P)[:, 0])
    assert torch.equal(last, state)
