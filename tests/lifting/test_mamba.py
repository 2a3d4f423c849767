"""mamba_ssm's and causal_conv1d's functions that cut a graph, as stand-ins (``mamba_like``), are replaced whole."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from kdacompile.capture import hook, lifting
from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.lifting import mamba_like

HEADS, SIZE, STATE, WIDTH = 4, 8, 16, 4
Options = dict[str, Any]


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    homes = {
        "causal_conv1d_fn": "causal_conv1d.causal_conv1d_interface",
        "mamba_chunk_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
        "mamba_split_conv1d_scan_combined": "mamba_ssm.ops.triton.ssd_combined",
    }
    for name, home in homes.items():
        root = home.partition(".")[0]
        module = types.ModuleType(root)
        module.__dict__["__version__"] = "0.0.test"
        monkeypatch.setitem(sys.modules, root, module)
        monkeypatch.setattr(getattr(mamba_like, name), "__module__", home)
    yield types.SimpleNamespace(**{name: getattr(mamba_like, name) for name in homes})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 0.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def scan_operands(length: int = 40, groups: int = 2) -> dict[str, Tensor]:
    return {
        "x": normal(2, length, HEADS, SIZE),
        "dt": normal(2, length, HEADS, seed=1),
        "A": -normal(HEADS, seed=2).exp(),
        "B": normal(2, length, groups, STATE, seed=3),
        "C": normal(2, length, groups, STATE, seed=4),
        "D": normal(HEADS, seed=5),
        "dt_bias": normal(HEADS, seed=6),
    }


def split_operands(length: int = 40, groups: int = 1, mlp: int = 0) -> dict[str, Tensor]:
    inner = HEADS * SIZE
    channels = inner + 2 * groups * STATE
    return {
        "zxbcdt": normal(2, length, 2 * mlp + inner + channels + HEADS),
        "conv1d_weight": normal(channels, WIDTH, seed=1),
        "conv1d_bias": normal(channels, seed=2),
        "dt_bias": normal(HEADS, seed=3),
        "A": -normal(HEADS, seed=4).exp(),
        "D": normal(HEADS, seed=5),
        "rmsnorm_weight": 1 + normal(inner, seed=6),
        "outproj_weight": normal(24, inner + mlp, seed=7),
    }


def compiled(fn: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    return torch.compile(fn, backend="kda", fullgraph=fullgraph, options={"kda.inner": "aot_eager"})


def results(fn: Callable[..., Any], tensors: dict[str, Tensor], *, grad: bool = True) -> list[Tensor]:
    """What a function of keywords returns, and the gradient of each tensor."""
    leaves = {name: tensor.detach().clone().requires_grad_(grad) for name, tensor in tensors.items()}
    with torch.set_grad_enabled(grad):
        out = fn(**leaves)
        outs: list[Tensor] = [out] if isinstance(out, Tensor) else list(out)
        if not grad:
            return outs
        loss = sum(((o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum() for o in outs), torch.tensor(0.0))
        return [*outs, *torch.autograd.grad(loss, list(leaves.values()))]


def agree(run: Callable[..., Any], fn: Callable[..., Any], tensors: dict[str, Tensor], *, grad: bool = True) -> None:
    """Results and gradients are equal, and the first result lies in memory as the library's does."""
    have, want = results(run, tensors, grad=grad), results(fn, tensors, grad=grad)
    assert have[0].stride() == want[0].stride()
    for mine, theirs in zip(have, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, theirs) < 1e-5


def lifted() -> list[str]:
    return [item.verdict.function for item in hook.lifts.known.values() if isinstance(item, lifting.Lifted)]


def reasons() -> list[str]:
    return [item.reason for item in hook.lifts.known.values() if not isinstance(item, lifting.Lifted)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"activation": "swish", "bias": None}])
def test_convolution_of_a_transposed_sequence(libraries: Any, options: Options, grad: bool) -> None:
    def model(x: Tensor, weight: Tensor, **bias: Tensor) -> Tensor:
        given = {**bias, **options}
        return libraries.causal_conv1d_fn(x.transpose(1, 2), weight, **given) * 2

    tensors = {"x": normal(2, 40, 24), "weight": normal(24, WIDTH), "bias": normal(24)}
    if "bias" in options:
        del tensors["bias"]
    with pytest.raises(Unsupported, match="non-contiguous"):
        results(torch.compile(model, backend="eager", fullgraph=True), tensors, grad=grad)
    agree(compiled(model), model, tensors, grad=grad)
    assert lifted() == ["causal_conv1d_fn"]


def test_convolution_keeps_the_order_of_dimensions(libraries: Any) -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        return libraries.causal_conv1d_fn(x * 2, weight).view(2, -1)

    agree(compiled(model), model, {"x": normal(2, 24, 40), "weight": normal(24, WIDTH)}, grad=False)
    assert lifted() == ["causal_conv1d_fn"]


