"""Decays and masks that a module keeps as buffers: proven with their values, guarded at every call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kdacompile
from kdacompile import compat
from kdacompile.patterns.recurrence import tables
from kdacompile.report.report import Report
from tests.compare import relative_error, worst_error

HEADS, SIZE, BLOCK = 2, 8, 64
BOUND = 1e-5


class Lightning(nn.Module):
    """Lightning attention by blocks, with every decay read from a buffer of its own (as MiniMax has it)."""

    def __init__(self, slopes: tuple[float, ...] = (0.3, 0.02), block: int = BLOCK) -> None:
        super().__init__()
        slope = torch.tensor(slopes)[:, None, None]
        place = torch.arange(block) + 1
        gap = (place[:, None] - place[None, :])[None, None]
        self.block = block
        self.slope = nn.Buffer(slope)
        self.query_decay = nn.Buffer(torch.exp(-slope * place[:, None]))
        self.key_decay = nn.Buffer(torch.exp(-slope * (block - place[:, None])))
        self.within = nn.Buffer(torch.where(gap >= 0, torch.exp(-slope * gap), 0.0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        state = q.new_zeros(q.shape[0], HEADS, SIZE, v.shape[-1])
        outs = []
        for start in range(0, q.shape[2], self.block):
            qs, ks, vs = (x[:, :, start : start + self.block] for x in (q, k, v))
            size = qs.shape[2]
            inside = (qs @ ks.transpose(-1, -2) * self.within[:, :, :size, :size]) @ vs
            outs.append(inside + (qs * self.query_decay[:, :size]) @ state)
            state = state * torch.exp(-self.slope * size) + (ks * self.key_decay[:, -size:]).transpose(-1, -2) @ vs
        return torch.cat(outs, dim=-2), state


class Masked(nn.Module):
    """Linear attention as a masked product, the mask a buffer."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.mask = nn.Buffer(torch.ones(length, length).tril().to(dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2)
        if self.mask.dtype == torch.bool:
            return scores.masked_fill(~self.mask, 0.0) @ v
        return (scores * self.mask) @ v


def inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(1, HEADS, length, size, generator=generator).to(dtype) for size in (SIZE, SIZE, 12))


def options(inner: str) -> Any:
    return {"kda.inner": inner, "kda.expect": {"retention": 1}}


def explained(module: nn.Module, arguments: tuple[Tensor, ...]) -> Report:
    torch._dynamo.reset()
    with torch.no_grad():
        return kdacompile.explain(module)(*arguments)


@pytest.mark.parametrize("length", [17, 64, 257, 300])  # 257: the last block is one token
def test_tables_are_one_decay(length: int) -> None:
    module, arguments = Lightning(), inputs(length)
    report = explained(module, arguments)
    assert [match.pattern for match in report.matches] == ["retention"], str(report)
    held = {name for name in ("within", "query_decay", "key_decay", "slope") if _holds(report, name)}
    # Within one block the others only meet the state of zeros, or a state that lost nothing yet.
    assert "within" in held and (length <= BLOCK or held == {"within", "query_decay", "key_decay", "slope"})
    assert worst_error(report.result, module(*arguments)) < BOUND


def _holds(report: Report, name: str) -> bool:
    return any(name in held for held in report.matches[0].holds)


def test_half_precision_tables() -> None:
    module, arguments = Lightning().bfloat16(), inputs(150, torch.bfloat16)
    report = explained(module, arguments)
    assert len(report.matches) == 1, str(report)
    exact = Lightning().double()(*(x.double() for x in arguments))
    eager = worst_error(module(*arguments), exact)
    assert worst_error(report.result, exact) <= 1.5 * eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_in_a_buffer(dtype: torch.dtype) -> None:
    module, arguments = Masked(20, dtype), inputs(20)
    report = explained(module, arguments)
    assert [match.pattern for match in report.matches] == ["linear_attention"], str(report)
    assert _holds(report, "mask")
    assert relative_error(report.result, module(*arguments)) < BOUND


