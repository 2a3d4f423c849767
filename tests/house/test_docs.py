"""The documents: links lead somewhere, and what the README shows is what happens."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kdacompile.bench import charts

ROOT = Path(__file__).parents[2]
SITE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


def blocks(page: Path) -> str:
    """The Python blocks of a page as one program, without those behind a comment that says why they do not run."""
    found = re.findall(r"(<!-- not run: .+ -->\s+)?```python\n(.*?)```", page.read_text(), re.DOTALL)
    return "\n".join(code for skipped, code in found if not skipped)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_python_block_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(blocks(page))
    fresh = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
    command = [sys.executable, "page.py"]
    run = subprocess.run(command, cwd=tmp_path, env=fresh, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_pages_exist(page: Path) -> None:
    """Subcommands, modules and targets of make that a page names."""
    text = page.read_text()
    modules = set(re.findall(r"python -m ((?:kdacompile|tests)[\w.]*\w)", text))
    missing = {name for name in modules if util.find_spec(name) is None}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing |= set(re.findall(r"`make ([\w-]+)`", text)) - targets
    known = {"doctor", "explain", "support", "plan", "bench", "overhead"}
    missing |= set(re.findall(r"`(?:python -m )?kdacompile (\w+)", text)) - known
    assert missing == set()


def test_the_notebook_holds_the_quick_start() -> None:
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "\n\n".join(code) + "\n" == blocks(ROOT / "docs" / "quickstart.md")


def test_the_page_of_charts_is_what_the_figures_make() -> None:
    files = sorted((ROOT / "docs" / "results").glob("*.json"))
    made = charts.page({path.stem: charts.load(path) for path in files}, "charts")
    assert (ROOT / "docs" / "results.md").read_text() == made, "run `make charts`"
    for path in files:
        for theme in ("light", "dark"):
            ElementTree.parse(ROOT / "docs" / "charts" / f"{path.stem}-{theme}.svg")


def test_recorded_figures_name_no_file_of_a_machine() -> None:
    """What matched and failed, with its paths, is left out by `python -m kdacompile.bench.charts FILE --merge FILE`."""
    for path in (ROOT / "docs" / "results").rglob("*.json"):
        assert not re.findall(r"(?<![\w.])/(?:[\w.-]+/)+[\w.-]*", path.read_text()), path.name


def test_figures_of_the_gpu_are_those_of_its_page() -> None:
    cases = charts.load(ROOT / "docs" / "results" / "h200-kda.json")["cases"]
    table = (ROOT / "docs" / "cuda.md").read_text()
    rows = [
        f"| kda-t{case['length']} | {contender} | {figures['device_us']} us |"
        for case in charts.panels(cases)["forward"]
        for contender, figures in case["results"].items()
        if figures.get("suite") == "cuda"  # the others are the training suite's, which has no page
    ]
    assert rows and [row for row in rows if row not in table] == []


def test_the_site_has_every_page_once_and_every_name() -> None:
    """What the strict build asks for, where its tools are not installed."""
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^\s+- .*: ([\w-]+\.md)$", text[text.index("nav:\n") :], re.MULTILINE)
    outside = [page.name for page in PAGES if page.parent == ROOT] + ["CHANGELOG.md"]
    assert sorted(listed) == sorted(
        [page.name for page in PAGES if page.parent != ROOT] + [SITE[name] for name in outside]
    )
    for name in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_site_has_the_anchors_of_the_repository(page: Path) -> None:
    """A title has one address on both, or nobody links to it; and no two titles of a page have one."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    ours = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles]
    assert len(set(ours)) == len(ours)
    linked = {link for other in PAGES for link in re.findall(rf"{re.escape(page.name)}#([\w-]+)\)", other.read_text())}
    assert linked <= set(ours)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "WARNING" not in run.stderr
    assert "linear_attention_step" in (tmp_path / "api.html").read_text()


def test_the_readme_is_short() -> None:
    """Prose alone: tables and code do not count."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "<!--"))]
    assert len(" ".join(prose).split()) < 700
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    for question in ("Is my model covered?", "Is it faster for me?", "What if it does not match?"):
        assert question in first


def test_the_example_of_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    place = next(i for i, (_, code) in enumerate(blocks) if code.startswith("import kdacompile"))
    (tmp_path / "example.py").write_text(blocks[place][1])
    fresh = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
    command = [sys.executable, "example.py"]
    run = subprocess.run(command, cwd=tmp_path, env=fresh, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    digits = re.compile(r"[\d.]+e[-+]\d+|(?<=example.py:)\d+")  # roundings differ between machines
    printed = digits.sub("N", run.stdout.replace(str(tmp_path) + "/", ""))
    for line in digits.sub("N", blocks[place + 1][1]).splitlines():
        assert line in printed.splitlines()
