"""Emitted Ascend kernels as texts (goldens, the target's rules), and the host side of running them.

What the compiler makes of them is tests/ascend's affair.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kdacompile.lowering.ascend import gradients, npu
from kdacompile.lowering.ascend.emit import adjoint_module, chunk_module
from kdacompile.lowering.ascend.gradients import run_gradients
from kdacompile.lowering.ascend.kernel import Kind, Module
from kdacompile.lowering.ascend.launch import Launch, column_tile, run_chunks, run_step, target_of_arch
from kdacompile.lowering.ascend.prepare import Fused
from kdacompile.lowering.ascend.step import step_module
from kdacompile.lowering.calls import RECURRENT
from kdacompile.lowering.errors import ArgumentError
from kdacompile.lowering.linear_attention import ROWS
from tests.lowering.verify import Case, make_inputs

FUSED = Fused(norm=True, gate_fn="softplus", rate=True, bias=True, sigmoid_beta=True)
GOLDENS = Path(__file__).parent / "goldens"
MODULES = {
    "kda": chunk_module("channel", True),
    "kda.apart": chunk_module("channel", True, ahead=False),
    "kda.next": chunk_module("channel", True, target="ascend910_95"),
    "gated_delta_rule": chunk_module("token", True),
    "gated_delta_rule.apart": chunk_module("token", True, ahead=False),
    "gated_delta_rule.epilogue": chunk_module("token", True, outputs="epilogue"),
    "kda.fused": chunk_module("channel", True, fused=FUSED),
    "gated_delta_rule.fused.apart": chunk_module("token", True, fused=FUSED, ahead=False),
    "simple_gla": chunk_module("token", False),
    "gated_delta_rule.adjoint": adjoint_module("token", True),
    "kda.adjoint": adjoint_module("channel", True),
    "kda.step": step_module("channel", True),
    "kda.step.fused": step_module("channel", True, fused=FUSED),
    "simple_gla.step.pool": step_module("token", False, pool=True),
}


def every_module() -> list[Module]:
    rows = [(*row, beta) for row in ROWS for beta in (True, False)]
    made = [make(*row) for row in rows for make in (chunk_module, step_module)]
    made += [chunk_module(*row, ahead=False) for row in rows]
    made += [
        chunk_module(*row, fused=FUSED, target=target) for row in rows for target in ("ascend910b", "ascend910_95")
    ]
    made += [step_module(*row, fused=FUSED, pool=True) for row in rows]
    made += [adjoint_module(*row) for row in rows]
    return made + [chunk_module(*row, target="ascend910_95") for row in rows]


@pytest.mark.parametrize("name", MODULES)
def test_golden(name: str) -> None:
    path = GOLDENS / f"{name}.ascend.py.txt"
    if os.environ.get("KDA_ACCEPT") == "1":
        path.write_text(MODULES[name].source)
    assert path.read_text() == MODULES[name].source, f"{name} changed; KDA_ACCEPT=1 accepts"


def test_texts_keep_the_rules_of_the_target() -> None:
    for module in every_module():
        source = module.source
        compile(source, module.name, "exec")
        assert max(map(len, source.splitlines())) <= 130
        assert "autotune" not in source and "num_warps" not in source
        for kernel in module.kernels:
            assert "for task in range(core, tasks, cores):" in kernel.text
            assert set(re.findall(r"tl\.program_id\((\d)\)", kernel.text)) == {"0"}
        # numbers of rows are compared as fp32, and a product's left operand is loaded for it, or copied if read again
        assert not re.search(r"tl\.arange\([^)]*\)(\[[^]]*\])? *[<>=]", source)
        for left in re.findall(r"tl\.dot\((\w+),", source):
            assert len(re.findall(rf"tl\.dot\({left},", source)) == 1 or left in ("left", "x")


def test_every_argument_is_used() -> None:
    for module in every_module():
        for kernel in module.kernels:
            body = kernel.text.split("):\n", 1)[1]
            for argument in kernel.arguments:
                assert re.search(rf"\b{argument.name}\b", body), (module.name, kernel.name, argument)


def launches(gate: str = "channel", delta: bool = True, **options: object) -> list[Launch]:
    cores = int(str(options.pop("cores", 20)))
    case = Case(gate, delta, **{"heads": 1, "length": 100, **options})  # pyright: ignore[reportArgumentType]
    x = make_inputs(case)
    seen: list[Launch] = []
    o, state = run_chunks(x, cores=cores, launch=seen.append)
    sequences = case.batch if case.lengths is None else len(case.lengths)
    assert o.shape == x.v.shape and state.shape == (sequences, *x.v.shape[2:3], x.q.shape[3], x.v.shape[3])
    return seen


def test_launches_of_a_batch() -> None:
    """Two sequences of 100 tokens, two value heads: two chunks each; grids are as many cores as there is work for."""
    sub_chunks, prologue, scan = launches()
    assert [launch.grid for launch in (sub_chunks, prologue, scan)] == [32, 8, 4]
    tables = {name: x.tolist() for name, x in scan.arguments.items() if name in ("cu_seqlens", "first_chunk")}  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    assert tables == {"cu_seqlens": [0, 100, 200], "first_chunk": [0, 2, 4]}
    chunks = prologue.arguments["chunks"]
    assert isinstance(chunks, torch.Tensor) and chunks.tolist() == [0, 100, 64, 36, 100, 100, 164, 36]
    buffer = prologue.arguments["M_1_io_ptr"]
    assert isinstance(buffer, torch.Tensor) and buffer.shape == (4 * 2 * 64 * 64,) and buffer.dtype is torch.float32
    assert prologue.arguments["M_1_io_ptr"] is scan.arguments["M_1_io_ptr"]


@pytest.mark.parametrize(("cores", "width", "ahead"), [(4, 64, True), (5, 64, False), (4, 512, False)])
def test_who_does_the_prologue_s_products(cores: int, width: int, ahead: bool) -> None:
    """The scan of four lanes, but where groups would be idle, or several tasks have columns of one state."""
    names = [launch.kernel.name for launch in launches(cores=cores, value_width=width)]
    assert names == ["sub_chunks", *([] if ahead else ["prologue"]), "scan"]


def test_launches_of_packed_sequences() -> None:
    *_, scan = launches("token", lengths=(65, 0, 1))
    first = scan.arguments["first_chunk"]
    assert isinstance(first, torch.Tensor) and first.tolist() == [0, 2, 2, 3]


def test_gates_of_wide_keys_go_by_channel() -> None:
    assert [launch.kernel.name for launch in launches("token", key_width=256)] == ["sub_chunks", "prologue", "scan"]
    assert [launch.kernel.name for launch in launches("token")] == ["prologue", "scan"]


def test_gates_per_token_lie_along_tokens() -> None:
    prologue, _ = launches("head")
    g = prologue.arguments["g_ptr"]
    assert isinstance(g, torch.Tensor) and g.shape == (2, 200) and g.is_contiguous()


def test_tiles_fit_the_vec_cores() -> None:
    assert [column_tile(k, 256) for k in (16, 128, 256)] == [128, 128, 64]
    assert [column_tile(k, 256, alone=True) for k in (16, 128, 256)] == [64, 64, 32]


def test_every_device_has_a_target() -> None:
    names = ("Ascend910B3", "Ascend910_9391", "Ascend910_9599")
    assert [target_of_arch(name) for name in names] == ["ascend910b", "ascend910b", "ascend910_95"]


def test_what_the_kernels_do_not_take() -> None:
    for options in ({"key_width": 257}, {"value_width": (1 << 15) + 1}, {"dtype": torch.float64}):
        with pytest.raises(ArgumentError):
            launches(**options)  # pyright: ignore[reportArgumentType]


def test_kernels_name_the_places_of_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option of triton-ascend: two in a prologue in which Vec need not wait for Cube, else one."""
    found: list[object] = []

    class Jitted:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda **arguments: found.append(arguments["set_workspace_multibuffer"])

    names = ("sub_chunks", "prologue", "scan", "epilogue")
    jitted = SimpleNamespace(**{name: Jitted() for name in names})
    monkeypatch.setattr(npu, "load_source", lambda *source: jitted)  # pyright: ignore[reportUnknownLambdaType]
    for gate, expected in (("none", [2, 1, 1]), ("token", [1, 1, 1])):
        found.clear()
        for launch in launches(gate, False):
            npu.triton_launch(launch)
        assert found == expected


