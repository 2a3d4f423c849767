"""What ``python -m tests.fuzz`` has found, as small as it got."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sympy import Eq, floor, symbols
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Mod

from kdacompile.compat import Guards
from kdacompile.patterns.engine.placement import labelings
from tests.fuzz.bases import Sizes
from tests.fuzz.judge import Judge, Outcome, gradients_beside
from tests.fuzz.mutations import Mutation
from tests.fuzz.recipes import Call, Recipe
from tests.fuzz.yardstick import apart, difference
from tests.lifting.conftest import fresh
from tests.soundness.programs import explained

__all__ = ["fresh"]


def test_a_constant_decay_in_float64() -> None:
    """Its logarithm was handed to the op in float32."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = torch.arange(1, q.shape[2] + 1, dtype=q.dtype) * math.log(0.9)
        decay = (total[:, None] - total).tril().exp().tril()
        return (q @ k.mT * decay) @ v

    inputs = tuple(torch.randn(1, 2, 40, size, dtype=torch.float64) for size in (4, 4, 6))
    report = explained(program, inputs)
    assert [match.pattern for match in report.matches] == ["retention"], str(report)
    assert difference(report.result, program(*inputs)) < 1e-13


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Gated linear attention by chunks of 32, the writes clamped."""
    length = q.shape[2]
    pad = (32 - length % 32) % 32
    q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g))
    q, k, v, g = (x.reshape(*x.shape[:2], -1, 32, x.shape[-1]) for x in (q, k, v, g))
    g = g[..., 0].cumsum(-1)
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = torch.zeros_like(v)
    for n in range(q.shape[2]):
        decay = (g[:, :, n, :, None] - g[:, :, n, None]).tril().exp().tril()
        fresh = (v[:, :, n] * 2).clamp(min=-0.3)
        out[:, :, n] = (q[:, :, n] * g[:, :, n, :, None].exp()) @ state + (q[:, :, n] @ k[:, :, n].mT * decay) @ fresh
        left = (g[:, :, n, -1:] - g[:, :, n]).exp()[..., None]
        state = state * g[:, :, n, -1, None, None].exp() + (k[:, :, n] * left).mT @ fresh
        state = state.clamp(min=-0.3)
    return out.flatten(2, 3)[:, :, :length]


def test_a_capture_with_open_counts_that_fails() -> None:
    """Left open for the sake of a lift, counts of chunks were too open for a subtraction: the error was the user's."""

    def program(*args: Tensor) -> Tensor:
        return chunked(*args)

    compiled = torch.compile(program, backend="kda", options={"kda.inner": "eager"})
    with torch.no_grad():
        for length in (48, 49, 70):
            inputs = tuple(torch.randn(1, 2, length, size) for size in (4, 4, 6))
            gate = -0.1 * torch.rand(1, 2, length, 1)
            assert difference(compiled(*inputs, gate), program(*inputs, gate)) < 1e-4


