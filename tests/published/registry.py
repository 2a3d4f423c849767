"""What a case is: a function or a module of a published file, arguments for it, and what is to be found in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.published.sources import Repository

Program = tuple[Callable[..., Any], tuple[Any, ...]]
Maker = Callable[[ModuleType], Program]
Exact = Callable[[ModuleType], Callable[..., Any]]

CASES: list[Case] = []


@dataclass(frozen=True)
class Case:
    """One way to call one file. ``finds`` are the patterns to be found, none for what is not of the family."""

    repository: Repository
    path: str
    name: str
    make: Maker
    finds: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    """Definitions to take out of a file that does more than define; all of it otherwise."""
    exact: Exact | None = None
    """Of a function that rounds to a narrow dtype: the same without; results may be as far from its as eager's are."""

    def __str__(self) -> str:
        return f"{self.repository.name} {self.path} {self.name}"


def case(
    repository: Repository, path: str, *finds: str, only: tuple[str, ...] = (), exact: Exact | None = None
) -> Callable[[Maker], Maker]:
    """Register what the function makes of the file's module, a callable and its arguments, under its own name."""

    def register(make: Maker) -> Maker:
        CASES.append(Case(repository, path, make.__name__, make, finds, only, exact))
        return make

    return register
