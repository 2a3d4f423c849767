"""Every bad argument and the class it raises."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.errors import KdaError
from kdacompile.ops import errors, linear_attention, linear_attention_step
from tests.ops.cases import Case, make_case

B, T, H, HV, K, V = 2, 7, 2, 4, 5, 3


def _case(**changes: Any) -> Case:
    """A good KDA call (gate_fn softplus) with some tensors or options replaced."""
    case = make_case(gate_fn="softplus", length=T)
    bounds = changes.pop("cu_seqlens", None)
    tensors = {name: changes.pop(name) for name in list(changes) if name in case.tensors}
    case = case.with_tensors(**tensors).with_options(**changes)
    return Case(case.tensors, case.options, bounds)


def _packed(bounds: Tensor, **changes: Any) -> Case:
    case = make_case(batch=1, length=T, sequences=bounds.shape[0] - 1 if bounds.dim() else 1)
    return Case({**case.tensors, **changes}, case.options, bounds)


def z(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


OP_ERRORS: list[tuple[str, Callable[[], Case], type[errors.OpError]]] = [
    ("q rank", lambda: _case(q=z(B, T, K)), errors.RankError),
    ("k rank", lambda: _case(k=z(B, T, K)), errors.RankError),
    ("v rank", lambda: _case(v=z(B, T, HV)), errors.RankError),
    ("g rank", lambda: _case(g=z(B, T, HV)), errors.RankError),
    ("beta rank", lambda: _case(beta=z(B, T, HV, 1)), errors.RankError),
    ("state rank", lambda: _case(initial_state=z(HV, K, V)), errors.RankError),
    ("A_log rank", lambda: _case(A_log=z(1, 1, HV, 1)), errors.RankError),
    ("dt_bias rank", lambda: _case(dt_bias=z(HV * K)), errors.RankError),
    ("cu_seqlens rank", lambda: _case(cu_seqlens=z(1, 2, dtype=torch.int32)), errors.RankError),
    ("k batch would broadcast", lambda: _case(k=z(1, T, H, K)), errors.SizeError),
    ("k length", lambda: _case(k=z(B, T + 1, H, K)), errors.SizeError),
    ("k heads", lambda: _case(k=z(B, T, 1, K)), errors.SizeError),
    ("k channels", lambda: _case(k=z(B, T, H, K + 1)), errors.SizeError),
    ("v length", lambda: _case(v=z(B, T - 1, HV, V)), errors.SizeError),
    ("g heads", lambda: _case(g=z(B, T, H, K)), errors.SizeError),
    ("g head", lambda: _case(g=z(H), gate="head", dt_bias=None), errors.SizeError),
    ("beta heads", lambda: _case(beta=z(B, T, 1)), errors.SizeError),
    ("state transposed", lambda: _case(initial_state=z(B, HV, V, K)), errors.SizeError),
    ("A_log size", lambda: _case(A_log=z(H)), errors.SizeError),
    ("dt_bias size", lambda: _case(dt_bias=z(HV, V)), errors.SizeError),
    ("states per sequence", lambda: _packed(torch.tensor([0, 3, 7]), initial_state=z(1, HV, K, V)), errors.SizeError),
    ("head groups", lambda: _case(v=z(B, T, 3, V)), errors.HeadGroupError),
    ("fewer value heads", lambda: _case(v=z(B, T, 1, V)), errors.HeadGroupError),
    ("no value heads", lambda: _case(v=z(B, T, 0, V)), errors.HeadGroupError),
    ("q integer", lambda: _case(q=z(B, T, H, K, dtype=torch.int64)), errors.DtypeError),
    ("k complex", lambda: _case(k=z(B, T, H, K, dtype=torch.complex64)), errors.DtypeError),
    ("v float8", lambda: _case(v=z(B, T, HV, V, dtype=torch.float8_e4m3fn)), errors.DtypeError),
    ("beta bool", lambda: _case(beta=z(B, T, HV, dtype=torch.bool)), errors.DtypeError),
    ("state integer", lambda: _case(initial_state=z(B, HV, K, V, dtype=torch.int32)), errors.DtypeError),
    ("cu_seqlens float", lambda: _packed(torch.tensor([0.0, 7.0])), errors.DtypeError),
    ("k device", lambda: _case(k=z(B, T, H, K, device="meta")), errors.DeviceError),
    ("state device", lambda: _case(initial_state=z(B, HV, K, V, device="meta")), errors.DeviceError),
    ("gate unknown", lambda: _case(gate="row"), errors.GateError),
    ("gate_fn unknown", lambda: _case(gate_fn="exp"), errors.GateError),
    ("gate without g", lambda: _case(g=None), errors.GateError),
    ("g without gate", lambda: _case(gate="none"), errors.GateError),
    ("A_log not read", lambda: _case(gate_fn="log", dt_bias=None), errors.GateParameterError),
    ("dt_bias not read", lambda: _case(gate_fn="factor", A_log=None), errors.GateParameterError),
    ("A_log without g", lambda: _case(g=None, gate="none"), errors.GateParameterError),
    ("growing sigmoid", lambda: _case(gate_fn="sigmoid", gate_scale=1.0), errors.GateParameterError),
    (
        "growing logsigmoid",
        lambda: _case(gate_fn="logsigmoid", gate_scale=-1.0, A_log=None, dt_bias=None),
        errors.GateParameterError,
    ),
    ("negative eps", lambda: _case(qk_l2norm_eps=-1e-6), errors.OptionError),
    ("eps NaN", lambda: _case(qk_l2norm_eps=float("nan")), errors.OptionError),
    ("negative chunk", lambda: _case(chunk_size=-1), errors.OptionError),
    ("packing and batch", lambda: _case(cu_seqlens=torch.tensor([0, 3, 7])), errors.CuSeqlensError),
    ("packing starts late", lambda: _packed(torch.tensor([1, 7])), errors.CuSeqlensError),
    ("packing decreases", lambda: _packed(torch.tensor([0, 5, 3, 7])), errors.CuSeqlensError),
    ("packing ends early", lambda: _packed(torch.tensor([0, 5])), errors.CuSeqlensError),
    ("packing ends late", lambda: _packed(torch.tensor([0, 9])), errors.CuSeqlensError),
    ("packing of nothing", lambda: _packed(torch.tensor([0]), initial_state=None), errors.CuSeqlensError),
]


@pytest.mark.parametrize(("make", "expected"), [row[1:] for row in OP_ERRORS], ids=[row[0] for row in OP_ERRORS])
def test_sequence_op(make: Callable[[], Case], expected: type[errors.OpError]) -> None:
    case = make()
    with pytest.raises(expected) as caught:
        case.run()
    assert type(caught.value) is expected
    assert isinstance(caught.value, KdaError) and isinstance(caught.value, (ValueError, TypeError))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("length", [0, 2])
def test_step_takes_one_token(length: int) -> None:
    with pytest.raises(errors.StepLengthError):
        make_case(length=length).run_step()


def _api(**changes: Any) -> Callable[[], Any]:
    arguments: dict[str, Any] = {"q": z(B, T, H, K), "k": z(B, T, H, K), "v": z(B, T, HV, V), **changes}
    return lambda: linear_attention(**arguments)


def _api_step(**changes: Any) -> Callable[[], Any]:
    arguments: dict[str, Any] = {"q": z(B, H, K), "k": z(B, H, K), "v": z(B, HV, V), **changes}
    return lambda: linear_attention_step(**arguments)


def slots(*indices: int) -> Tensor:
    return torch.tensor(indices, dtype=torch.int32)


def _api_pool(indices: Any, size: int = 9) -> Callable[[], Any]:
    return _api_step(state=z(size, HV, K, V), state_indices=indices, inplace=True)


API_ERRORS: list[tuple[str, Callable[[], Any], type[errors.OpError]]] = [
    ("q is None", _api(q=None), errors.OperandError),
    ("beta is a list", _api(beta=[1.0]), errors.OperandError),
    ("step state is a list", _api_step(state=[]), errors.OperandError),
    ("q rank 0", _api(q=z()), errors.RankError),
    ("g rank", _api(g=z(B, T)), errors.RankError),
    ("softplus without A_log", _api(g=z(B, T, HV), gate_fn="softplus"), errors.GateParameterError),
    ("sigmoid without A_log", _api(g=z(B, T, HV), gate_fn="sigmoid", gate_scale=-5.0), errors.GateParameterError),
    ("sigmoid without bound", _api(g=z(B, T, HV), gate_fn="sigmoid", A_log=z(HV)), errors.GateParameterError),
    ("gate_scale not read", _api(g=z(B, T, HV), gate_scale=-5.0), errors.GateParameterError),
    ("gate_fn unknown", _api(g=z(B, T, HV), gate_fn="exp"), errors.GateError),
    ("layout", _api(state_layout="vk"), errors.OptionError),
    ("state rank", _api(initial_state=z(HV), state_layout="VK"), errors.RankError),
    ("state layout", _api(initial_state=z(B, HV, K, V), state_layout="VK"), errors.SizeError),
    ("l2norm eps", _api(qk_l2norm=0.0), errors.OptionError),
    ("l2norm text", _api(qk_l2norm="yes"), errors.OptionError),
    ("step k rank", _api_step(k=z(B, 1, H, K)), errors.RankError),
    ("step beta rank", _api_step(beta=z(B, 1, HV)), errors.RankError),
    ("step g rank", _api_step(g=z(B, 1, HV, K)), errors.RankError),
    ("step nothing to write", _api_step(inplace=True), errors.StateError),
    ("step state", _api_step(state=z(B, HV, V, K), inplace=True), errors.SizeError),
    ("step slots of no pool", _api_step(state=z(9, HV, K, V), state_indices=slots(0, 1)), errors.StateError),
    ("step slots of some", _api_pool(slots(0)), errors.SizeError),
    ("step slots as numbers", _api_pool(slots(0, 1).float()), errors.DtypeError),
    ("step slots elsewhere", _api_pool(slots(0, 1).to("meta")), errors.DeviceError),
    ("step slots as a list", _api_pool([0, 1]), errors.OperandError),
    ("step slots past the pool", _api_pool(slots(0, 9)), errors.StateIndicesError),
    ("step slots twice", _api_pool(slots(3, 3)), errors.StateIndicesError),
    ("step slots of an empty pool", _api_pool(slots(-1, -1), 0), errors.StateIndicesError),
    ("step overlapping state", _api_step(state=z(1, HV, K, V).expand(B, -1, -1, -1), inplace=True), errors.StateError),
]


@pytest.mark.parametrize(("call", "expected"), [row[1:] for row in API_ERRORS], ids=[row[0] for row in API_ERRORS])
def test_functional_api(call: Callable[[], Any], expected: type[errors.OpError]) -> None:
    with pytest.raises(expected) as caught:
        call()
    assert type(caught.value) is expected


def test_messages_name_the_argument_and_both_shapes() -> None:
    with pytest.raises(errors.SizeError, match=r"beta must have shape \(2, 7, 4\) \(\[B, T, HV\]\), got \(2, 7, 2\)"):
        _case(beta=z(B, T, H)).run()


@pytest.mark.parametrize("name", ["g", "beta", "v"])
def test_heads_before_tokens_are_noticed_where_the_sizes_show_it(name: str) -> None:
    operands = {"v": z(B, T, HV, V), "g": z(B, T, HV, K), "beta": z(B, T, HV)}
    with pytest.raises((errors.SizeError, errors.HeadGroupError), match=rf"^{name} .*transpose\(1, 2\)"):
        _api(**{name: operands[name].transpose(1, 2)})()


def test_every_class_of_the_catalogue_is_met_somewhere() -> None:
    met = {row[2] for row in (*OP_ERRORS, *API_ERRORS)}
    met |= {errors.StepLengthError}  # above
    met |= {errors.LatentWeightsError, errors.PagedCacheError}  # in test_mla
    met |= {errors.VmapError, errors.DoubleBackwardError, errors.ForwardModeError}  # in the files on those
    met |= {errors.DistributedTensorError}
    met |= {errors.ContextParallelError}  # in tests/distributed
    catalogue = {x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.OpError)}
    assert catalogue - {errors.OpError, errors._Hinted} == met
