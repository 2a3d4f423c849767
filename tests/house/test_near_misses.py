"""Every code of a rejection has its section: cause, example, remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from kdacompile.patterns.engine.match import Code
from tests.house.near_misses import PROGRAMS, told

PAGE = Path(__file__).parents[2] / "docs" / "near-misses.md"
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_there_is_a_section_for_every_code_and_no_other() -> None:
    assert sorted(SECTIONS.keys() - {"Containment"}) == sorted(get_args(Code))


@pytest.mark.parametrize("code", get_args(Code))
def test_a_section_has_cause_example_and_remedy(code: str) -> None:
    cause, example, remedy = re.split(r"\*(?:Example|Remedy):\*", SECTIONS[code])
    assert all(len(part.strip()) > 10 for part in (cause, example, remedy))


ELSEWHERE = {
    "internal": "an error has to be planted: tests/backend/test_containment.py",
    "half_absorbed": "tests/mla/test_half_absorbed.py",
    "overlap": "nobody has found a program: it guards against matches that share a value",
}
"""Codes without a program here, and why."""


def test_every_code_has_a_program() -> None:
    assert sorted(PROGRAMS.keys() | ELSEWHERE.keys()) == sorted(get_args(Code))
    assert PROGRAMS.keys().isdisjoint(ELSEWHERE)


@pytest.mark.parametrize("code", PROGRAMS)
def test_its_program_is_told_the_code_and_the_reason(code: str) -> None:
    report = told(PROGRAMS[code])
    reasons = [rejection.reason for rejection in (*report.rejections, *report.declined) if rejection.code == code]
    assert any(PROGRAMS[code].says in reason for reason in reasons), str(report)