def test_a_step_in_place() -> None:
    x = make_inputs(Case("token", True, 1, 2, dtype=torch.bfloat16, heads=1))
    assert x.initial_state is not None
    seen: list[Launch] = []
    state = x.initial_state.float()
    _, out = run_step(replace(x, initial_state=state), cores=20, launch=seen.append, out=state)
    (launch,) = seen
    assert out is state and launch.grid == 4
    assert launch.arguments["initial_state_ptr"] is launch.arguments["final_state_ptr"] is state


_ABSENT = ("g_ptr", "beta_ptr", "A_log_ptr", "dt_bias_ptr", "initial_state_ptr")  # another tensor may stand for these


def test_pointers_have_the_types_their_kinds_promise() -> None:
    for launch in launches(dtype=torch.float16):
        kinds = {a.name: a.kind for a in launch.kernel.arguments}
        for name, x in launch.arguments.items():
            if isinstance(x, torch.Tensor) and name not in _ABSENT:
                expected = {Kind.IO: torch.float16, Kind.F32: torch.float32, Kind.I32: torch.int32}[kinds[name]]
                assert x.dtype is expected, name


@pytest.mark.parametrize("lengths", [(70, 0, 1, 64), (0, 0), (129,), (0, 200, 63)])
def test_the_chunks_of_packed_sequences(lengths: tuple[int, ...]) -> None:
    """First token of each, and tokens to its sequence's end; slots that are left over have none."""
    found: list[Launch] = []
    case = Case("token", True, lengths=lengths, heads=1, value_heads=2, key_width=16, value_width=16)
    run_chunks(make_inputs(case), cores=20, launch=found.append)
    expected: list[list[int]] = []
    first, start = [0], 0
    for length in lengths:
        expected += [[start + at, length - at] for at in range(0, length, 64)]
        first.append(len(expected))
        start += length
    prologue, scan = found[0].arguments, found[-1].arguments
    chunks, firsts = prologue["chunks"], scan["first_chunk"]
    assert isinstance(chunks, torch.Tensor) and isinstance(firsts, torch.Tensor)
    slots = sum(lengths) // 64 + len(lengths)
    assert chunks.unflatten(0, (-1, 2)).tolist() == expected + [[0, 0]] * (slots - len(expected))
    assert firsts.tolist() == first and prologue["tasks"] == 2 * slots and chunks.dtype is firsts.dtype is torch.int32


