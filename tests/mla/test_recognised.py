"""Spellings of MLA are found and give the same numbers and gradients; near misses are left alone, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kdacompile
from kdacompile.patterns.mla import proof as mla_proof
from kdacompile.report.report import Report
from tests.compare import relative_error, tensors
from tests.mla.absorbed import ABSORBED, ABSORBED_MISSES, ABSORBED_OTHERS, DeepSeek
from tests.mla.spellings import CAUSAL, KEPT, NEAR_MISSES, OTHER_ATTENTION, RANK, ROPE, SPELLINGS, WIDTH, Naive, causal

EAGER: dict[str, Any] = {"kda.inner": "eager"}
GRADIENTS = ["SliceCopies", "TwoProjections", "Sdpa", "ValuesFirst", "DeepSeekCausal", "MqaRopeFirst"]
STEPS = [name for name in ABSORBED if name != "DeepSeekCausal"]


def inputs(tokens: int, cached: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return draw(batch, tokens, WIDTH), draw(batch, cached, RANK), draw(batch, cached, ROPE)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (SPELLINGS | ABSORBED)[name]()


def explained(module: nn.Module, arguments: tuple[Tensor, ...], **how: Any) -> Report:
    torch._dynamo.reset()
    return kdacompile.explain(module, options=EAGER, **how)(*arguments)


@pytest.mark.parametrize("name", SPELLINGS | ABSORBED)
def test_prefill(name: str) -> None:
    module = build(name)
    arguments = inputs(9, 9)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert [(m.pattern, m.mode) for m in report.matches] == [("mla", "sequence")], str(report)
    assert relative_error(report.result, expected) < 1e-6
    assert ("causal mask" in report.matches[0].absorbed) == (name in CAUSAL)


@pytest.mark.parametrize("name", ["Naive", "SliceCopies", "TwoTerms", "Sdpa", *STEPS])
def test_step(name: str) -> None:
    module = build(name)
    arguments = inputs(1, 12)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert [(m.pattern, m.mode) for m in report.matches] == [("mla", "step")], str(report)
    assert relative_error(report.result, expected) < 1e-6


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    module = build(name)
    own = [x.requires_grad_() for x in inputs(9, 9)]
    leaves = [*own, *module.parameters()]
    with torch.random.fork_rng():
        report = explained(module, tuple(own))
    assert len(report.matches) == 1, str(report)
    cotangent = torch.randn_like(report.result)
    have = torch.autograd.grad(report.result, leaves, cotangent, allow_unused=True)
    want = torch.autograd.grad(module(*own), leaves, cotangent, allow_unused=True)
    for x, y in zip(have, want, strict=True):
        assert (x is None) == (y is None)
        assert x is None or y is None or relative_error(x, y) < 1e-5


@pytest.mark.parametrize("name", NEAR_MISSES | ABSORBED_MISSES)
def test_near_misses(name: str) -> None:
    make, reason = (NEAR_MISSES | ABSORBED_MISSES)[name]
    torch.manual_seed(0)
    module, arguments = make(), inputs(9, 9)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        report = explained(module, arguments)
        torch.manual_seed(1)
        expected = module(*arguments)
    assert not report.matches and any(reason in r.reason for r in report.rejections), str(report)
    for have, want in zip(tensors(report.result), tensors(expected), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_a_prefill_keeps_its_keys(name: str, grad: bool) -> None:
    torch.manual_seed(0)
    module, arguments = KEPT[name](), inputs(9, 9)
    arguments[1].requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        report = explained(module, arguments)
        expected = module(*arguments)
    assert [match.mode for match in report.matches] == ["sequence"], str(report)
    assert all(relative_error(have, want) < 1e-6 for have, want in zip(report.result, expected, strict=True))
    if grad:
        have, want = (
            torch.autograd.grad([y.square().sum() for y in result], arguments[1])[0]
            for result in (report.result, expected)
        )
        assert relative_error(have, want) < 1e-5


@pytest.mark.parametrize("name", KEPT)
def test_a_step_that_returns_keys_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    module, arguments = KEPT[name](), inputs(1, 12)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert not report.matches and any("read by" in r.reason for r in report.rejections), str(report)
    assert all(torch.equal(have, want) for have, want in zip(report.result, expected, strict=True))


@pytest.mark.parametrize("name", OTHER_ATTENTION | ABSORBED_OTHERS)
def test_other_attention_is_nobodys_near_miss(name: str) -> None:
    torch.manual_seed(0)
    module = (OTHER_ATTENTION | ABSORBED_OTHERS)[name]()
    with torch.no_grad():
        report = explained(module, inputs(9, 9))
    assert not report.matches and not [r for r in report.rejections if r.pattern == "mla"], str(report)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("name", ["TwoTerms", "Sdpa", "DeepSeek", "Mqa"])
def test_nothing_to_attend_to_is_left_alone(name: str, tokens: int) -> None:
    module, arguments = build(name), inputs(tokens, 0)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert not report.matches and not report.rejections, str(report)
    assert torch.equal(report.result, expected)


class Padded(Naive):
    """A mask that only the batch decides, added as numbers."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]
        k, v = self.expand(latent, rope)
        hidden = torch.where(padding[:, None, None, :], 0.0, torch.finfo(x.dtype).min)
        weights = (self.queries(x) @ k.mT * self.scale + hidden).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_a_mask_of_the_inputs_is_carried() -> None:
    torch.manual_seed(0)
    module, padding = Padded(), torch.ones(2, 9, dtype=torch.bool)
    padding[0, :4] = False
    padding[1] = False  # nothing is left to see: softmax averages
    arguments = (*inputs(9, 9), padding)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert [set(m.roles) for m in report.matches] == [{"q", "latent", "k_rope", "w", "mask"}], str(report)
    assert relative_error(report.result, expected) < 1e-6


