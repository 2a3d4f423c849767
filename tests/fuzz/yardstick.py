"""How far apart two outcomes are, and how far eager mode itself is from the program without its roundings."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compare import tensors

_BLANK = frozenset(
    "zeros ones empty empty_strided zeros_like ones_like empty_like new_zeros new_ones new_empty "
    "new_empty_strided".split()
)
"""What these make is the same in every dtype."""


def smallest(dtype: torch.dtype) -> float:
    """The share of the whole below which a slice is not compared by itself."""
    return 1e-7 if dtype == torch.float64 else 1.0


def difference(actual: Tensor, expected: Tensor, small: float | None = None) -> float:
    """The largest relative error over the whole and over each slice of a dimension, where eager is finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    small = smallest(expected.dtype) if small is None else small
    ours, theirs = actual.detach().double(), expected.detach().double()
    finite = theirs.isfinite()
    if not bool(ours[finite].isfinite().all()):
        return float("inf")
    gap, theirs = ((ours - theirs).masked_fill(~finite, 0.0), theirs.masked_fill(~finite, 0.0))
    largest = float(theirs.abs().max()) if theirs.numel() else 0.0
    if float(gap.abs().max() if gap.numel() else 0.0) <= 1e-300 + 1e-30 * largest:
        return 0.0
    scale = max(largest, 1e-300)
    gap, theirs = gap / scale, theirs / scale
    worst = float(gap.norm() / theirs.norm().clamp(min=1e-300))
    for dim in range(gap.dim()):
        others = [d for d in range(gap.dim()) if d != dim]
        part, whole = (
            (torch.linalg.vector_norm(x, dim=others) for x in (gap, theirs)) if others else (gap.abs(), theirs.abs())
        )
        worst = max(worst, float((part / (whole + small * theirs.norm())).max()))
    return worst


def apart(ours: Sequence[Tensor], plain: Sequence[Tensor], small: float | None = None) -> float:
    """The largest ``difference``; ``small``: see ``smallest``."""
    if len(ours) != len(plain):
        return float("inf")
    return max((difference(x, y, small) for x, y in zip(ours, plain, strict=True)), default=0.0)


def from_exact(found: Sequence[Tensor], exact: Sequence[Tensor], eager: Sequence[Tensor]) -> float:
    """How far ``found`` is from the program without roundings, where eager mode is finite."""
    if not len(found) == len(exact) == len(eager):
        return float("inf")
    worst = 0.0
    for x, want, plain in zip(found, exact, eager, strict=True):
        if not x.shape == want.shape == plain.shape:
            return float("inf")
        lost = ~plain.detach().isfinite()
        one, other = (each.detach().double().masked_fill(lost, 0.0) for each in (x, want))
        worst = max(worst, difference(one, other, smallest(plain.dtype)))
    return worst


class Narrowest(TorchDispatchMode):
    """The largest rounding of any operator's floating-point result."""

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tensors(result):
            if x.is_floating_point():
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return result


class Shaken(TorchDispatchMode):
    """Monte Carlo arithmetic (Parker, 1997): what an operator returns in ``dtype`` is off by one rounding more, at
    random, wherever it is no whole number: those are mostly exact, masks and positions among them. How far results move
    is what the rounding of operators may do to them. A softmax is taken apart, as its steps round too: the gradients
    of one that sees a single key cancel exactly only in torch's order of them.
    """

    APART = get_decompositions([torch.ops.aten._softmax, torch.ops.aten._softmax_backward_data])

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.dtype = dtype
        self.rng = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.APART:
            with self:
                return self.APART[func](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            for x in tensors(result):
                if x.dtype == self.dtype:
                    self.shake(x)
        return result

    def shake(self, x: Tensor) -> None:
        noise = torch.rand(x.shape, generator=self.rng, dtype=torch.float64).to(x.dtype) * 2 - 1
        x.copy_(torch.where(x == x.round(), x, x + x * noise * torch.finfo(x.dtype).eps))


class Unrounded(TorchDispatchMode):
    """Whatever is made of the arguments is in float64, whatever dtype the program asks for. Constants keep theirs,
    unless ``constants``: that positions in bfloat16 repeat is what the program computes, and no rounding.
    """

    def __init__(self, arguments: Iterable[Tensor], *, constants: bool) -> None:
        super().__init__()
        self.constants = constants
        self.kept: list[Tensor] = []
        """So that no address is given out twice."""
        self.reached: set[int] = set()
        """Addresses of what the arguments lead to."""
        self.reach(arguments)

    def reach(self, found: Iterable[Tensor]) -> None:
        for x in found:
            self.kept.append(x)
            self.reached.add(x.untyped_storage().data_ptr())
        self.reached.discard(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket.__name__ == "randn":  # a generator gives other numbers in another dtype
            return func(*args, **kwargs)
        given = tensors((args, kwargs))
        reached = self.constants or any(x.untyped_storage().data_ptr() in self.reached for x in given)
        if func.overloadpacket.__name__ in _BLANK:
            asked = kwargs.get("dtype") or (given[0].dtype if given else torch.get_default_dtype())
            kwargs["dtype"] = _wide(asked)
        elif reached and kwargs.get("dtype") is not None:
            kwargs["dtype"] = _wide(kwargs["dtype"])
        if reached and func._schema.is_mutable:
            args = (*args[:1], *_widened(args[1:]))
        elif reached:
            args, kwargs = _widened((args, kwargs))
        result = func(*args, **kwargs)
        self.kept += given
        if reached:
            self.reach(tensors(result))
        else:
            self.kept += tensors(result)
        return result


@contextmanager
def unrounded(arguments: Iterable[Tensor], *, constants: bool) -> Generator[None]:
    """Run a program in float64 throughout; ``constants``: those too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if constants else before)
    try:
        with Unrounded(arguments, constants=constants):
            yield
    finally:
        torch.set_default_dtype(before)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _widened(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(_wide(x.dtype)), tree)
