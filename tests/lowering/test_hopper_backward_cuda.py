"""The hand-tuned kernels of the backward pass on a Hopper GPU, beside float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.adjoint import GradientKernels
from kdacompile.lowering.hopper import HopperGradients
from kdacompile.lowering.hopper.backward_run import HopperBackward
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.scratch import Scratch
from tests.lowering.differentiated import (
    BOTH,
    SIXTEEN,
    a_long_sequence,
    call_of,
    check,
    given_betas,
    in_runs,
    later_is_ignored,
    packed,
    plain,
    weights,
)
from tests.lowering.peer import error_of_gates
from tests.lowering.test_backward_cuda import rounded
from tests.ops.cases import Case, make_case

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

KERNELS: GradientKernels = HopperGradients()
TOLERANCE = 8e-3


def case_of(length: int = 150, heads: int = 1, value_dim: int = 128, **options: object) -> Case:
    case = make_case(length=length, heads=heads, key_dim=128, value_dim=value_dim, **options)  # type: ignore[arg-type]
    return case.with_options(chunk_size=0, scale=128**-0.5)


def compare(case: Case, used: tuple[str, ...] = BOTH, peers: dict[str, float] | None = None) -> dict[str, torch.Tensor]:
    case = rounded(case, torch.bfloat16)
    there = case.with_tensors(**{n: None if x is None else x.cuda() for n, x in case.tensors.items()})
    assert KERNELS.declines(call_of(there)) is None
    return check(case, TOLERANCE, used, "cuda", KERNELS, peers)


@pytest.mark.parametrize("row", ROWS)
def test_every_row(row: tuple[str, bool]) -> None:
    gate, delta = row
    case = case_of(gate=gate, delta=delta)
    compare(case)
    compare(plain(case))
    if gate == "head":  # with the final state's gradient as well, that of the gate is next to nothing
        compare(case, ("o",))


@pytest.mark.parametrize("fn", ["sigmoid", "softplus", "logsigmoid", "factor"])
@pytest.mark.parametrize("delta", [True, False])
def test_gate_functions(fn: str, delta: bool) -> None:
    compare(case_of(gate_fn=fn, delta=delta))


@pytest.mark.parametrize("bound", [-5.0, -5.5])
def test_gates_at_their_bound(bound: float) -> None:
    """Two sets of kernels, for a bound that 16 tokens stay in range with, and below."""
    case = case_of(length=200, gate_fn="sigmoid").with_options(gate_scale=bound)
    g = case.tensors["g"]
    assert g is not None
    compare(case.with_tensors(g=g + 20.0), ("o",))
    compare(case.with_tensors(g=torch.where(torch.rand(g.shape) < 0.5, g + 20.0, g - 20.0)), ("o",))


@pytest.mark.parametrize("fn", ["sigmoid", "softplus", "logsigmoid"])
def test_gate_functions_of_tokens(fn: str) -> None:
    compare(case_of(gate="token", gate_fn=fn))


@pytest.mark.parametrize("delta", [True, False])
def test_mamba_s_widths(delta: bool) -> None:
    compare(case_of(heads=1, groups=3, gate="token", delta=delta, value_dim=64))


@pytest.mark.parametrize("gate", ["channel", "token"])
def test_packed_sequences_and_grouped_heads(gate: str) -> None:
    four = case_of(length=340, batch=1, sequences=4, gate=gate)
    compare(replace(four, cu_seqlens=torch.tensor([0, 33, 33, 162, 340])))
    compare(packed(case_of(length=sum(SIXTEEN), batch=1, sequences=len(SIXTEEN), gate=gate)))
    compare(case_of(heads=2, groups=2, gate=gate))


def test_65536_tokens() -> None:
    a_long_sequence(KERNELS, TOLERANCE)


@pytest.mark.parametrize("gate", ["channel", "token"])
@pytest.mark.parametrize("delta", [True, False])
def test_strong_gates(gate: str, delta: bool) -> None:
    random = torch.Generator().manual_seed(1)
    case = case_of(gate=gate, delta=delta, gate_fn="log")
    g = case.tensors["g"]
    assert g is not None
    strong = torch.where(torch.rand(g.shape, generator=random) < 0.2, -1000.0, g)
    compare(case.with_tensors(g=strong))
    compare(case.with_tensors(g=torch.where(torch.rand(g.shape, generator=random) < 0.1, -torch.inf, strong)))


def test_beta_at_its_ends_and_equal_keys() -> None:
    case = plain(case_of()).with_options(sigmoid_beta=False)
    beta, k = case.tensors["beta"], case.tensors["k"]
    assert beta is not None and k is not None
    beta = torch.rand(beta.shape)
    beta[:, ::3], beta[:, 1::3] = 0.0, 1.0
    compare(case.with_tensors(beta=beta))
    rising = case.with_tensors(beta=beta, k=k[:, :1].expand_as(k))
    compare(rising)


@pytest.mark.parametrize("gate", ["channel", "token", "none"])
def test_normalised_keys_and_steps_that_enlarge(gate: str) -> None:
    for case in given_betas(gate):
        compare(case, peers={"g": error_of_gates(rounded(case, torch.bfloat16))} if gate == "token" else {})


@pytest.mark.parametrize("row", ROWS)
def test_runs_of_chunks_that_share_buffers(row: tuple[str, bool]) -> None:
    gate, delta = row
    for batch in (1, 2):
        case = rounded(case_of(batch=batch, length=330, heads=2, gate=gate, delta=delta), torch.bfloat16)
        in_runs(case, "cuda", KERNELS, TOLERANCE, groups=batch)


@pytest.mark.parametrize("heads", [3, 32])
@pytest.mark.parametrize(("length", "gate"), [(1024, "channel"), (2100, "channel"), (2100, "token"), (2100, "none")])
def test_gradients_begin_beside_the_scan(heads: int, length: int, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the middle of a sequence and from its end, many times, the same bits as behind it; in runs, too."""
    fn = "log" if gate == "none" else "sigmoid"
    case = rounded(case_of(batch=1, length=length, heads=heads, gate=gate, gate_fn=fn), torch.bfloat16)
    of_o, of_state = (None if w is None else w.cuda() for w in weights(case))
    call = call_of(case.with_tensors(**{n: None if x is None else x.cuda() for n, x in case.tensors.items()}))
    beside = [KERNELS.gradients(call, of_o, of_state, Scratch(poison=True)) for _ in range(8)]
    with monkeypatch.context() as cut:
        cut.setattr(HopperBackward, "_cut", lambda self: (self._heads, 16))
        beside += [KERNELS.gradients(call, of_o, of_state, Scratch(poison=True)) for _ in range(8)]
    modes = list[str]()
    monkeypatch.setattr(HopperBackward, "_early", lambda self, heads: modes.append("") or "")
    behind = KERNELS.gradients(call, of_o, of_state, Scratch(poison=True))
    assert modes
    for found in beside:
        for x, y in zip(found, behind, strict=True):
            assert x is None or (y is not None and torch.equal(x, y))


