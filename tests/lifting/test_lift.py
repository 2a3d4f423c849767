"""One compilation for every length: what is lifted, what is not, and when a lift ends."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import kdacompile
from kdacompile.capture import hook, lifting
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.compare import relative_error
from tests.lifting import functions
from tests.lifting.functions import HEADS, KEY, VALUE

LENGTHS = (80, 9, 33, 8, 16, 2, 3, 70, 129)


def arguments(length: int, batch: int = 1, seed: int = 0) -> list[Any]:
    rng = torch.Generator().manual_seed(seed + length)
    q, k = (torch.randn(batch, length, HEADS, KEY, generator=rng) for _ in range(2))
    v = torch.randn(batch, length, HEADS, VALUE, generator=rng)
    return [q, k, v, -torch.rand(batch, length, HEADS, KEY, generator=rng)]


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def model(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return torch.compile(model, backend="kda", fullgraph=True, options={"kda.inner": "eager", **options})


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def lifted_functions() -> set[str]:
    return {known.verdict.function for known in hook.lifts.known.values() if isinstance(known, lifting.Lifted)}


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("fn", [functions.chunked_gla, functions.recurrent_gla], ids=["chunked", "recurrent"])
def test_one_graph_for_every_length(fn: Any) -> None:
    run = compiled(fn)
    with collecting() as report:
        for length in LENGTHS:
            args = arguments(length)
            assert relative_error(first(run(*args)), first(fn(*args))) < 1e-5, length
    assert graphs() == 2  # the first length as it is, then any
    assert [match.lifted for match in report.matches] == [fn.__qualname__] * 2
    assert {match.pattern for match in report.matches} == {"gla"}
    assert str(functions.__file__) in report.matches[0].source
    assert "lifted" in str(report)
    assert Report.from_json(report.to_json()).matches == report.matches


def test_a_length_marked_dynamic_needs_one_graph() -> None:
    run = compiled(functions.chunked_gla)
    for length in LENGTHS:
        args = arguments(length)
        for x in args:
            torch._dynamo.mark_dynamic(x, 1)
        assert relative_error(run(*args)[0], functions.chunked_gla(*args)[0]) < 1e-5
    assert graphs() == 1


def test_batches_and_states_share_a_graph() -> None:
    run = compiled(functions.chunked_gla)
    for index, length in enumerate(LENGTHS[:5]):
        q, k, v, g = arguments(length, batch=2 + index)
        state = torch.randn(2 + index, HEADS, KEY, VALUE)
        for have, want in zip(run(q, k, v, g, state), functions.chunked_gla(q, k, v, g, state), strict=True):
            assert relative_error(have, want) < 1e-5
    assert graphs() == 2


def test_a_short_length_is_captured_as_it_is_unless_the_function_is_known() -> None:
    run, args = compiled(functions.chunked_gla), arguments(20)
    assert relative_error(run(*args)[0], functions.chunked_gla(*args)[0]) < 1e-5
    assert not hook.lifts.known
    run(*arguments(80))  # the second length opens it
    assert lifted_functions() == {"chunked_gla"}
    torch._dynamo.reset()
    with collecting() as report:
        compiled(functions.chunked_gla)(*args)
    assert [match.lifted for match in report.matches] == ["chunked_gla"]


def test_one_token_is_inlined() -> None:
    run = compiled(functions.recurrent_gla)
    args = arguments(1)
    assert relative_error(run(*args), functions.recurrent_gla(*args)) < 1e-5
    assert not hook.lifts.known


def heads_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """GLA; [B, H, T, D]."""
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp().unsqueeze(-1) + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        out.append((state * q[:, :, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 2)


@pytest.mark.parametrize(("fn", "dim"), [(functions.recurrent_gla, 2), (heads_first, 1)], ids=["B T 1 D", "B 1 T D"])
def test_one_head(fn: Any, dim: int) -> None:
    run = compiled(fn)
    for length in LENGTHS:
        args = [x[:, :, :1].movedim(2, dim) for x in arguments(length)]
        assert relative_error(run(*args), fn(*args)) < 1e-5, length
    assert lifted_functions() == {fn.__name__}
    assert graphs() == 2


@pytest.mark.parametrize("training", [False, True])
def test_heads_in_front_of_the_tokens(training: bool) -> None:
    """A fixed length is told from a count of heads: it was the heads that were left open."""
    run = compiled(heads_first)
    with torch.set_grad_enabled(training):
        for length in LENGTHS:
            args = [x.transpose(1, 2) for x in arguments(length, 2)]
            assert relative_error(run(*args), heads_first(*args)) < 1e-5, length
    assert lifted_functions() == {"heads_first"}
    assert graphs() == 1 + training


def test_gradients() -> None:
    own, theirs = ([x.requires_grad_() for x in arguments(81)] for _ in range(2))
    run = compiled(functions.chunked_gla)
    seed = torch.randn(1, 81, HEADS, VALUE)
    have = torch.autograd.grad(run(*own)[0], own, seed)
    want = torch.autograd.grad(functions.chunked_gla(*theirs)[0], theirs, seed)
    assert all(relative_error(x, y) < 1e-5 for x, y in zip(have, want, strict=True))
    assert lifted_functions() == {"chunked_gla"}


def test_a_refused_length_is_refused_by_the_function() -> None:
    run = compiled(functions.whole_chunks_only)
    for length in (80, 24, 64):
        args = arguments(length)
        assert relative_error(run(*args), functions.whole_chunks_only(*args)) < 1e-5
    assert graphs() == 2
    with pytest.raises(Exception, match="multiple of the chunk"):
        run(*arguments(20))


REFUSED = {
    functions.changes_its_mind: "differs with the length|results differ",  # whichever length is looked at first
    functions.writes_its_argument: "writes its arguments|mul_",
    functions.draws: "rand_like",
    functions.cuts_gradients: "detach",
    functions.keeps_count: "calls, a list",
    functions.clamps_the_state: "a non-linearity on the state",
}


@pytest.mark.parametrize(("fn", "reason"), REFUSED.items(), ids=[fn.__name__ for fn in REFUSED])
def test_not_lifted(fn: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    run = compiled(fn)
    caplog.set_level("INFO", "kdacompile.capture")
    for length in (18, 19):
        own, theirs = arguments(length), arguments(length)
        assert relative_error(run(*own), fn(*theirs)) < 1e-5
        assert all(map(torch.equal, own, theirs))
    assert fn.__name__ not in lifted_functions()
    assert re.search(f"not lifted: {fn.__name__}: .*({reason})", caplog.text)


def test_a_branch_on_the_length_is_noticed() -> None:
    args = arguments(24)
    assert relative_error(compiled(functions.changes_its_mind)(*args), functions.changes_its_mind(*args)) < 1e-5


def test_the_switch() -> None:
    run = compiled(functions.recurrent_gla, **{"kda.lift": False})
    run(*arguments(18))
    assert not hook.lifts.known


# -- only here, and only as long as it holds --------------------------------------------------------------------------


def test_other_backends_and_export_see_the_function() -> None:
    compiled(functions.recurrent_gla)(*arguments(18))
    seen: list[str] = []

    def other(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    def model(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return functions.recurrent_gla(q, k, v, g)

    torch.compile(model, backend=other)(*arguments(18))

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
            return functions.recurrent_gla(q, k, v, g)

    program = torch.export.export(Model(), tuple(arguments(18)), strict=True)
    seen.extend(str(node.target) for node in program.graph.nodes)
    assert len(seen) > 60
    assert not any("kdacompile" in target for target in seen)


def test_a_changed_global_ends_the_lift(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(functions.recurrent_retention)
    args = arguments(18)[:3]
    assert relative_error(run(*args), functions.recurrent_retention(*args)) < 1e-5
    monkeypatch.setattr(functions, "sharpness", 0.25)
    assert relative_error(run(*args), functions.recurrent_retention(*args)) < 1e-5
    assert graphs() == 2


def test_a_changed_helper_ends_the_lift(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compiled(functions.recurrent_gla)
    args = arguments(18)
    run(*args)
    monkeypatch.setattr(functions, "normalized", lambda x: -x)
    assert relative_error(run(*args), functions.recurrent_gla(*args)) < 1e-5
    assert graphs() == 2


def test_a_verdict_is_remembered_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(20)
    compiled(functions.recurrent_gla)(*args)
    torch._dynamo.reset()
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())

    def prove(*_: Any) -> Any:
        raise AssertionError("proven twice")

    monkeypatch.setattr(lifting, "prove", prove)
    with collecting() as report:
        assert relative_error(compiled(functions.recurrent_gla)(*args), functions.recurrent_gla(*args)) < 1e-5
    assert [match.lifted for match in report.matches] == ["recurrent_gla"]


def test_a_verdict_of_another_checkout_names_the_lines_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(20)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lifting, "source_of", lambda fn: "/another/checkout/functions.py:7")
        compiled(functions.recurrent_gla)(*args)
    torch._dynamo.reset()
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())
    with collecting() as report:
        compiled(functions.recurrent_gla)(*args)
    assert [match.source for match in report.matches] == [lifting.source_of(functions.recurrent_gla)]


CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "one operation for another": lambda data: data.replace(b"gate_scale=1.0", b"gate_scale=2.0"),
    "no Python": lambda data: data.replace(b"def replacement", b"def def replacement"),
    "cut short": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "not text": lambda data: b"\xff\xfe\x00" + data,
}


@pytest.mark.parametrize("change", list(CORRUPTIONS.values()), ids=list(CORRUPTIONS))
def test_a_corrupt_file_on_disk_is_proven_again(
    change: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = arguments(20)
    compiled(functions.recurrent_gla)(*args)
    (path,) = tmp_path.rglob("*.json")
    written = path.read_bytes()
    path.write_bytes(change(written))
    assert path.read_bytes() != written
    torch._dynamo.reset()
    monkeypatch.setattr(hook, "lifts", lifting.Lifts())
    caplog.set_level("WARNING", "kdacompile.store.disk")
    assert relative_error(compiled(functions.recurrent_gla)(*args), functions.recurrent_gla(*args)) < 1e-5
    assert "made anew" in caplog.text
    assert lifted_functions() == {"recurrent_gla"}
    assert path.read_bytes() == written


def test_an_edited_source_is_another_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper with one sign flipped between two runs: the stored verdict is about another function."""
    path = tmp_path / "edited_functions.py"
    source = Path(str(functions.__file__)).read_text()
    monkeypatch.syspath_prepend(str(tmp_path))
    args = arguments(18)
    for text in (source, source.replace("return x * torch.rsqrt", "return -x * torch.rsqrt")):
        path.write_text(text)
        module = importlib.import_module("edited_functions")
        importlib.invalidate_caches()
        module = importlib.reload(module)
        torch._dynamo.reset()
        monkeypatch.setattr(hook, "lifts", lifting.Lifts())
        assert relative_error(compiled(module.recurrent_gla)(*args), module.recurrent_gla(*args)) < 1e-5
        assert len(list(tmp_path.rglob("*.json"))) == 1 + (text is not source)


def test_explain_lifts_too() -> None:
    report = kdacompile.explain(lambda *args: functions.recurrent_gla(*args))(*arguments(19))
    assert [match.lifted for match in report.matches] == ["recurrent_gla"]
    report = kdacompile.explain(lambda *args: functions.recurrent_gla(*args), options={"kda.lift": False})(
        *arguments(19)
    )
    assert [match.lifted for match in report.matches] == [""]
