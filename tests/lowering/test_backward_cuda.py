"""The kernels of the backward pass on a GPU: every row, dtype and width, strong gates, no host sync, graph capture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdacompile.lowering.linear_attention import ROWS
from tests.lowering.differentiated import (
    KERNELS,
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
from tests.ops.cases import GATE_FNS, Case, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# On the RMSE ratio; two roundings of products and one of the result in bf16.
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 2e-6}
PARAMETERS = ("A_log", "dt_bias", "initial_state")


def rounded(case: Case, dtype: torch.dtype) -> Case:
    return case.to(dtype).with_tensors(**{name: case.tensors[name] for name in PARAMETERS})


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("row", ROWS)
def test_every_row(row: tuple[str, bool], dtype: torch.dtype) -> None:
    gate, delta = row
    case = make_case(gate=gate, delta=delta, length=150, heads=1, key_dim=128, value_dim=128)
    case = case.with_options(chunk_size=0, scale=128**-0.5)
    for given in (case, plain(case)):
        check(rounded(given, dtype), TOLERANCES[dtype], device="cuda")
    if gate == "head":  # with the final state's gradient as well, that of the gate is next to nothing
        check(rounded(case, dtype), max(TOLERANCES[dtype], 5e-3), ("o",), device="cuda")  # it cancels there too
    four = make_case(gate=gate, delta=delta, batch=1, length=140, sequences=4, heads=1, key_dim=64, value_dim=96)
    four = replace(four.with_options(chunk_size=0), cu_seqlens=torch.tensor([0, 33, 33, 139, 140]))
    check(rounded(four, dtype), TOLERANCES[dtype], device="cuda")


@pytest.mark.parametrize("gate", ["none", "token", "channel"])
def test_sixteen_packed_sequences(gate: str) -> None:
    case = make_case(gate=gate, batch=1, length=sum(SIXTEEN), sequences=len(SIXTEEN), heads=1, key_dim=64, value_dim=96)
    check(rounded(packed(case.with_options(chunk_size=0)), torch.bfloat16), 8e-3, device="cuda")


@pytest.mark.parametrize("gate", ["channel", "token", "none"])
def test_normalised_keys_and_steps_that_enlarge(gate: str) -> None:
    for case in (rounded(case, torch.bfloat16) for case in given_betas(gate)):
        peers = {"g": error_of_gates(case)} if gate == "token" else {}
        check(case, TOLERANCES[torch.bfloat16], device="cuda", peers=peers)


def test_65536_tokens() -> None:
    a_long_sequence(KERNELS, 8e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fn", GATE_FNS)
@pytest.mark.parametrize("gate", ["token", "channel"])
def test_every_gate_function(gate: str, fn: str, dtype: torch.dtype) -> None:
    case = make_case(gate=gate, gate_fn=fn, length=100, key_dim=64, value_dim=64).with_options(chunk_size=0)
    check(rounded(case, dtype), TOLERANCES[dtype], device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", [(16, 16), (16, 256), (256, 16), (80, 48), (96, 192), (256, 256)])
@pytest.mark.parametrize("gate", ["none", "token", "channel"])
def test_every_width(gate: str, widths: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(gate=gate, length=90, heads=1, key_dim=widths[0], value_dim=widths[1])
    check(rounded(case.with_options(chunk_size=0), dtype), TOLERANCES[dtype], device="cuda")


@pytest.mark.parametrize("gate", ["token", "channel"])
def test_strong_gates_and_zero_factors(gate: str) -> None:
    random = torch.Generator().manual_seed(1)
    for fn, value in (("log", -1000.0), ("log", -torch.inf), ("factor", 0.0)):
        case = make_case(gate=gate, gate_fn=fn, length=100, heads=1, key_dim=64, value_dim=64)
        g = case.tensors["g"]
        case = case.with_tensors(g=torch.where(torch.rand(g.shape, generator=random) < 0.2, value, g))
        check(rounded(case.with_options(chunk_size=0), torch.bfloat16), 8e-3, device="cuda")


def test_no_length_is_read_on_the_host_and_a_graph_can_be_replayed() -> None:
    case = make_case(batch=1, length=140, sequences=3, heads=1, key_dim=64, value_dim=64).to(torch.bfloat16)
    case = replace(case, cu_seqlens=torch.tensor([0, 33, 33, 140]))
    of_o, of_state = (None if w is None else w.cuda() for w in weights(case))
    there = replace(
        case.with_tensors(**{n: None if x is None else x.cuda() for n, x in case.tensors.items()}),
        cu_seqlens=torch.tensor([0, 33, 33, 140], device="cuda"),
    )
    call = call_of(there)
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


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_runs_of_chunks_that_share_buffers(dtype: torch.dtype) -> None:
    for options in ({"batch": 1}, {"gate": "token", "batch": 1, "delta": False}, {"gate_fn": "sigmoid", "groups": 2}):
        case = make_case(length=330, heads=2, key_dim=64, value_dim=64, **options)  # type: ignore[arg-type]
        in_runs(rounded(case.with_options(chunk_size=0), dtype), "cuda", tolerance=TOLERANCES[dtype])


def test_later_tokens_change_no_earlier_gradient() -> None:
    case = make_case(length=300, heads=1, key_dim=64, value_dim=64).with_options(chunk_size=0)
    later_is_ignored(rounded(case, torch.bfloat16), "cuda")