def test_convolutions_of_many_lengths_are_one_graph(libraries: Any) -> None:
    def model(x: Tensor, weight: Tensor) -> Tensor:
        return libraries.causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu")

    run, weight = compiled(model), normal(24, WIDTH)
    for length in (30, 9, 130, 77):
        agree(run, model, {"x": normal(2, length, 24), "weight": weight}, grad=False)
    assert counters["stats"]["unique_graphs"] <= 2  # the first length, then any


@pytest.mark.parametrize(
    "options",
    [
        {"dt_softplus": True},
        {"dt_softplus": True, "dt_limit": (0.4, 0.9)},
        {"dt_bias": None, "D": None},
    ],
)
def test_scan_in_training(libraries: Any, options: Options) -> None:
    tensors = {name: tensor for name, tensor in scan_operands().items() if name not in options}

    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_chunk_scan_combined(**given, chunk_size=16, **options)

    with pytest.raises(Unsupported):
        results(torch.compile(model, backend="eager", fullgraph=True), tensors)
    with collecting() as report:
        agree(compiled(model), model, tensors)
    assert [(match.pattern, match.lifted) for match in report.matches] == [("simple_gla", "mamba_chunk_scan_combined")]


def test_scan_with_states_gate_and_a_factor_per_channel(libraries: Any) -> None:
    tensors = scan_operands() | {
        "D": normal(HEADS, SIZE),
        "z": normal(2, 40, HEADS, SIZE, seed=9),
        "initial_states": normal(2, HEADS, SIZE, STATE),
    }

    def model(**given: Tensor) -> Any:
        out, state = libraries.mamba_chunk_scan_combined(
            **given, chunk_size=16, dt_softplus=True, return_final_states=True
        )
        return out, state * 2

    run = compiled(model)
    for have, want in zip(results(run, tensors), results(model, tensors), strict=True):
        assert relative_error(have, want) < 1e-5
    assert lifted() == ["mamba_chunk_scan_combined"]


def test_scan_in_inference_is_left_to_the_library(libraries: Any) -> None:
    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_chunk_scan_combined(**given, chunk_size=16, dt_softplus=True)

    agree(compiled(model), model, scan_operands(20), grad=False)
    assert not lifted()
    assert reasons() == ["without gradients it does not cut the graph"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("groups", "without", "options"),
    [
        (1, (), {"norm_before_gate": False, "return_final_states": False, "dt_limit": (0.0, float("inf"))}),
        (2, (), {}),
        (2, ("rmsnorm_weight",), {"activation": "swish"}),
        (1, ("rmsnorm_weight", "outproj_weight"), {"conv1d_bias": None}),
    ],
)
def test_whole_layer(libraries: Any, groups: int, without: tuple[str, ...], options: Options, grad: bool) -> None:
    tensors = {n: tensor for n, tensor in split_operands(groups=groups).items() if n not in {*without, *options}}
    static = {"chunk_size": 16, "headdim": SIZE, "ngroups": groups, **options}

    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_split_conv1d_scan_combined(**given, **static)

    with pytest.raises(Unsupported):
        results(torch.compile(model, backend="eager", fullgraph=True), tensors, grad=grad)
    with collecting() as report:
        agree(compiled(model), model, tensors, grad=grad)
    assert [(m.pattern, m.lifted) for m in report.matches] == [("simple_gla", "mamba_split_conv1d_scan_combined")]


def test_whole_layer_with_states_and_a_factor_per_channel(libraries: Any) -> None:
    tensors = split_operands() | {
        "D": normal(HEADS, SIZE),
        "outproj_bias": normal(24),
        "initial_states": normal(2, HEADS, SIZE, STATE),
    }

    def model(**given: Tensor) -> Any:
        out, state = libraries.mamba_split_conv1d_scan_combined(**given, chunk_size=16, return_final_states=True)
        return out, state * 2

    for have, want in zip(results(compiled(model), tensors), results(model, tensors), strict=True):
        assert relative_error(have, want) < 1e-5
    assert lifted() == ["mamba_split_conv1d_scan_combined"]


def test_sixteen_bits(libraries: Any) -> None:
    """Rounded where the library rounds: as far from fp32 as its own results."""
    tensors = split_operands(64)
    static = {"chunk_size": 16, "headdim": SIZE, "norm_before_gate": False}

    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_split_conv1d_scan_combined(**given, **static)

    kept = {"A", "D", "dt_bias"}
    rounded = {n: tensor if n in kept else tensor.bfloat16() for n, tensor in tensors.items()}
    exact = results(model, {n: tensor.float() for n, tensor in rounded.items()})
    have, own = results(compiled(model), rounded), results(model, rounded)
    assert lifted() == ["mamba_split_conv1d_scan_combined"]
    for mine, theirs, want in zip(have, own, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, want) < 1.5 * relative_error(theirs, want) + 2e-3