def in_place(module: Lightning) -> None:
    module.slope.mul_(1.5)


def through_data(module: Lightning) -> None:
    module.within.data.mul_(1.5)


def through_numpy(module: Lightning) -> None:
    module.query_decay.numpy()[:] *= 0.5


def another_tensor(module: Lightning) -> None:
    module.key_decay = nn.Buffer(module.key_decay * 0.5)


def loaded(module: Lightning) -> None:
    module.load_state_dict(Lightning((0.1, 0.4)).state_dict())


@pytest.mark.parametrize("change", [in_place, through_data, through_numpy, another_tensor, loaded])
def test_a_changed_buffer_gives_eagers_numbers(
    change: Callable[[Lightning], None], caplog: pytest.LogCaptureFixture
) -> None:
    module, arguments = Lightning(), inputs(100)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="kda", options=options("eager"))
    with torch.no_grad():
        first = compiled(*arguments)
        change(module)
        changed = compiled(*arguments)
        assert worst_error(changed, module(*arguments)) == 0.0
        assert worst_error(changed, first) > 1e-3
        assert "have changed" in caplog.text
        module.load_state_dict(before)
        assert worst_error(compiled(*arguments), first) == 0.0


def test_gradients_before_and_after_a_change() -> None:
    module, arguments = Lightning(), inputs(70)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="kda", options=options("aot_eager"))
    for _ in range(2):
        both = []
        for fn in (compiled, module):
            leaves = [x.clone().requires_grad_() for x in arguments]
            o, state = fn(*leaves)
            (o.square().sum() + state.square().sum()).backward()
            both.append([leaf.grad for leaf in leaves])
        assert worst_error(*both) < BOUND
        module.query_decay.mul_(0.5)