class Added(Naive):
    """A mask as it comes, whatever its dtype."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        k, v = self.expand(latent, rope)
        weights = (self.queries(x) @ k.mT * self.scale + mask[:, None, None]).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


def test_masks_of_every_dtype_are_added() -> None:
    """Integers too; True is a one like any other, though numbers of the same shape have been proven before."""
    torch.manual_seed(0)
    module, seen = Added(), torch.arange(9) < torch.tensor([[4], [9]])
    for mask, matched in [((~seen).float() * -1e9, True), ((~seen).long() * -10000, True), (seen, False)]:
        with torch.no_grad():
            report = explained(module, (*inputs(9, 9), mask))
            assert len(report.matches) == matched, str(report)
            assert relative_error(report.result, module(*inputs(9, 9), mask)) < 1e-6


def test_a_row_without_a_finite_score_gives_zero() -> None:
    """As the op says of a query that sees no token; softmax makes NaN of it."""
    torch.manual_seed(0)
    module, mask = Added(), torch.zeros(2, 9)
    mask[0] = float("-inf")
    with torch.no_grad():
        report = explained(module, (*inputs(9, 9), mask))
        expected = module(*inputs(9, 9), mask)
    assert len(report.matches) == 1 and expected[0].isnan().all() and not expected[1].isnan().any()
    assert not report.result[0].any()
    assert relative_error(report.result[1], expected[1]) < 1e-6


class TwoMasks(Padded):
    """Causal by the graph, padded by an input; ``causal_fill`` is added first, or after the padding."""

    def __init__(self, causal_fill: float, padded_fill: float, *, select: bool, causal_first: bool = True) -> None:
        super().__init__()
        self.fills, self.select, self.causal_first = (causal_fill, padded_fill), select, causal_first

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, padding: Tensor) -> Tensor:
        k, v = self.expand(latent, rope)
        scores = self.queries(x) @ k.mT * self.scale
        future = torch.full(scores.shape[-2:], self.fills[0]).triu(1)
        scores = scores + future if self.causal_first else scores
        if self.select:
            scores = scores.masked_fill(~padding[:, None, None], self.fills[1])
        else:
            scores = scores + torch.where(padding[:, None, None], 0.0, self.fills[1])
        scores = scores if self.causal_first else scores + future
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


LOW, GONE = torch.finfo(torch.float32).min / 2, float("-inf")


@pytest.mark.parametrize("causal_first", [True, False])
@pytest.mark.parametrize("select", [True, False])
@pytest.mark.parametrize("fills", [(GONE, LOW), (LOW, LOW), (LOW, GONE), (LOW, torch.finfo(torch.float32).min)])
def test_a_row_that_two_masks_hide(fills: tuple[float, float], select: bool, causal_first: bool) -> None:
    """The first queries see nothing but padding: what they average over depends on what each mask leaves."""
    module = TwoMasks(*fills, select=select, causal_first=causal_first)
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, :4] = False
    arguments = (*inputs(9, 9), padding)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert len(report.matches) == 1, str(report)
    assert bool(report.matches[0].absorbed) == (fills[0] == GONE and not select), str(report)
    assert report.result.isnan().equal(expected.isnan())
    assert relative_error(report.result.nan_to_num(), expected.nan_to_num()) < 1e-6


class Replaced(Padded):
    """Scores of padding are replaced by a number: rows hidden as a whole average, and their scores learn nothing."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, padding: Tensor) -> Tensor:
        k, v = self.expand(latent, rope)
        scores = (self.queries(x) @ k.mT * self.scale).masked_fill(~padding[:, None, None], LOW)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("module", "matched"),
    [
        (Replaced(), True),
        (TwoMasks(GONE, LOW, select=True, causal_first=False), True),
        (TwoMasks(LOW, LOW, select=True), False),  # two rules in one row
    ],
)
def test_a_row_that_is_replaced_has_no_gradient(module: Padded, matched: bool) -> None:
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0], padding[1, :4] = False, False
    own = [x.requires_grad_() for x in inputs(9, 9)]
    leaves = [*own, *module.parameters()]
    report = explained(module, (*own, padding))
    expected = module(*own, padding)
    assert len(report.matches) == matched, str(report)
    assert relative_error(report.result, expected) < 1e-6
    cotangent = torch.randn_like(expected)
    have, want = (torch.autograd.grad(result, leaves, cotangent) for result in (report.result, expected))
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(have, want, strict=True))


