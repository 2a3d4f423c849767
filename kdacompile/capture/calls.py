"""How a function is called: its arguments with the batch and token dimensions left open.

A replacement is made for one *call pattern*: which arguments are tensors, their dtypes, fixed sizes and order in
memory, and the value of everything else. Two dimensions stay open, the batch ``B`` (unless it is one, which changes how
tensors broadcast) and the tokens ``T``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kdacompile import compat
from kdacompile.capture.autocast import Autocast
from kdacompile.capture.errors import Unliftable

Dim = int | str
Sizes = Mapping[str, int]

MIN_TENSORS = 3
"""q, k and v."""


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument: open dimensions by their axis (B, T), fixed ones by size."""

    dims: tuple[Dim, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    """The dimensions from the outermost to the innermost in memory; empty where that is their own order. Operators lay
    results out as their operands are.
    """

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    def strides(self, sizes: Sizes) -> tuple[int, ...]:
        shape, step = self.shape(sizes), 1
        found = [0] * len(shape)
        for dim in reversed(self.order or range(len(shape))):
            found[dim] = step
            step *= max(1, shape[dim])
        return tuple(found)


@dataclass(frozen=True)
class Call:
    """The arguments by name, each a ``TensorArg`` or a plain value; those of ``*args`` and ``**kwargs`` among them.

    A name with "=" in front goes by keyword.
    """

    arguments: tuple[tuple[str, Any], ...]
    autocast: Autocast = ()
    """The autocast it is made under, as far as it concerns its tensors."""

    def tensors(self) -> list[tuple[str, TensorArg]]:
        """Tensor arguments in order, by name."""
        return [(name, item) for name, item in self.arguments if isinstance(item, TensorArg)]

    def numbers(self) -> set[int]:
        """Whole numbers among the plain values: chunk sizes, for one."""
        plain = [item for _, item in self.arguments]
        return {abs(item) for item in plain if isinstance(item, int) and not isinstance(item, bool)}

    def bind(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The call's (args, kwargs) with ``tensors`` for the tensor arguments."""
        given = iter(tensors)
        filled = [(name, next(given) if isinstance(item, TensorArg) else item) for name, item in self.arguments]
        named = {name[1:]: item for name, item in filled if name.startswith("=")}
        return [item for name, item in filled if not name.startswith("=")], named

    def map_tensors(self, change: Callable[[str, TensorArg], TensorArg]) -> Call:
        """The call with every tensor, given by name, replaced."""
        changed = ((n, change(n.removeprefix("="), x) if isinstance(x, TensorArg) else x) for n, x in self.arguments)
        return replace(self, arguments=tuple(changed))

    @property
    def text(self) -> str:
        return repr((self.arguments, self.autocast) if self.autocast else self.arguments)


def describe(tensor: torch.Tensor, *, documented: bool = False) -> TensorArg:
    """A tensor with every dimension fixed; symbolic ones as text, "~" and the size they have now.

    ``documented``: of a library's function, which may treat tensors that want a gradient otherwise, and whose results
    do not depend on the order of its operands in memory.
    """
    if tensor.is_nested or tensor.layout is not torch.strided or compat.is_traceable_wrapper_subclass(tensor):
        raise Unliftable("an argument is not a plain tensor")
    sizes: list[Any] = list(tensor.shape)
    dims = tuple(size if isinstance(size, int) else f"~{compat.size_hint(size)}" for size in sizes)
    grad = documented and tensor.requires_grad and torch.is_grad_enabled()
    return TensorArg(dims, tensor.dtype, tensor.device.type, grad, () if documented else order_of(tensor))


def order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """See ``TensorArg.order``. Dimensions of one entry, or of one that is repeated, stay in their places."""
    pairs = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    free = [dim for dim, (size, stride) in pairs if not compat.is_one(size) and stride != 0]
    ranked = iter(sorted(free, key=lambda dim: -tensor.stride(dim)))
    order = tuple(next(ranked) if dim in free else dim for dim in range(tensor.dim()))
    return () if order == tuple(range(tensor.dim())) else order


def open_dimensions(call: Call, *, fix: bool = False) -> Iterator[Call]:
    """``call`` with batch and tokens opened: one guess per layout that fits. ``fix``: heads and widths that are open
    are taken for what they are now, for the caller to guard.

    Tokens are dimension 1 ([B, T, H, D]) or 2 ([B, H, T, D]) of most tensors; the guess is checked by running the
    function, since the roles its region turns out to have say where tokens really are.
    """
    ranked = [
        tensor for _, tensor in call.tensors() if len(tensor.dims) >= MIN_TENSORS and tensor.dtype.is_floating_point
    ]
    if len(ranked) < MIN_TENSORS:
        raise Unliftable("it takes fewer than three tensors of rank three or more")
    batch = Counter(tensor.dims[0] for tensor in ranked).most_common(1)[0][0]
    guesses: list[tuple[Dim, int]] = []
    for position in (1, 2):
        sizes = Counter(tensor.dims[position] for tensor in ranked if len(tensor.dims) > position)
        tokens, count = sizes.most_common(1)[0]
        if count < MIN_TENSORS:
            continue
        if tokens != 1:
            guesses.append((tokens, position))
    if [position for _, position in guesses] == [2] and isinstance(guesses[0][0], int):
        # One head's tokens, or the heads of one token: only a length that is open can be told from a count of heads.
        # Capturing one token is short anyway.
        return
    for tokens, position in sorted(guesses, key=lambda guess: isinstance(guess[0], int)):
        opened = _opened(call, batch, tokens, position)
        # A width, or the heads, may be as many as there are tokens now: what is theirs cannot be told then.
        alike = any(dim == tokens for tensor in ranked for at, dim in enumerate(tensor.dims) if at not in (0, position))
        if fix and not _is_settled(opened) and not alike:
            opened = opened.map_tensors(_fixed)
        if _is_settled(opened):
            yield opened


def _is_settled(opened: Call) -> bool:
    return all(isinstance(dim, int) or dim in ("B", "T") for _, tensor in opened.tensors() for dim in tensor.dims)


def _fixed(_: str, tensor: TensorArg) -> TensorArg:
    dims = (dim if dim in ("B", "T") else int(str(dim).removeprefix("~")) for dim in tensor.dims)
    return replace(tensor, dims=tuple(dims))


@dataclass(frozen=True)
class Length:
    """How many tokens a call has, and whether the captured graph leaves that open."""

    now: int
    symbolic: bool


def length_of(call: Call, opened: Call) -> Length:
    """The tokens of ``call``, whose open dimensions ``opened`` tells."""
    for (_, tensor), (_, axes) in zip(call.tensors(), opened.tensors(), strict=True):
        if "T" in axes.dims:
            size = tensor.dims[axes.dims.index("T")]
            return Length(int(str(size).removeprefix("~")), isinstance(size, str))
    raise Unliftable("no argument has tokens")


def _opened(call: Call, batch: Dim, tokens: Dim, position: int) -> Call:
    def axis(index: int, dim: Dim) -> Dim:
        if (
            dim == batch and index == 0 and dim != 1
        ):  # first: an open batch may have as many entries as there are tokens
            return "B"
        return "T" if dim == tokens and (index == position or isinstance(dim, str)) else dim

    def visit(_: str, tensor: TensorArg) -> TensorArg:
        return replace(tensor, dims=tuple(axis(index, dim) for index, dim in enumerate(tensor.dims)))

    return call.map_tensors(visit)