@pytest.mark.parametrize("result", BOTH)
def test_one_result_alone(result: str) -> None:
    case = case_of()
    g = case.tensors["g"]
    assert g is not None
    compare(case.with_tensors(g=0.05 * g), (result,))  # so that the initial state's gradient is not all underflow


def test_an_expanded_gradient() -> None:
    case = rounded(case_of(), torch.bfloat16)
    call = call_of(case.with_tensors(**{n: None if x is None else x.cuda() for n, x in case.tensors.items()}))
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(call.v.shape)
    for x, y in zip(KERNELS.gradients(call, ones, None), KERNELS.gradients(call, ones.clone(), None), strict=True):
        assert x is None or (y is not None and torch.equal(x, y))


@pytest.mark.parametrize("gate", ["channel", "token"])
@pytest.mark.parametrize("fn", ["log", "sigmoid"])
def test_later_tokens_change_no_earlier_gradient(gate: str, fn: str) -> None:
    later_is_ignored(rounded(case_of(length=300, gate=gate, gate_fn=fn), torch.bfloat16), "cuda", KERNELS)


def test_no_length_is_read_on_the_host_and_a_graph_can_be_replayed() -> None:
    case = replace(
        rounded(case_of(length=340, batch=1, sequences=3), torch.bfloat16), cu_seqlens=torch.tensor([0, 33, 33, 340])
    )
    of_o, of_state = (None if w is None else w.cuda() for w in weights(case))
    there = case.with_tensors(**{n: None if x is None else x.cuda() for n, x in case.tensors.items()})
    call = call_of(replace(there, cu_seqlens=torch.tensor([0, 33, 33, 340], device="cuda")))
    expected = KERNELS.gradients(call, of_o, of_state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        KERNELS.gradients(call, of_o, of_state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = KERNELS.gradients(call, of_o, of_state)
    for _ in range(2):
        graph.replay()
        for x, y in zip(expected, captured, strict=True):
            assert x is None or (y is not None and torch.equal(x, y))