@pytest.mark.parametrize(("tokens", "cached"), [(96, 96), (1, 300)])
def test_bf16_is_no_worse_than_eager(tokens: int, cached: int) -> None:
    """Measured against the same module in float64, which sees the same rounded weights and inputs."""
    module = build("SliceCopies").to(torch.bfloat16)
    arguments = tuple(x.to(torch.bfloat16) for x in inputs(tokens, cached, batch=8))
    with torch.no_grad():
        report = explained(module, arguments)
        eager = module(*arguments)
        exact = module.double()(*(x.double() for x in arguments))
    assert len(report.matches) == 1, str(report)
    assert relative_error(report.result, exact) <= relative_error(eager, exact)


@pytest.mark.parametrize("name", ["SliceCopies", "MqaGrouped"])
def test_many_tokens_are_proven_on_some(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static prefill whose scores are too many to be run: constant masks are read whole, the rest runs on fewer."""
    monkeypatch.setattr(mla_proof, "LARGEST", 2 * 4 * 260 * 260)
    module, arguments = build(name), inputs(301, 301)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert len(report.matches) == 1, str(report)
    assert relative_error(report.result, expected) < 1e-6


class OddCorner(Naive):
    """Causal but for one place, far from the end."""

    def mask(self, scores: Tensor) -> Tensor:
        keep = causal(*scores.shape[-2:]) | (torch.arange(scores.shape[-1]) == 299)
        return scores + torch.where(keep, 0.0, float("-inf"))


def test_a_constant_mask_is_read_whole() -> None:
    torch.manual_seed(0)
    module, arguments = OddCorner(), inputs(300, 300)
    with torch.no_grad():
        report = explained(module, arguments)
        expected = module(*arguments)
    assert "causal mask" not in [name for match in report.matches for name in match.absorbed], str(report)
    assert relative_error(report.result, expected) < 1e-6


@pytest.mark.parametrize("name", ["Sdpa", "DeepSeek", "MqaExpanded", "Buffers"])
def test_one_graph_for_all_lengths(name: str) -> None:
    torch._dynamo.reset()
    module = build(name)
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(len(graph.graph.nodes))
        return kdacompile.backend.kda(graph, example, options=EAGER | {"kda.expect": {"mla": 1}})

    compiled = torch.compile(module, backend=count, dynamic=True)
    with torch.no_grad():
        for tokens, cached in ((5, 9), (7, 30), (6, 200) if name != "Buffers" else (6, 31)):
            arguments = inputs(tokens, cached)
            assert relative_error(compiled(*arguments), module(*arguments)) < 1e-6
    assert len(graphs) == 1


def test_a_scale_that_dynamic_shapes_turn_into_an_input() -> None:
    """It is part of the match, so the graph is captured again when it changes."""
    torch._dynamo.reset()
    module = DeepSeek()
    options: Any = EAGER | {"kda.expect": {"mla": 1}}
    compiled = torch.compile(module, backend="kda", dynamic=True, options=options)
    arguments = inputs(5, 9)
    with torch.no_grad():
        for scale in (0.3, 0.7):
            module.scale = scale
            assert relative_error(compiled(*arguments), module(*arguments)) < 1e-6


def test_switched_off() -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        report = kdacompile.explain(build("Naive"), options=EAGER | {"kda.disable": ["mla"]})(*inputs(9, 9))
    assert not report.matches and [r.code for r in report.rejections] == ["disabled"]
