"""The tools, or a skip that says why they are not here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ascend.tools import Tools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-case", action="store_true", help="run each test with its first parameters alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--one-case", default=False):
        return
    first: dict[tuple[Path, str], pytest.Item] = {}
    for item in items:
        first.setdefault((item.path, getattr(item, "originalname", item.name)), item)
    config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
    items[:] = first.values()


@pytest.fixture(scope="session")
def environment() -> Path:
    """The folder that ``make test-ascend`` has made, see environment.py."""
    folder = os.environ.get("KDA_ASCEND_ENVIRONMENT")
    if not folder:
        pytest.skip("needs the Ascend tools: make test-ascend")
    missing = Path(folder) / "missing.txt"
    if missing.exists():
        pytest.skip(f"no Ascend tools for this machine: {missing.read_text()}")
    return Path(folder).absolute()


@pytest.fixture(scope="session")
def tools(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    tools = Tools(environment, tmp_path_factory.mktemp("ascend"))
    yield tools
    tools.close()
