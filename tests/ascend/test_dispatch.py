"""The op on an NPU with the emitted kernels simulated, and the operators' schemas against the wheel of torch_npu."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kdacompile.lowering.ascend.npu import EmittedKernels
from kdacompile.lowering.ascend.operators import CHUNKED, RECURRENT, GatedDeltaRuleOperators
from kdacompile.ops.fused import FusedKernels
from kdacompile.ops.signature import LINEAR_ATTENTION, LINEAR_ATTENTION_STEP_
from tests.ascend.cases import CORES
from tests.ascend.test_races import changed
from tests.ascend.tools import SimulatedDevice, Tools
from tests.lowering.verify import relative_error
from tests.ops.cases import GATE_FNS, Case, make_case, oracle


def simulated(tools: Tools) -> FusedKernels:
    emitted = EmittedKernels(SimulatedDevice(tools), CORES)
    return FusedKernels(lambda call: None if emitted.declines(call) else emitted)


class TorchOperators(TorchDispatchMode):
    """The names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def sixteen_bit_case(length: int, batch: int = 2) -> Case:
    case = make_case(
        gate="channel", gate_fn="softplus", heads=1, groups=2, key_dim=64, value_dim=64, length=length, batch=batch
    )
    return case.to(torch.bfloat16)


def test_the_op_through_the_emitted_kernels(tools: Tools) -> None:
    """With l2norm, the gate's activation and sigmoid of beta, as a model calls it."""
    case = sixteen_bit_case(length=70, batch=1)
    o, state = simulated(tools).sequence(*case.positional, None, **case.options)
    expected = oracle(case)
    assert o.dtype is torch.bfloat16 and state.dtype is torch.float32
    assert relative_error(o, expected[0]) < 6e-3 and relative_error(state, expected[1]) < 6e-3


@pytest.mark.parametrize("gate", ["token", "channel"])
@pytest.mark.parametrize("gate_fn", GATE_FNS)
def test_what_a_step_computes_of_its_inputs(tools: Tools, gate: str, gate_fn: str) -> None:
    """l2norm, the gate function and sigmoid of beta are the kernel's own: nothing is computed in front of it."""
    sizes: dict[str, Any] = {"heads": 1, "groups": 2, "key_dim": 20, "value_dim": 16, "length": 1, "batch": 2}
    case = make_case(gate=gate, gate_fn=gate_fn, **sizes)
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    with TorchOperators() as operators:
        o, state = simulated(tools).step(*case.positional, **options)
    expected = oracle(case)
    assert relative_error(o, expected[0]) < 2e-6 and relative_error(state, expected[1]) < 2e-6
    assert not operators.seen & {"mul", "exp", "rsqrt", "sigmoid", "softplus", "log", "neg", "log_sigmoid_forward"}


