"""``o_layout``: the order of o's dimensions in memory, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from kdacompile.ops import errors
from tests.ops.cases import Case, make_case

LAYOUTS = ["BTHV", "BHTV", "THBV", "VTHB"]


def _order_in_memory(o: torch.Tensor) -> str:
    return "".join(sorted("BTHV", key=lambda letter: -o.stride("BTHV".index(letter))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_stay_and_strides_follow(layout: str) -> None:
    case = make_case(length=6)
    plain, state = case.run()
    o, same_state = case.with_options(o_layout=layout).run()
    assert torch.equal(o, plain) and torch.equal(state, same_state)
    assert _order_in_memory(o) == layout
    with FakeTensorMode() as mode:
        fake = Case({n: None if x is None else mode.from_tensor(x) for n, x in case.tensors.items()}, case.options)
        assert fake.with_options(o_layout=layout).run()[0].stride() == o.stride()


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_gradients_do_not_depend_on_it(layout: str) -> None:
    gradients = []
    for options in ({}, {"o_layout": layout}):
        case = make_case(length=6).with_options(**options)
        q = case.tensors["q"].requires_grad_()
        o, _ = case.run()
        o.square().sum().backward()
        gradients.append(q.grad)
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_opcheck() -> None:
    case = make_case(length=3).with_options(o_layout="BHTV")
    arguments = (*case.positional, None)
    result = torch.library.opcheck(torch.ops.kdacompile.linear_attention.default, arguments, case.options)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["", "BTH", "BTHVV", "bthv"])
def test_other_letters_are_refused(layout: str) -> None:
    with pytest.raises(errors.OptionError):
        make_case().with_options(o_layout=layout).run()
