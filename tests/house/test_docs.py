"""The documents: links lead somewhere, and what the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


def test_the_readme_is_short() -> None:
    """Prose alone: tables and code do not count."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "<!--"))]
    assert len(" ".join(prose).split()) < 700


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