def test_a_value_that_only_a_rule_reads() -> None:
    """It had been dropped, and came back without being anybody's reader: an internal error."""

    def program(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros_like((q.clone().zero_() + q)[:, :, 0])
        outs: list[Tensor] = []
        for q_t, k_t, v_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
            read = torch.einsum("bhk,bhkv->bhv", q_t, state)
            outs.append(read / (1 + (q_t * total).sum(-1, keepdim=True)))
            state = state + k_t[..., :, None] * v_t[..., None, :]
            total = total + k_t
        return torch.stack(outs, 2), state

    inputs = tuple(torch.rand(1, 1, *shape, dtype=torch.float64) for shape in ((4, 4), (4, 4), (4, 6), (4, 6)))
    report = explained(program, inputs)
    assert all(difference(x, y) < 1e-12 for x, y in zip(report.result, program(*inputs), strict=True))


def test_gradients_that_cancel_are_rounding_to_the_judge(tmp_path: Path) -> None:
    """Rows that see one key: eager's gradient of the query is zero there, ours 1e-16."""
    verdict = Judge(tmp_path)(Recipe("mla_SlidingWindow", (Call(33, seed=1),), Sizes(B=2), gradients=True))
    assert (verdict.kind, verdict.patterns) == ("matched", ("mla",)), verdict


def test_a_refused_candidate_without_bindings(tmp_path: Path) -> None:
    """Nobody had a name for it: an internal error."""
    bent = Mutation("bend", 145, "x / (1 + 1e-3 * x.square().sum(-1, keepdim=True))", "reduction")
    made = Recipe("chunked:4330201200", (Call(8),), Sizes(B=1, H=3, K=4, V=4), (bent,), dynamic=False)
    assert Judge(tmp_path)(made).kind in ("matched", "declined")


def test_a_state_between_two_tokens_of_gates_written_in_place() -> None:
    """The state's own nodes lived on, the write to the gates they read did not."""

    def program(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outs, between = list[Tensor](), state
        for t in range(q.shape[2]):
            log = g[:, :, t].clone()
            log.mul_(2.0)
            state = state * log.exp().unsqueeze(-1) + k[:, :, t, :, None] * v[:, :, t, None]
            outs.append((state * q[:, :, t, :, None]).sum(-2))
            between = state if t == 2 else between
        return torch.stack(outs, 2), state, between

    inputs = [torch.randn(1, 2, *shape, dtype=torch.float64) for shape in ((4, 4), (4, 4), (4, 6), (4, 4), (4, 6))]
    inputs[3] = -inputs[3].abs()
    report = explained(program, tuple(inputs))
    assert [match.pattern for match in report.matches] == ["gla"], str(report)
    assert all(difference(x, y) < 1e-12 for x, y in zip(report.result, program(*inputs), strict=True))


def test_scores_masked_in_place_that_are_returned_too() -> None:
    """They were returned as they had been before their mask."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = (q @ k.mT).clone()
        scores.masked_fill_(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1), 0)
        scores = scores * 1
        return scores @ v, scores

    inputs = tuple(torch.randn(1, 2, *shape, dtype=torch.float64) for shape in ((5, 4), (5, 4), (5, 6)))
    report = explained(program, inputs)
    assert [match.pattern for match in report.matches] == ["linear_attention"], str(report)
    assert all(difference(x, y) < 1e-12 for x, y in zip(report.result, program(*inputs), strict=True))


def test_gradients_beside_a_loss_that_is_lost_in_eager_too() -> None:
    """A row without keys, divided by its sum of 0: the op had no gradients for a chunk, eager none for one token."""
    lost, found = torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 3.0])

    def distance(ours: Tensor, plain: Tensor, result: Tensor) -> float:
        eager = Outcome([result], [plain])
        return apart(gradients_beside(Outcome([result], [ours]), eager), eager.gradients)

    assert distance(lost, lost.flip(0), lost) == 0.0
    assert distance(lost, lost.flip(0), found) == math.inf  # the loss was a number
    assert distance(lost, found, lost) == math.inf  # eager had them all
    assert distance(found, lost, lost) > 0.5  # a number where eager has another


def test_a_lifted_result_of_one_request(tmp_path: Path) -> None:
    """One request has any batch stride: heads were taken to be cut from fewer than there are, an internal error."""
    verdict = Judge(tmp_path)(Recipe("kda_neumann", (Call(16),), Sizes(B=1, H=3, V=6), dtype="float64", nested=True))
    assert (verdict.kind, verdict.patterns) == ("matched", ("kda",)), verdict


def test_a_state_elsewhere_in_its_storage(tmp_path: Path) -> None:
    """Mamba-2's, V before K, overwritten through a view: AOTAutograd alone wrote where the first call's had lain."""
    calls = (Call(2), Call(2, layout="offset", seed=1))
    verdict = Judge(tmp_path)(Recipe("mamba2_step_copy", calls, Sizes(1, 1, 4, 6), inner="aot_eager"))
    assert (verdict.kind, verdict.patterns) == ("matched", ("simple_gla",)), verdict


def test_a_guard_on_a_negative_remainder() -> None:
    """``Mod(T - 33, ...)`` at other sizes that are tried: torch's own assertion was an internal error."""
    env = ShapeEnv()
    size = env.create_unbacked_symint().node.expr
    guard = SimpleNamespace(expr=Eq(Mod(size - 33, 2), 0))
    assert not Guards(SimpleNamespace(guards=[guard], replacements={})).allow({size: 32})


def test_a_guard_on_a_remainder_by_nothing() -> None:
    """``Mod(T, K // 2)`` where K is 1: a view of whole chunks, whose stride is a product of sizes."""
    env = ShapeEnv()
    tokens, width = (env.create_unbacked_symint().node.expr for _ in range(2))
    guards = Guards(SimpleNamespace(guards=[SimpleNamespace(expr=Eq(Mod(tokens, width), 0))], replacements={}))
    assert not guards.allow({tokens: 32, width: 0})
    assert guards.allow({tokens: 32, width: 8})


def test_guards_are_evaluated_once_for_the_same_numbers() -> None:
    """Three lengths that guards bind to each other: each of thousands of sizes was put into every guard."""
    a, b, c = sizes = symbols("a b c", positive=True, integer=True)
    held = [Eq(floor(a / 8), 1), Eq(Mod(a + b, 8), 0), Eq(b, c)]
    env = SimpleNamespace(guards=[SimpleNamespace(expr=expr) for expr in held], replacements={}, var_to_range={})
    guards = Guards(env)
    found = [
        picked for picked in product(range(2, 20), repeat=3) if guards.allow(dict(zip(sizes, picked, strict=True)))
    ]
    assert found == [(x, y, y) for x in range(8, 16) for y in range(2, 20) if (x + y) % 8 == 0]
    assert len(guards.known) <= 18 + 2 * 18 * 18
    assert [size for size in range(20) if guards.allow_alone(a, size)] == [*range(8, 16)]


def unbound(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs, state = [], q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    for index, start in enumerate(range(0, q.shape[2], 16)):
        if index == 3:
            del state  # what reads it raises
        a, b, c = (x[:, :, start : start + 16] for x in (q, k, v))
        outs.append(a @ state + (a @ b.mT).tril() @ c)  # pyright: ignore[reportPossiblyUnboundVariable]
        state = state + b.mT @ c  # pyright: ignore[reportPossiblyUnboundVariable]
    return torch.cat(outs, 2)


def test_a_variable_without_a_value_at_some_length() -> None:
    """What a function raises at a length that a lift tries was an internal error; it is raised where eager does."""

    def program(*args: Tensor) -> Tensor:
        return unbound(*args)

    def inputs(length: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, 2, length, size, dtype=torch.float64) for size in (4, 4, 6))

    report = explained(program, inputs(20))
    assert [match.pattern for match in report.matches] == ["linear_attention"], str(report)
    compiled = torch.compile(program, backend="kda", options={"kda.inner": "eager"})
    for length in (20, 47):
        given = inputs(length)
        assert difference(compiled(*given), program(*given)) < 1e-12
    with pytest.raises(UnboundLocalError):
        compiled(*inputs(60))


def test_an_empty_tensor_has_no_key_heads() -> None:
    """What is left of a single head: its size was a number of key heads, and heads were divided by it."""
    assert labelings((2, 5, 1, 4), frozenset(), "BTGK", (("H", 1),))
    assert not labelings((2, 5, 0, 4), frozenset(), "BTGK", (("H", 1),))
