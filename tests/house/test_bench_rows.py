"""Arguments that the suites of a device measure: contenders agree with the recurrence in fp64, here on a CPU."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from kdacompile.bench import cuda_worker, rows, train, train_rows
from kdacompile.bench.cuda_cases import CASES, MODELS, Case
from kdacompile.bench.measure import relative_error


def case(kind: str, length: int) -> Case:
    return Case(kind, kind, 2 if kind == "step" else 1, length, 2, 4, 32)


KINDS = sorted({case.kind for case in CASES} - set(MODELS))


@pytest.mark.parametrize("kind", KINDS)
def test_contenders_give_what_the_recurrence_gives(kind: str) -> None:
    given = cuda_worker.arguments(case(kind, 1 if kind == "step" else 200), "cpu")
    if kind != "packed":
        given = rows.first_tokens(given, 150)
    given |= {n: x.float() for n, x in rows.tensors_of(given).items() if x.is_floating_point()}
    expected = rows.oracle(given)
    calls = [rows.ours(given | {"initial_state": given["initial_state"].clone()} if kind == "step" else given)]
    if kind != "packed":
        pytest.importorskip("transformers")
        # The functions of transformers want as many keys as values.
        calls.append(rows.plain(given | {name: given[name].repeat_interleave(2, 2) for name in ("q", "k")}))
    for call in calls:
        for found, want in zip(call(), expected, strict=True):
            assert found is not None and relative_error(found, want) < 1e-4


def test_the_first_tokens_of_packed_sequences_are_sequences() -> None:
    given = cuda_worker.arguments(case("packed", 136), "cpu")
    first = rows.first_tokens(given, 20)
    assert given["cu_seqlens"].tolist()[:6] == [0, 1, 3, 6, 10, 15] and rows.sequences(given) == 16
    assert first["cu_seqlens"].tolist() == [0, 1, 3, 6, 10, 15, 20] and first["q"].shape[1] == 20
    assert rows.oracle(first)[1].shape[0] == 6


@pytest.mark.parametrize("name", train_rows.ROWS)
def test_every_row_has_the_gradients_of_the_recurrence(name: str) -> None:
    errors = train._errors(name, "ours", 17 if train_rows.ROWS[name].packed else 3, "cpu")
    assert errors.keys() == train_rows.differentiated(train_rows.arguments(name, 1, "cpu")).keys()
    assert max(errors.values()) < 2e-2


def test_gates_of_a_strength_are_of_that_strength() -> None:
    gates = {
        name: rows.log_gate(train_rows.arguments(name, 9, "cpu")).float() for name in train_rows.ROWS if "-" in name
    }
    for fn in ("kda", "softplus", "outside"):
        weak, strong, zero = (gates[f"{fn}-{strength}"].detach() for strength in ("weak", "strong", "zero"))
        assert not zero.any() and weak.max() < 0 and strong.mean() < 4 * weak.mean(), fn


def test_a_loss_reads_what_its_row_says() -> None:
    for name, unread in (("kda-state", {"q"}), ("kda-sum", set[str]())):
        given = train_rows.arguments(name, 5, "cpu")
        found = train_rows.gradients(name, rows.ours(given), given)()
        named = zip(train_rows.differentiated(given), found, strict=True)
        assert {n for n, x in named if not x.any()} == unread


def test_fla_is_called_with_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    class Module:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, function: str) -> object:
            return partial(self.call, function)

        def call(self, function: str, *operands: object, **options: object) -> None:
            asked.append((function, sorted(options)))

    monkeypatch.setattr(importlib, "import_module", Module)
    for kind in ("kda", "packed", "step"):
        call = rows.fla(cuda_worker.arguments(case(kind, 136 if kind == "packed" else 1), "cpu"))
        assert call is not None
        call()
    common = ["A_log", "dt_bias"]
    own = ["output_final_state", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel", "use_qk_l2norm_in_kernel"]
    assert asked == [
        ("chunk_kda", sorted([*common, *own, "lower_bound", "safe_gate"])),
        ("chunk_kda", sorted([*common, *own, "cu_seqlens"])),
        ("fused_recurrent_kda", sorted([*common, *own, "initial_state", "lower_bound"])),
    ]
    mamba = train_rows.arguments("mamba", 2, "cpu")
    assert (mamba["q"].shape[2], mamba["v"].shape[2:]) == (1, torch.Size([80, 64]))
