"""The smallest recipe that still fails: fewer edits, calls and options, smaller sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz import bases
from tests.fuzz.recipes import Call, Recipe

PLAIN: dict[str, Any] = {"nested": False, "dynamic": None, "gradients": False, "inner": "eager", "dtype": "float64"}


def simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that are one step simpler, the largest steps first."""
    for index in range(len(recipe.mutations)):
        yield replace(recipe, mutations=recipe.mutations[:index] + recipe.mutations[index + 1 :])
    if len(recipe.calls) > 1:
        for index in reversed(range(len(recipe.calls))):
            yield replace(recipe, calls=recipe.calls[:index] + recipe.calls[index + 1 :])
    for name, value in PLAIN.items():
        if getattr(recipe, name) != value:
            yield replace(recipe, **{name: value})
    for index, call in enumerate(recipe.calls):
        for other in _calls(call, bases.base(recipe.base).multiple):
            yield replace(recipe, calls=(*recipe.calls[:index], other, *recipe.calls[index + 1 :]))
    for name in ("B", "H"):
        if getattr(recipe.sizes, name) > 1:
            yield replace(recipe, sizes=replace(recipe.sizes, **{name: 1}))


def _calls(call: Call, multiple: int) -> Iterator[Call]:
    for name, value in {"numbers": "ordinary", "layout": "plain"}.items():
        if getattr(call, name) != value:
            yield replace(call, **{name: value})
    for length in (call.length // 2, call.length * 3 // 4):
        whole = max(1, length // multiple) * multiple
        if 1 < whole < call.length:
            yield replace(call, length=whole)


def shrunk(recipe: Recipe, fails: Callable[[Recipe], bool], most: int = 60) -> Recipe:
    """``recipe`` after every step that leaves it failing, in at most so many attempts."""
    attempts = iter(range(most))
    found = True
    while found:
        found = False
        for candidate in simpler(recipe):
            if next(attempts, None) is None:
                return recipe
            if fails(candidate):
                recipe, found = candidate, True
                break
    return recipe