def test_the_compiler_sees_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caches know a graph by its text: two modules with different decays must not hand it the same one."""
    seen: list[str] = []

    def compile_fx(gm: torch.fx.GraphModule, *_: Any, **options: Any) -> Any:
        assert compat.PASS_OPTION not in options["config_patches"]
        seen.append(gm.code)
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    for slopes in ((0.3, 0.02), (0.1, 0.4)):
        torch._dynamo.reset()
        torch.compile(Lightning(slopes, block=8), backend="kda", options={"kda.cost_model": False})(*inputs(5))
    assert all("linear_attention" in code for code in seen)
    assert len(set(seen)) == 2


def one_entry(module: Lightning) -> None:
    module.within[0, 1, 9, 2] *= 1 + 1e-5


def one_head(module: Lightning) -> None:
    module.slope[1] *= 1.001


def shifted(module: Lightning) -> None:
    module.query_decay.copy_(module.query_decay * torch.exp(module.slope))


def not_finite(module: Lightning) -> None:
    module.key_decay[0, 3] = math.nan


@pytest.mark.parametrize("change", [one_entry, one_head, shifted, not_finite])
def test_tables_that_disagree_are_left_alone(change: Callable[[Lightning], None]) -> None:
    module, arguments = Lightning(), inputs(100)
    change(module)
    report = explained(module, arguments)
    assert not report.matches and report.rejections, str(report)
    assert worst_error(report.result, module(*arguments)) < BOUND or change is not_finite


def test_arguments_are_no_tables() -> None:
    """Only what a module owns is held: a mask that is passed in may differ at every call."""

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.transpose(-1, -2)) * mask) @ v

    arguments = (*inputs(20), torch.ones(20, 20).tril())
    torch._dynamo.reset()
    report = kdacompile.explain(masked)(*arguments)
    assert not report.matches


class Logarithms(nn.Module):
    """Retention whose mask is made in the call, of one logarithm a head, and goes through ``nan_to_num``."""

    def __init__(self, slopes: tuple[float, ...] = (0.3, 0.02)) -> None:
        super().__init__()
        self.decay = nn.Buffer(-torch.tensor(slopes))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2])
        distance = (places[:, None] - places).float().masked_fill(places[:, None] < places, math.inf)
        mask = torch.nan_to_num(torch.exp(distance * self.decay[:, None, None]))
        return (q @ k.mT * mask) @ v


def test_one_logarithm_a_head_is_a_table() -> None:
    module, arguments = Logarithms(), inputs(20)
    report = explained(module, arguments)
    assert [match.pattern for match in report.matches] == ["retention"], str(report)
    assert _holds(report, "decay")
    assert relative_error(report.result, module(*arguments)) < BOUND


@pytest.mark.parametrize("slopes", [(0.1, 0.4), (-0.3, 0.02), (0.0, math.inf)])
def test_a_changed_logarithm_gives_eagers_numbers(slopes: tuple[float, ...]) -> None:
    module, arguments = Logarithms(), inputs(20)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="kda", options=options("eager"))
    with torch.no_grad():
        compiled(*arguments)
        module.decay.copy_(-torch.tensor(slopes))
        torch.testing.assert_close(compiled(*arguments), module(*arguments), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("slopes", [(-0.3, 0.02), (0.0, 0.3), (math.inf, 0.3), (math.nan, 0.3)])
def test_other_numbers_are_no_logarithms_of_decays(slopes: tuple[float, ...]) -> None:
    module, arguments = Logarithms(slopes), inputs(20)
    report = explained(module, arguments)
    assert not any(match.holds for match in report.matches), str(report)
    torch.testing.assert_close(report.result, module(*arguments), equal_nan=True)


# -- the tables themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_ideal_undoes_rounding(dtype: torch.dtype) -> None:
    logs = -torch.tensor([0.4, 0.03], dtype=torch.float64)
    n = torch.arange(60, dtype=torch.float64)
    powers = (logs[:, None] * (n + 1)).exp()
    found = tables.ideal(powers.to(dtype), logs)
    assert found is not None
    torch.testing.assert_close(found, powers, rtol=1e-12, atol=torch.finfo(dtype).tiny)  # float16 underflows
    mask = torch.where(n[:, None] >= n, (logs[:, None, None] * (n[:, None] - n)).exp(), 0.0)
    found = tables.ideal(mask.to(dtype), logs)
    assert found is not None
    torch.testing.assert_close(found, mask, rtol=1e-12, atol=torch.finfo(dtype).tiny)
    rates = tables.ideal((-2 * logs).reshape(2, 1, 1).to(dtype), logs)
    assert rates is not None
    torch.testing.assert_close(rates, (-2 * logs).reshape(2, 1, 1))


def test_ideal_refuses_what_is_no_table() -> None:
    logs = -torch.tensor([0.4, 0.03], dtype=torch.float64)
    powers = (logs[:, None] * torch.arange(60)).exp().float()
    wrong = powers.clone()
    wrong[1, 7] *= 1 + 1e-5
    assert tables.ideal(powers, logs) is not None
    for table in (wrong, powers.flip(0), powers + 1e-3, torch.rand(2, 60), -powers):
        assert tables.ideal(table, logs) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_entries_too_small_for_the_dtype_are_powers_all_the_same(dtype: torch.dtype) -> None:
    """MiniMax's strongest head at 128 tokens: exp(-0.9 * 127). Zeros that a mask put there stay zeros."""
    logs = torch.tensor([-0.9, -0.01], dtype=torch.float64)
    distance = torch.arange(128)[:, None] - torch.arange(128)
    powers = (logs[:, None, None] * distance).exp().tril()
    rounded = powers.to(dtype)
    assert bool((rounded[0] == 0).sum() > (powers[0] == 0).sum())  # some are gone
    found = tables.ideal(rounded, logs)
    assert found is not None and torch.allclose(found, powers, rtol=1e-12, atol=0.0)
    windowed = tables.ideal(rounded.triu(-100), logs)
    assert windowed is not None and bool((windowed[1] == powers[1].triu(-100)).all())