@pytest.mark.parametrize("narrow", [False, True])
def test_a_layer_under_autocast(libraries: Any, narrow: bool) -> None:
    """The output projection alone is a product; the rest is in the dtypes it comes in."""
    tensors = split_operands(64)
    static = {"chunk_size": 16, "headdim": SIZE, "norm_before_gate": False}

    def model(zxbcdt: Tensor, **given: Tensor) -> Tensor:
        zxbcdt = zxbcdt.bfloat16() if narrow and torch.is_autocast_enabled("cpu") else zxbcdt
        return libraries.mamba_split_conv1d_scan_combined(zxbcdt, **given, **static)

    def under(fn: Callable[..., Any]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return results(fn, tensors)

    exact = results(model, tensors)
    have, own = under(compiled(model)), under(model)
    assert lifted() == ["mamba_split_conv1d_scan_combined"]
    for mine, theirs, want in zip(have, own, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, want) < 1.5 * relative_error(theirs, want) + 2e-3


@pytest.mark.parametrize("which", ["causal_conv1d_fn", "mamba_chunk_scan_combined"])
def test_parts_of_a_layer_under_autocast(libraries: Any, which: str) -> None:
    def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return libraries.causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu")

    def scan(**given: Tensor) -> Tensor:
        return libraries.mamba_chunk_scan_combined(**given, chunk_size=16, dt_softplus=True)

    model, tensors = (conv, {"x": normal(2, 40, 24), "weight": normal(24, WIDTH), "bias": normal(24)})
    if which != "causal_conv1d_fn":
        model, tensors = scan, scan_operands()
    with torch.autocast("cpu", torch.bfloat16):
        agree(compiled(model), model, tensors)
    assert lifted() == [which]


@pytest.mark.parametrize("which", ["causal_conv1d_fn", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"])
def test_a_sign_flipped(libraries: Any, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_like, "flaw", -1.0)
    fn = getattr(libraries, which)

    def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fn(x.transpose(1, 2), weight, bias)

    def scan(**given: Tensor) -> Tensor:
        return fn(**given, chunk_size=16, dt_softplus=True)

    def layer(**given: Tensor) -> Tensor:
        return fn(**given, chunk_size=16, headdim=SIZE)

    model, tensors = {
        "causal_conv1d_fn": (conv, {"x": normal(2, 40, 24), "weight": normal(24, WIDTH), "bias": normal(24)}),
        "mamba_chunk_scan_combined": (scan, scan_operands(20)),
        "mamba_split_conv1d_scan_combined": (layer, split_operands(20)),
    }[which]
    agree(compiled(model, fullgraph=False), model, tensors)
    assert not lifted()
    assert any("its results differ from the op's" in reason for reason in reasons())


def test_a_gradient_of_its_own(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """mamba_ssm 2.2 gave the norm's gradient as if there were one group."""
    backward = mamba_like.WithGradients.backward

    def other(ctx: Any, *seeds: Tensor) -> Any:
        return tuple(None if grad is None else grad * 1.5 for grad in backward(ctx, *seeds))

    monkeypatch.setattr(mamba_like.WithGradients, "backward", staticmethod(other))

    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_chunk_scan_combined(**given, chunk_size=16, dt_softplus=True)

    agree(compiled(model, fullgraph=False), model, scan_operands(20))
    assert reasons() == ["a gradient differs from the op's"]


def test_what_does_not_run_is_tried_again_with_other_versions(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """mamba_ssm's layer needs causal_conv1d."""

    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_split_conv1d_scan_combined(**given, chunk_size=16, headdim=SIZE)

    tensors = split_operands(20)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "causal_conv1d")
        without.setattr(mamba_like, "into_like", None)
        with pytest.raises(TypeError):
            results(compiled(model, fullgraph=False), tensors)
    assert reasons() == ["the library's own function does not run here, so there is nothing to compare with"]
    torch._dynamo.reset()
    agree(compiled(model), model, tensors)
    assert lifted() == ["mamba_split_conv1d_scan_combined"]


def test_packed_sequences_are_left_to_the_library(libraries: Any) -> None:
    packed = torch.arange(2).repeat_interleave(20).expand(2, -1).contiguous()

    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_chunk_scan_combined(**given, chunk_size=16, seq_idx=packed)

    agree(compiled(model, fullgraph=False), model, scan_operands())
    assert "seq_idx is not an option of its replacement" in reasons()


def test_states_of_the_convolution_are_left_to_the_library(libraries: Any) -> None:
    def model(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
        return libraries.causal_conv1d_fn(x.transpose(1, 2), weight, initial_states=before)

    tensors = {"x": normal(2, 40, 24), "weight": normal(24, WIDTH), "before": normal(2, 24, WIDTH - 1)}
    agree(compiled(model, fullgraph=False), model, tensors)
    assert reasons() == ["initial_states is not an option of its replacement"]


def test_an_mlp_in_the_same_projection_is_left_to_the_library(libraries: Any) -> None:
    def model(**given: Tensor) -> Tensor:
        return libraries.mamba_split_conv1d_scan_combined(**given, chunk_size=16, headdim=SIZE)

    agree(compiled(model, fullgraph=False), model, split_operands(20, mlp=6))
    assert reasons() == ["its projection holds more than this layer's columns"]