def packed_case(gate: str, gate_fn: str, delta: bool, **sizes: int) -> Case:
    """Grouped heads, packed sequences of which one is empty, gates that forget everything, zeros as keys and queries,
    and an eps that counts."""
    lengths = (70, 0, 3)
    sizes = {"heads": 1, "key_dim": 64, "value_dim": 64, **sizes}
    case = make_case(gate=gate, gate_fn=gate_fn, delta=delta, batch=1, length=73, sequences=3, **sizes)
    case = replace(case, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    case.tensors["k"][:, 5] = case.tensors["q"][:, 71] = 0
    if gate != "none":
        g = case.tensors["g"]
        strong = {"log": -1000.0, "factor": 0.0, "logsigmoid": -4000.0}.get(gate_fn, 1000.0)
        g[torch.rand(g.shape, generator=torch.Generator().manual_seed(1)) < 0.1] = strong
    return case.with_options(chunk_size=64, qk_l2norm_eps=0.5)


@pytest.mark.parametrize(
    ("gate", "gate_fn", "delta", "dtype"),
    [
        *((gate, gate_fn, True, torch.bfloat16) for gate in ("channel", "token") for gate_fn in GATE_FNS),
        *((gate, "softplus", True, torch.float32) for gate in ("channel", "token")),
        *(
            (gate, gate_fn, False, torch.bfloat16)
            for gate, gate_fn in (("channel", "logsigmoid"), ("head", "softplus"))
        ),
        *(("none", "log", delta, torch.bfloat16) for delta in (True, False)),
    ],
)
def test_what_whole_sequences_compute_of_their_inputs(
    tools: Tools, gate: str, gate_fn: str, delta: bool, dtype: torch.dtype
) -> None:
    """The same of the kernels over whole sequences, with as many heads as core groups and with fewer."""
    case = packed_case(gate, gate_fn, delta).to(dtype)
    call = LINEAR_ATTENTION.call_of([*case.positional, case.cu_seqlens], case.options)
    expected, bound = oracle(case), 6e-3 if dtype is torch.bfloat16 else 2e-6
    for cores in (CORES, 13)[: 1 + (gate == "token")]:
        with TorchOperators() as operators:
            o, state = EmittedKernels(SimulatedDevice(tools), cores).run(call)
        assert relative_error(o, expected[0]) < bound and relative_error(state, expected[1]) < bound
        assert not operators.seen & {"exp", "rsqrt", "sigmoid", "softplus", "log", "neg", "log_sigmoid_forward", "sum"}


@pytest.mark.parametrize(
    ("gate", "kernel", "right", "wrong"),
    [
        ("channel", "sub_chunks", "tl.where(exists(rows, N)[:, None], d, 0.0)", "d"),
        ("channel", "sub_chunks", "x = x + bias[None, :]", "x = x"),
        ("token", "prologue", "tl.where(exists(rows, N), d, 0.0)", "d"),
        ("token", "prologue", "k_acc * row_rates(k_acc, l2norm_eps)[:, None]", "k_acc"),
        ("token", "prologue", "beta_acc = sigmoid(", "beta_acc = ("),
    ],
    ids=["channel-ends", "channel-bias", "token-ends", "token-norm", "token-beta"],
)
def test_wrong_inputs_are_seen(tools: Tools, gate: str, kernel: str, right: str, wrong: str) -> None:
    """``ends``: tokens that do not exist decay by what their gate function makes of 0."""
    case = packed_case(gate, "softplus", True).to(torch.bfloat16)
    call = LINEAR_ATTENTION.call_of([*case.positional, case.cu_seqlens], case.options)
    device = changed(tools, **{kernel: lambda text: text.replace(right, wrong)})
    found = EmittedKernels(device, CORES if gate == "channel" else 13).run(call)
    assert max(relative_error(x, y) for x, y in zip(found, oracle(case), strict=True)) > 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_through_the_emitted_kernel(tools: Tools, dtype: torch.dtype) -> None:
    """In place on an fp32 state; a bf16 one is rounded to on the way back."""
    case = sixteen_bit_case(length=1)
    expected = oracle(case)
    state = case.tensors["initial_state"].to(dtype)
    case = case.with_tensors(initial_state=state)
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    o = simulated(tools).inplace_step(*case.positional, **options)
    assert relative_error(o, expected[0]) < 6e-3 and relative_error(state, expected[1]) < 6e-3


@pytest.mark.parametrize("state", ["fp32", "bf16", "padded"])
def test_a_step_on_a_pool_of_states(tools: Tools, state: str) -> None:
    """Slots are read and written where they lie, by the kernel itself; those of another dtype, or of widths that are no
    powers of two, are gathered and put back. Padding gives zeros, of NaN as well, and what is not named stays."""
    width = 20 if state == "padded" else 64
    case = make_case(gate="channel", gate_fn="softplus", heads=1, key_dim=width, value_dim=32, length=1, batch=4)
    case = case.to(torch.bfloat16).with_tensors(initial_state=case.tensors["initial_state"])
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    slots = torch.tensor([3, -1, 0, 7])
    live, places = torch.tensor([0, 2]), torch.tensor([3, 0])  # the last is past the pool
    pool = torch.full((6, *case.tensors["initial_state"].shape[1:]), 7.0)
    pool[places] = case.tensors["initial_state"][live]
    pool = pool.bfloat16() if state == "bf16" else pool
    states = pool[places].to(torch.float64)
    case.tensors["v"][1] = float("nan")
    own = case.with_tensors(initial_state=torch.zeros_like(case.tensors["initial_state"], dtype=torch.float64))
    own.tensors["initial_state"][live] = states
    expected = oracle(own)
    with TorchOperators() as operators:
        inputs = [pool if name == "initial_state" else x for name, x in case.tensors.items()]
        call = LINEAR_ATTENTION_STEP_.call_of([*inputs, slots], options)
        o, _ = EmittedKernels(SimulatedDevice(tools), CORES).step(call, pool)
    assert relative_error(o[live], expected[0][live]) < 6e-3
    assert relative_error(pool[places], expected[1][live]) < 6e-3
    assert bool((o[[1, 3]] == 0).all()) and bool((pool[[1, 2, 4, 5]] == 7).all())
    assert state != "fp32" or not operators.seen & {"index_select", "index_copy_"}


def schemas(environment: Path, operator: str) -> set[str]:
    path = environment / "torch_npu/torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
    return set(re.findall(rf"func: ({operator}\(.*)", path.read_text()))


@pytest.mark.parametrize("schema", [CHUNKED, RECURRENT])
def test_schemas_are_those_of_the_wheel(environment: Path, schema: str) -> None:
    assert schemas(environment, schema.split("(")[0]) == {schema}


def meta_kernel(environment: Path, operator: str) -> Any:
    """The function that the wheel registers for an operator on the Meta device, on its own."""
    path = environment / "torch_npu/torch_npu/op_plugin/meta/_meta_registrations.py"
    (function,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and f"impl(m, '{operator}')" in map(ast.unparse, node.decorator_list)
    )
    function.decorator_list.clear()
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), str(path), "exec"), namespace)
    return namespace[function.name]


