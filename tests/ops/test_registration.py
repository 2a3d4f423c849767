"""What the dispatcher sees: opcheck, fakes, autocast, vmap, modes, version counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils.flop_counter import FlopCounterMode

from kdacompile.ops import errors
from tests.ops.cases import Case, assert_close, make_case, oracle

OPS = torch.ops.kdacompile


def _call(case: Case, name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The overload, its positional arguments and its keyword arguments."""
    options = dict(case.options)
    tensors: tuple[Any, ...] = case.positional
    if "step" in name:
        del options["chunk_size"]
        tensors = (*tensors, None) if name.endswith("_") else tensors
    else:
        tensors = (*tensors, case.cu_seqlens)
    if name.endswith("backward"):
        del options["out_dtype"]
        options["wanted"] = [x is not None for x in case.positional]
        o, state = oracle(case)
        tensors = (o.float(), state.float(), *tensors)
    return getattr(OPS, name).default, tensors, options


def _permuted(case: Case) -> Case:
    dense = {n: case.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "g", "beta")}
    state = case.tensors["initial_state"].mT.contiguous().mT
    return case.with_tensors(**dense, initial_state=state)


CASES = {
    "full": make_case(gate_fn="softplus", length=1),
    "permuted": _permuted(make_case(length=1, groups=3)),
    "bare": make_case(gate="none", length=1, groups=1).with_tensors(beta=None, initial_state=None),
    "sixteen_bit": make_case(gate="token", length=1).to(torch.bfloat16).with_options(out_dtype=torch.float32),
}
FUNCTIONAL = ("linear_attention", "linear_attention_step")
BACKWARD = ("linear_attention_backward", "linear_attention_step_backward")


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("name", [*FUNCTIONAL, "linear_attention_step_"])
def test_opcheck_forward(name: str, label: str, grad: bool) -> None:
    case = CASES[label]
    if name.endswith("_") and case.tensors["initial_state"] is None:
        case = case.with_tensors(initial_state=make_case(length=1, groups=1).tensors["initial_state"])
    state_name = "initial_state"
    tensors = {
        n: x if x is None else x.detach().clone().requires_grad_(grad and not (n == state_name and name.endswith("_")))
        for n, x in case.tensors.items()
    }
    op, args, options = _call(case.with_tensors(**tensors), name)
    torch.library.opcheck(op, args, options)


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("name", BACKWARD)
def test_opcheck_backward(name: str, label: str) -> None:
    torch.library.opcheck(*_call(CASES[label], name))


def test_opcheck_longer_and_packed() -> None:
    case = make_case(length=19, batch=1, sequences=2)
    torch.library.opcheck(*_call(_permuted(make_case(length=19)), "linear_attention"))
    torch.library.opcheck(*_call(Case(case.tensors, case.options, torch.tensor([0, 3, 19])), "linear_attention"))
    torch.library.opcheck(*_call(make_case(length=0), "linear_attention"))


def test_fakes_put_no_guards_on_symbolic_sizes() -> None:
    environment = ShapeEnv()
    case = make_case(gate_fn="softplus", length=19)
    with FakeTensorMode(shape_env=environment) as mode:
        fake = {
            n: None if x is None else mode.from_tensor(x, symbolic_context=_all_dynamic(x))
            for n, x in case.tensors.items()
        }
        outputs = case.with_tensors(**fake).run()
    assert not environment.guards
    for actual, real in zip(outputs, case.run(), strict=True):
        sizes: list[Any] = list(actual.shape)
        assert all(isinstance(size, torch.SymInt) for size in sizes)
        assert [size.node.hint for size in sizes] == list(real.shape)


def _all_dynamic(x: Tensor) -> Any:
    return StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim())


def test_fakes_check_what_is_static() -> None:
    case = make_case(length=19)
    with FakeTensorMode() as mode:
        fake: dict[str, Any] = {n: None if x is None else mode.from_tensor(x) for n, x in case.tensors.items()}
        with pytest.raises(errors.SizeError):
            case.with_tensors(**{**fake, "k": fake["k"][:1]}).run()


@pytest.mark.parametrize("length", [1, 19])
def test_autocast_casts_nothing(length: int) -> None:
    case = make_case(length=length).with_tensors(q=make_case(length=length).tensors["q"].requires_grad_())
    run = case.run_step if length == 1 else case.run
    outside = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run()
        gradient = torch.autograd.grad(inside[0].sum(), case.tensors["q"])[0]
    assert [x.dtype for x in inside] == [torch.float32] * 2
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))
    assert torch.equal(gradient, torch.autograd.grad(outside[0].sum(), case.tensors["q"])[0])


def test_vmap_is_refused() -> None:
    case = make_case(length=1)
    stacked = torch.stack([case.tensors["q"]] * 3)
    for run in (Case.run, Case.run_step):
        with pytest.raises(errors.VmapError, match="batch dimension"):
            torch.vmap(lambda q, run=run: run(case.with_tensors(q=q))[0])(stacked)


def test_gradients_under_a_dispatch_mode() -> None:
    """A mode switches the autograd keys off around the ops it sees; the backward op differentiates all the same."""
    case = make_case(length=9)
    q = case.tensors["q"].requires_grad_()
    expected = torch.autograd.grad(case.run()[0].sum(), q)[0]
    with FlopCounterMode(display=False):
        actual = torch.autograd.grad(case.run()[0].sum(), q)[0]
    torch.testing.assert_close(actual, expected)


def test_meta_device() -> None:
    case = make_case(length=19)
    meta = case.with_tensors(**{n: None if x is None else x.to("meta") for n, x in case.tensors.items()})
    for actual, real in zip(meta.run(), case.run(), strict=True):
        assert (actual.shape, actual.stride(), actual.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_in_place_step_counts_its_mutation(mode: Any) -> None:
    op, args, options = _call(make_case(length=1), "linear_attention_step_")
    state = args[5].clone()
    before = state._version
    with mode():
        op(*args[:5], state, *args[6:], **options)
    assert state._version > before


def test_in_place_step_on_inference_tensors() -> None:
    case = make_case(length=1)
    with torch.inference_mode():
        case = case.with_tensors(initial_state=case.tensors["initial_state"].clone())
        expected = oracle(case)
        op, args, options = _call(case, "linear_attention_step_")
        o = op(*args, **options)
        assert_close((o, args[5]), expected, 1e-5)
