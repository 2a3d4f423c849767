"""``kdacompile explain``: its three kinds of subject, what it prints, its exit status, and its errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kdacompile.__main__ import main
from kdacompile.commands import console, explain
from tests.house.samples import sample_report

GLA = '''
import torch

def gla(q, k, v, g):
    """q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K]."""
    state, out = 0, []
    for t in range(q.shape[1]):
        state = state * g[:, t].sigmoid()[..., None] + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1)

def made():
    x = torch.randn(1, 6, 2, 4)
    return gla, (x, x + 1, x + 2, x)

def nothing(x):
    return x + 1

def named():
    x = torch.randn(1, 6, 2, 4)
    return gla, dict(q=x, k=x + 1, v=x + 2, g=x)

def no_pair(): return gla
def no_arguments(): return gla, None
def ends(): raise SystemExit("enough")
class Model(torch.nn.Module): pass
'''
SHAPES = [word for name in "qkvg" for word in ("--tensor", f"{name}=1x6x2x4")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gated.py"
    path.write_text(GLA)
    return path


def test_a_function_is_called_with_tensors_of_the_shapes_given(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:gla", *SHAPES]) == 0
    printed = capsys.readouterr().out
    assert "1 graph, 1 x gla" in printed
    assert f"{file}:" in printed


@pytest.mark.parametrize("function", ["made", "named"])
def test_a_function_that_makes_its_call_needs_no_shapes(
    file: Path, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    assert main(["explain", f"{file}:{function}", "--json", "--no-time"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [match["pattern"] for graph in report["graphs"] for match in graph["matches"]] == ["gla"]


def test_the_exit_status_says_that_nothing_matched(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:nothing", "--tensor", "x=3"]) == 1
    assert "no matches" in capsys.readouterr().out


def test_the_page_is_written_into_a_folder_that_is_made(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "folder" / "report.html"
    assert main(["explain", f"{file}:made", "--html", str(page)]) == 0
    assert "Gated linear attention" in page.read_text()


def test_a_transformers_model_keeps_its_widths_and_one_layer_of_each_kind() -> None:
    transformers = pytest.importorskip("transformers")
    config = explain.small(transformers.AutoConfig.for_model("kimi_linear"))
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert (config.num_hidden_layers, config.hidden_size, config.linear_num_heads) == (2, 2304, 32)
    assert (config.num_experts, config.vocab_size) == (16, 1024)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("longcat_flash", {"num_layers": 1, "num_hidden_layers": 2}),
        ("zamba2", {"num_hidden_layers": 2, "hybrid_layer_ids": [1]}),
        ("deepseek_v2", {"num_hidden_layers": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 1408}),
    ],
)
def test_defaults_that_are_no_model_are_mended(name: str, wanted: dict[str, object]) -> None:
    transformers = pytest.importorskip("transformers")
    config = explain.small(transformers.AutoConfig.for_model(name))
    assert {key: getattr(config, key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("subject", "options", "problem"),
    [
        ("{file}", [], "name a function as well"),
        ("{file}:absent", [], "has no function 'absent'"),
        ("{file}:gla", [], "--tensor q=1x64x4x32"),
        ("{file}:gla", ["--tensor", "q=1xx4"], "tensors are written like"),
        ("{file}:gla", ["--tensor", "q=1x4:int3"], "tensors are written like"),
        ("{file}:gla", ["--tensor", "=1x4"], "tensors are written like"),
        ("{file}:gla", ["--tensor", "q=1x6x2x4"], "missing a required argument: 'k'"),
        ("{file}:gla", [*SHAPES, "--tensor", "z=3"], "unexpected keyword argument 'z'"),
        ("{file}:gla", [*SHAPES, "--tensor", "q=1x6x2x4"], "a name is given to more than one --tensor"),
        ("{file}:gla", ["--tensor", "q=99999999x99999999"], "memory"),
        ("{file}:gla", [*SHAPES[:-1], "g=1x7x3x5"], "RuntimeError: The size of tensor a (5) must match"),
        ("{file}:no_pair", [], "a callable and the tuple"),
        ("{file}:no_arguments", [], "a callable and the tuple"),
        ("{file}:ends", [], "ends the process with status enough"),
        ("{file}:Model", [], "name a function that returns an instance"),
        ("{file}:made", ["--html", "{file}/page.html"], "its folder cannot be made"),
        ("{file}:made", ["--svg", "."], "it is a folder"),
        ("nowhere.py:gla", [], "there is no such file"),
        ("no_such_model", [], "neither FILE.py:FUNCTION nor a model type"),
        ("moonshotai/Kimi-Linear", [], "did you mean kimi_linear?"),
        ("kimi_linear", ["--tensor", "q=1"], "--tensor is for functions of a file"),
    ],
)
def test_what_cannot_be_run_is_one_line_without_a_traceback(
    file: Path, capsys: pytest.CaptureFixture[str], subject: str, options: list[str], problem: str
) -> None:
    assert main(["explain", subject.format(file=file), *(option.format(file=file) for option in options)]) == 2
    printed = capsys.readouterr().err
    assert problem in printed
    assert "Traceback" not in printed and "kdacompile/" not in printed.replace(str(file.parent), "")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["explain", "kimi_linear", "--tokens", "0"], "--tokens: must be a whole number of at least 1"),
        (["explain", "kimi_linear", "--tokens", "many"], "--tokens: must be a whole number of at least 1"),
        (["plan", "kda", "--ranks", "-2"], "--ranks: must be a whole number of at least 1"),
        (["plan", "kda", "--write", "page.md"], "--write goes with --table"),
        (["bench", "--timeout", "0"], "--timeout: must be a number greater than 0"),
    ],
)
def test_an_option_that_says_nothing_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan", "nope"], "the patterns are kda"),
        (["plan", "kda", "--target", "nope"], "known are ascend910b"),
        (["plan", "kda", "--size", "T"], "written like T=8192"),
        (["plan", "kda", "--size", "Z=3"], "not a size of kda"),
        (["plan", "kda", "--size", "K=100000"], "A smaller chunk"),
        (["plan", "kda", "--io", "int8"], "io must be one of"),
        (["plan", "mla", "--form", "segment"], "mla has one form"),
        (["plan", "gdn_state", "--form", "token"], "gdn_state has one form"),
        (["plan", "--table", "--write", "{folder}/absent.md"], "No such file"),
        (["plan", "--table", "--write", "{folder}/unmarked.md"], "it has no lines <!-- plans -->"),
        (["overhead", "nope"], "no program begins with 'nope'"),
        (["bench", "--suite", "nope"], "there are cpu"),
        (["bench", "--case", "nope"], "there are kda-chunk"),
        (["bench", "--json", "{folder}/unmarked.md/figures.json"], "its folder cannot be made"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unmarked.md").write_text("# A page")
    assert main([word.format(folder=tmp_path) for word in words]) == 2
    printed = capsys.readouterr().err
    assert problem in printed and "Traceback" not in printed


def test_without_torch_a_command_says_so(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from kdacompile.__main__ import main; sys.exit(main(['plan']))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 2 and "torch cannot be used" in run.stderr and "Traceback" not in run.stderr


def test_a_pipe_that_nobody_reads_is_no_error() -> None:
    """``kdacompile doctor | head -0``, with an encoding that lacks arrows, as a pipe has on Windows."""
    command = [sys.executable, "-m", "kdacompile", "doctor"]
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=60) == 1 and said == b""


def test_an_exception_of_the_subject_is_told_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def fails(x):\n    raise ValueError('no such size')\n\n\ndef made():\n    return 1 / 0\n")
    assert main(["explain", f"{path}:fails", "--tensor", "x=3"]) == 2
    printed = capsys.readouterr().err
    assert "ValueError: no such size" in printed and f"{path}:2" in printed and "Traceback" not in printed
    assert main(["explain", f"{path}:made"]) == 2
    assert f"ZeroDivisionError: division by zero at {path}:6" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_missing_is_said_first(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:made", "--device", "cuda"]) == 2
    assert "cannot run on device 'cuda'" in capsys.readouterr().err


def test_the_gain_is_estimated_unless_that_is_unwanted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:made", "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)["saved"]
    assert saved["before"] > 0 and saved["after"] > 0 and "quartiles" in saved["text"]
    assert main(["explain", f"{file}:made", "--json", "--no-time"]) == 0
    assert json.loads(capsys.readouterr().out)["saved"] is None


@pytest.mark.parametrize("command", ["doctor", "support", "plan"])
def test_programs_read_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_plan_is_written_into_a_folder_that_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "plan.html"
    assert main(["plan", "kda", "--target", "here", "--html", str(page)]) == 0
    assert "<html" in page.read_text()
    assert main(["plan", "kda", "--html", str(tmp_path / "new" / "plan.html" / "x.html")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "main", interrupted)
    assert main(["explain", "kimi_linear"]) == 130
    assert capsys.readouterr().err == "kdacompile: stopped\n"


def test_ctrl_c_shows_what_was_found_until_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stopped.py"
    path.write_text(
        GLA + "\ndef made_and_stopped():\n    x = torch.randn(1, 6, 2, 4)\n"
        "    def run(*tensors):\n        stop(gla(*tensors))\n"
        "    return run, (x, x + 1, x + 2, x)\n"
        "@torch.compiler.disable\ndef stop(o):\n    raise KeyboardInterrupt\n"
    )
    assert main(["explain", f"{path}:made_and_stopped"]) == 130
    printed = capsys.readouterr().out
    assert "stopped" in printed and "1 x gla" in printed


def test_a_terminal_gets_tables_and_a_pipe_gets_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    assert main(["support"]) == 0
    assert capsys.readouterr().out.startswith("| pattern | name |")
    monkeypatch.setattr(console, "is_rich", lambda _: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["support"]) == 0
    drawn = capsys.readouterr().out
    assert "┃" in drawn and "gated_delta_rule" in drawn
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
    console.show_report(sample_report())
    shown = capsys.readouterr().out
    assert "near miss" in shown and "╭" in shown
    with console.progress("waiting"):
        pass


def test_what_a_terminal_shows_is_written_as_a_picture(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    picture = tmp_path / "new" / "report.svg"
    assert main(["explain", f"{file}:made", "--no-time", "--svg", str(picture)]) == 0
    for path in (picture, picture.with_name("report-dark.svg")):
        drawn = "".join(ElementTree.parse(path).getroot().itertext())
        assert "gla" in drawn and "kdacompile" in drawn
        assert "font-face" not in drawn  # nothing is loaded from elsewhere
