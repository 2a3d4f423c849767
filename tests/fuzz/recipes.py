"""A program as data. The n-th of a seed is always the same one, in whatever process it is drawn."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import bases, grammar
from tests.fuzz.bases import Base, Sizes
from tests.fuzz.mutations import Mutation, Places, drawn, edited, numbered, watch
from tests.fuzz.numbers import MILD, NUMBERS, changed, laid_out

MOST_EVALUATIONS = 400
"""Of expressions in one run: longer ones are captured for seconds."""

_files = itertools.count()


@dataclass(frozen=True)
class Call:
    """One call of a compiled program."""

    length: int
    numbers: str = "ordinary"
    layout: str = "plain"
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """A program and how it is run. ``nested``: the base is called by another function, so that it may be lifted."""

    base: str
    calls: tuple[Call, ...]
    sizes: Sizes = field(default_factory=Sizes)
    mutations: tuple[Mutation, ...] = ()
    dtype: str = "float64"
    nested: bool = False
    dynamic: bool | None = None
    gradients: bool = False
    inner: str = "eager"

    @property
    def text(self) -> str:
        """The module, without ``DTYPE``; ``program`` is what is compiled."""
        outer = "def program(*args):\n    return entry(*args)\n" if self.nested else "program = entry\n"
        return edited(bases.base(self.base).text, self.mutations) + "\n\n" + outer

    def arguments(self, call: Call, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        base = bases.base(self.base)
        double = base.draw(self.sizes, call.length, torch.float64, call.seed)
        numbers = changed(call.numbers, base.takes, double)
        return laid_out(call.layout, base.takes, tuple(x.to(dtype or getattr(torch, self.dtype)) for x in numbers))


def load(text: str, dtype: str, folder: Path) -> Callable[..., Any]:
    """``program`` of a module's text; a file, since capture reads the source of what it lifts."""
    name = f"fuzzed_{next(_files)}"
    path = folder / f"{name}.py"
    path.write_text(f"import torch\n\nDTYPE = torch.{dtype}\n" + text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.program


def forget() -> None:
    """What has been loaded. Until then Dynamo may import it by its name."""
    for name in [name for name in sys.modules if name.startswith("fuzzed_")]:
        del sys.modules[name]


def _any_base(rng: random.Random) -> Base:
    kind = rng.choices(("grammar", "corpus", "latent", "near miss"), (45, 30, 15, 10))[0]
    if kind == "grammar":
        return bases.base(grammar.any_name(rng))
    return rng.choice([base for base in bases.corpus().values() if base.kind == kind])


def _sizes(rng: random.Random, base: Base) -> Sizes:
    chosen = {
        "B": rng.choice((1, 1, 2)),
        "H": rng.choice((1, 2, 3)),
        "K": rng.choice((4, 5, 8)),
        "V": rng.choice((4, 6, 7)),
    }
    return Sizes(**{**chosen, **dict(base.fixed)})


def _whole(length: int, multiple: int) -> int:
    return max(1, length // multiple) * multiple


def _places(base: Base, sizes: Sizes, length: int) -> Places:
    def run(names: dict[str, Any]) -> object:
        with torch.no_grad():
            return names["entry"](*base.draw(sizes, length, torch.float64, 0))

    return watch(numbered(base.text), run, {"DTYPE": torch.float64, "__name__": "watched"})


def _length(rng: random.Random, base: Base, sizes: Sizes) -> tuple[int, Places]:
    """A length that runs in so many evaluations, and what was seen at it."""
    length = _whole(rng.choice((20, 33, 48, 70, 100, 140)), base.multiple)
    while True:
        places = _places(base, sizes, length)
        shorter = _whole(min(length // 2, length * MOST_EVALUATIONS // (1 + places.evaluations)), base.multiple)
        if places.evaluations <= MOST_EVALUATIONS or shorter == length:
            return length, places
        length = shorter


def _calls(rng: random.Random, base: Base, length: int, closed: bool, gradients: bool) -> tuple[Call, ...]:
    numbers = [rng.choice(MILD if gradients else list(NUMBERS)) for _ in range(3)]
    layouts = [rng.choice(("plain", "plain", "strided", "offset", "aliased")) for _ in range(2)]
    calls = [Call(length), *(Call(length, n, layout, 1) for n, layout in zip(numbers[:2], layouts, strict=True))]
    if not base.step and rng.random() < 0.4:
        longer = rng.choice((length * 2, length * 3, 70, 150)) if closed else length + 1
        calls.insert(1, Call(_whole(longer, base.multiple), numbers[2], "plain", 2))
    return tuple(calls)


def recipe(seed: int, index: int) -> Recipe | None:
    """The program of this number; None where its base does not run with the sizes that were drawn."""
    rng = random.Random(f"{seed}:{index}")
    base = _any_base(rng)
    sizes = _sizes(rng, base)
    try:
        length, places = _length(rng, base, sizes)
    except Exception:  # noqa: BLE001 - a base with sizes of its own
        return None
    gradients = rng.random() < 0.2
    count = rng.choices((0, 1, 2, 3), (10, 65, 20, 5))[0]
    return Recipe(
        base.name,
        _calls(rng, base, length, places.evaluations < MOST_EVALUATIONS // 3, gradients),
        sizes,
        drawn(rng, places, count) if count else (),
        dtype=rng.choices(("float64", "float32"), (75, 25))[0],
        nested=rng.random() < 0.4,
        dynamic=rng.choices((None, True, False), (70, 15, 15))[0],
        gradients=gradients,
        inner=rng.choices(("eager", "aot_eager"), (80, 20))[0],
    )