@pytest.mark.parametrize("row", ROWS)
def test_nothing_is_read_on_the_host(row: tuple[str, bool]) -> None:
    """Tensors without data, whose numbers nobody can ask for: as it is while a graph of the device is captured."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = make_inputs(Case(*row, lengths=(70, 0, 5), heads=2, value_heads=4, key_width=16, value_width=16))
        found: list[str] = []
        o, state = run_chunks(inputs, cores=20, launch=lambda launch: found.append(launch.kernel.name))
    assert "scan" in found and o.shape == inputs.v.shape and state.shape == (3, 4, 16, 16)


def gradients_of(case: Case, seen: list[Launch]) -> dict[str, torch.Tensor]:
    x = make_inputs(case)
    grads = (torch.zeros(shape, dtype=x.q.dtype) for shape, _ in x.results)
    return run_gradients(x, *grads, cores=20, launch=seen.append)


@pytest.mark.parametrize("row", [row for row in ROWS if row[0] != "channel"])
def test_launches_of_gradients(row: tuple[str, bool]) -> None:
    """No number is read on the host. Gradients have the shapes of what they belong to, which groups of heads share."""
    seen: list[Launch] = []
    case = Case(*row, lengths=(70, 0, 5), dtype=torch.bfloat16, heads=2, value_heads=4, key_width=24, value_width=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = gradients_of(case, seen)
        assert {name: x.shape for name, x in found.items()} == {
            name: x.shape for name, x in zip(RECURRENT, make_inputs(case).recurrent, strict=True) if x is not None
        }
    sums = [] if row[0] == "none" else ["sums"]
    assert [launch.kernel.name for launch in seen] == ["prologue", "scan", "reverse", "epilogue", *sums]


def test_gradients_that_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "missing", lambda: None)
    monkeypatch.setattr(npu, "planned_for", lambda: "ascend910_95")
    simple = make_inputs(Case("none", False, 3, dtype=torch.bfloat16))
    assert npu.EmittedGradients().declines(simple) == "gradients are planned for the 910B"
    found = {
        gradients.declines(make_inputs(Case(gate, True, 3, dtype=dtype, key_width=width)))
        for gate, dtype, width in (
            ("channel", torch.bfloat16, 16),
            ("channel", torch.float32, 16),
            ("token", torch.float32, 16),
            ("channel", torch.bfloat16, 256),
            ("token", torch.bfloat16, 16),
        )
    }
    assert found == {
        "KDA's gradients of 16-bit operands only",
        "gradients of more than 128 keys or values a head",
        None,
    }
