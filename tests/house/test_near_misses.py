"""Every code of a rejection has its section: cause, example, remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from kdacompile.patterns.engine.match import Code

PAGE = Path(__file__).parents[2] / "docs" / "near-misses.md"
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_there_is_a_section_for_every_code_and_no_other() -> None:
    assert sorted(SECTIONS.keys() - {"Containment"}) == sorted(get_args(Code))


@pytest.mark.parametrize("code", get_args(Code))
def test_a_section_has_cause_example_and_remedy(code: str) -> None:
    cause, example, remedy = re.split(r"\*(?:Example|Remedy):\*", SECTIONS[code])
    assert all(len(part.strip()) > 10 for part in (cause, example, remedy))