def test_the_wheel_s_meta_kernels_take_what_the_operators_are_given(environment: Path) -> None:
    """For a sequence and a step, and they promise the shapes and dtypes that are read from their results."""
    names = (schema.split("(")[0] for schema in (CHUNKED, RECURRENT))
    operators = GatedDeltaRuleOperators(SimpleNamespace(**{name: meta_kernel(environment, name) for name in names}))
    for length in (20, 1):
        sizes: dict[str, Any] = {"gate": "token", "heads": 1, "groups": 2, "key_dim": 128, "value_dim": 128}
        case = make_case(**sizes, length=length).to(torch.bfloat16).with_options(sigmoid_beta=False)
        state = case.tensors["initial_state"].mT.contiguous().mT
        case = case.with_tensors(initial_state=state)
        kernels = FusedKernels(lambda call: None if operators.declines(call) else operators)
        options = {name: value for name, value in case.options.items() if length > 1 or name != "chunk_size"}
        run = kernels.sequence if length > 1 else kernels.step
        o, final = run(*case.positional, *([None] if length > 1 else []), **options)
        assert o.shape == case.tensors["v"].shape and o.dtype is torch.bfloat16
        assert final.shape == state.shape and final.dtype is torch.float32


def test_why_no_operator_serves_latent_attention(environment: Path) -> None:
    """The one takes lengths from the host and knows no cache whose rows are [latent | shared]; the other starts at the
    token and writes the cache. Should either change, it is worth another look."""
    (score,) = schemas(environment, "npu_fused_infer_attention_score_v2")
    for part in ("SymInt[]? actual_seq_kvlen=None", "Tensor? query_rope=None, Tensor? key_rope=None", "Tensor key,"):
        assert part in score
    (prolog,) = schemas(environment, "npu_mla_prolog_v3")
    for part in ("Tensor token_x, Tensor weight_dq", "Tensor(a!) kv_cache, Tensor(b!) kr_cache"):
        assert part in prolog
    assert "attention" not in prolog.split("->")[0]
