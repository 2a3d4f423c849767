"""Where programs begin: every spelling of the corpus as the text of a module, and how to feed it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import grammar
from tests.fuzz.sources import Unusable, text_of
from tests.mla import absorbed, layers, variants
from tests.mla import spellings as expanded
from tests.spellings import NEAR_MISSES, SPELLINGS
from tests.spellings.registry import Spelling

Draw = Callable[["Sizes", int, torch.dtype, int], tuple[Tensor, ...]]
"""Arguments of some sizes, a length, a dtype and a seed."""


@dataclass(frozen=True)
class Sizes:
    """Batch, heads, key and value size. Latent attention has its own sizes, but for the batch."""

    B: int = 1
    H: int = 2
    K: int = 4
    V: int = 6


@dataclass(frozen=True)
class Base:
    """A module's text that binds ``entry`` to what is called; ``DTYPE`` is bound before it."""

    name: str
    kind: str  # "corpus", "near miss", "latent" or "grammar"
    text: str
    takes: tuple[str, ...]
    draw: Draw
    multiple: int = 1
    step: bool = False  # one token at a time: there is no other length
    fixed: tuple[tuple[str, int], ...] = ()  # sizes that are no choice


def _spelling(name: str, kind: str, fn: Any, spelling: Spelling) -> Base:
    function, keywords = (fn.func, fn.keywords) if isinstance(fn, functools.partial) else (fn, {})
    if not inspect.isfunction(function):
        raise Unusable(f"{name} is an object")
    given = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
    entry = f"functools.partial({function.__name__}, {given})" if given else function.__name__
    text = text_of(function) + f"import functools\nentry = {entry}\n"
    fixed: dict[str, int] = {"H": len(spelling.constant_decay)} if spelling.constant_decay else {}
    if "square" in spelling.tags:
        fixed |= {"K": 4, "V": 4}

    def draw(sizes: Sizes, length: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
        tokens = spelling.lengths[0] if spelling.mode == "step" else length
        return spelling.make_inputs(sizes.B, tokens, sizes.H, sizes.K, sizes.V, dtype, seed)

    step = spelling.mode == "step"
    return Base(name, kind, text, spelling.takes, draw, spelling.multiple, step, tuple(fixed.items()))


def _latent(cls: type[Any], shapes: tuple[tuple[int, int, int], ...] | None = None) -> Base:
    text = text_of(cls) + f"torch.manual_seed(0)\nentry = {cls.__name__}().to(DTYPE).eval()\n"
    sizes = vars(sys.modules[cls.__module__])
    widths = shapes or tuple((0, 0, sizes[size]) for size in ("WIDTH", "RANK", "ROPE"))
    tokens = [shape[1] for shape in widths]

    def draw(sizes: Sizes, length: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
        rng = torch.Generator().manual_seed(seed)
        longer = [1 if t == 1 else length for t in tokens]
        pairs = zip(longer, widths, strict=True)
        return tuple(torch.randn(sizes.B, t, shape[2], generator=rng).to(dtype) for t, shape in pairs)

    return Base(f"mla_{cls.__name__}", "latent", text, tuple(f"x{i}" for i in range(len(widths))), draw)


def _grammar(name: str) -> Base:
    text, takes, multiple = grammar.write(name)

    def draw(sizes: Sizes, length: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
        return grammar.draw(takes, sizes.B, length, sizes.H, sizes.K, sizes.V, dtype, seed)

    return Base(name, "grammar", text, takes, draw, multiple)


def _corpus() -> Iterator[tuple[str, Callable[[], Base]]]:
    for spelling in SPELLINGS:
        yield spelling.name, functools.partial(_spelling, spelling.name, "corpus", spelling.fn, spelling)
    for miss in NEAR_MISSES:
        yield miss.name, functools.partial(_spelling, miss.name, "near miss", miss.fn, miss.likeness)
    classes = [*expanded.SPELLINGS.values(), *(make for make, _ in expanded.NEAR_MISSES.values())]
    classes += [cls for cls in vars(absorbed).values() if isinstance(cls, type) and hasattr(cls, "context")]
    classes += [cls for cls, _ in (*variants.MATCHED.values(), *variants.LEFT.values())]
    for cls in classes:
        if isinstance(cls, type):
            yield f"mla_{cls.__name__}", functools.partial(_latent, cls)
    for case in layers.LAYERS.values():
        if isinstance(case.build, type):
            yield f"mla_{case.build.__name__}", functools.partial(_latent, case.build, case.shapes)


@functools.cache
def corpus() -> dict[str, Base]:
    """Every spelling and near miss whose text stands for itself."""
    found: dict[str, Base] = {}
    for name, make in _corpus():
        try:
            found[name] = make()
        except Unusable:
            continue
    return found


def base(name: str) -> Base:
    """One of the corpus, or the text that the grammar has under this name."""
    return corpus()[name] if name in corpus() else _grammar(name)
