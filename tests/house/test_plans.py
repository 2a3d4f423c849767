"""``kdacompile.plan``, ``python -m kdacompile plan``, the page, and the table in the docs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import kdacompile
from kdacompile import plans
from kdacompile.__main__ import main
from kdacompile.errors import UnknownPatternError
from kdacompile.lowering.errors import ArgumentError
from kdacompile.lowering.target import TARGETS
from tests.house.samples import sample_report

DOCS = Path(__file__).parents[2] / "docs"


def test_a_plan_by_name() -> None:
    found = kdacompile.plan("kda", target="ascend910b", T=8192, H=32, K=128, V=128)
    assert found.handovers == 2
    assert found.sizes["T"] == 8192
    assert "hand-overs a chunk 2" in str(found)
    assert kdacompile.plan("kda", optimise=False).handovers == 10
    assert kdacompile.plan("gated_delta_rule", form="token").handovers == 0
    with pytest.raises(UnknownPatternError, match="gdn_state"):
        kdacompile.plan("nonesuch")


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
    argv = ["plan", "kda", "--target", "ascend910b", "--size", "T=512", "H=4"]
    assert main([*argv, "--html", str(page), "--svg", str(picture)]) == 0
    assert capsys.readouterr().out == str(kdacompile.plan("kda", "ascend910b", T=512, H=4))
    text = page.read_text()
    assert text.count("<svg") == 3  # the naive scan, the plan's at the same scale, heads over core groups
    for part in ("naive 10", "scan.1.cube", "goes into the fp32 master state", "assumption: nothing is published"):
        assert part in text
    assert "http" not in text  # nothing is loaded from elsewhere
    drawn = ElementTree.fromstring(picture.read_text())
    labels = {element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Cube", "Vec 0", "Vec 1", "workspace"} <= labels


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["plan", "nonesuch"], "unknown pattern"),
        (["plan", "kda", "--target", "abacus"], "no such target"),
        (["plan", "kda", "--size", "T"], "written like T=8192"),
        (["plan", "kda", "--size", "K=256", "V=256", "BV=256"], "196,608 over"),
    ],
)
def test_the_command_says_what_is_wrong(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "target", "form"),
    [
        *((name, "ascend910b", "chunk") for name in plans.names()),
        *(("mla", target, "chunk") for target in TARGETS),
        ("kda", "ascend910b", "segment"),
        ("kda", "cuda_sm90", "segment"),
        ("linear_attention", "ascend910b", "segment"),
    ],
)
def test_plans_can_be_seen(name: str, target: str, form: str) -> None:
    """As text, picture and page; a segment is what a run of chunks does to the state."""
    found = kdacompile.plan(name, target, form=form)
    assert found.handovers == found.lower_bound
    page = ElementTree.fromstring(found.to_svg())
    texts = [element.text or "" for element in page.iter("{http://www.w3.org/2000/svg}text")]
    assert any(found.target.title in text for text in texts)
    assert f"hand-overs a {found.step}" in str(found) and str(found.handovers) in found.to_html()
    assert found.program.name.endswith("_segment") == (form == "segment")


def test_sizes_are_numbers() -> None:
    assert plans.parse_sizes(["T=8192", "K=64"]) == {"T": 8192, "K": 64}
    with pytest.raises(ArgumentError):
        plans.parse_sizes(["K=wide"])


def test_the_docs_hold_the_table_and_the_picture() -> None:
    text = (DOCS / "plans.md").read_text()
    assert text == plans.with_table(text), "run `python -m kdacompile plan --table --write docs/plans.md`"
    for name in ("kda", "mla"):
        drawn = kdacompile.plan(name).to_svg()
        assert (DOCS / f"{name}.svg").read_text() == drawn, (
            f"run `python -m kdacompile plan {name} --svg docs/{name}.svg`"
        )


def test_a_match_links_to_its_plan() -> None:
    report = sample_report()
    assert "plan: kdacompile plan kda" in str(report)
    assert "2 hand-overs a chunk on Ascend 910B" in report.to_html()
