"""What a kernel library documents about one of its functions, and a call of it as source text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kdacompile.capture.calls import Call, TensorArg
from kdacompile.capture.errors import Unliftable


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call by name; those left out are not in it."""

    source: Mapping[str, str]
    """Each as Python source: ``x3`` for the fourth tensor, or the value written out."""

    tensors: Mapping[str, TensorArg]
    index: Mapping[str, int]
    """Where each tensor stands among the call's tensors."""

    @classmethod
    def of(cls, call: Call) -> Arguments:
        """Raises ``Unliftable`` for a value that cannot be written out."""
        source: dict[str, str] = {}
        tensors: dict[str, TensorArg] = {}

        for given, item in call.arguments:
            name = given.removeprefix("=")
            if isinstance(item, TensorArg):
                source[name] = f"x{len(tensors)}"
                tensors[name] = item
            elif isinstance(item, (torch.dtype, torch.device, torch.memory_format)):
                raise Unliftable(f"{name} is not an argument of linear attention")
            else:
                source[name] = _literal(item)
        return cls(source, tensors, {name: index for index, name in enumerate(tensors)})

    def refuse(self, known: frozenset[str]) -> None:
        """Raise ``Unliftable`` for an argument that is neither known nor off."""
        for name, text in self.source.items():
            if name not in known and text not in ("None", "False"):
                raise Unliftable(f"{name} is not an option of its replacement")


@dataclass(frozen=True)
class Documented:
    """A function that may be replaced: what it computes, and where batch and tokens stand in its arguments."""

    pattern: str
    """The family's row, empty if there is no linear attention in it."""

    tokens: Mapping[str, int]
    """Arguments ``[B, ...]`` with tokens, and the dimension they stand in; the first one says how many there are."""

    states: tuple[str, ...]
    """Arguments ``[B, ...]`` without tokens."""

    write: Callable[[Arguments], tuple[str, dict[int, str]]]
    """The expression that replaces a call, and the role of each tensor (``probes.make``); raises ``Unliftable`` for
    options that it does not cover.
    """


def _literal(item: Any) -> str:
    if isinstance(item, tuple):
        return f"({''.join(f'{_literal(part)}, ' for part in item)})"  # type: ignore[misc]
    return f'float("{item}")' if isinstance(item, float) and not math.isfinite(item) else repr(item)
