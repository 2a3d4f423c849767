"""Which sizes of a region's inputs Dynamo leaves open.

Dynamo captures every size as the number it is, until another call shows another number; what it has seen is kept per
code object and input. Where it is known beforehand that a size will change, that is noted here and capture starts anew:
the first graph then serves every size already.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from kdacompile import compat


class Open(NamedTuple):
    """Dimensions of an input, which Dynamo knows by the name ``source``; a number has a rank of 0, and none."""

    source: str
    rank: int
    dims: tuple[int, ...] = ()


def of_size(graph: fx.Graph, wanted: Collection[int]) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    """What a graph is called with (not its parameters), and which dimensions of it have one of these sizes, and not as
    a symbol.
    """
    for node in graph.find_nodes(op="placeholder"):
        value = compat.example_value(node)
        if isinstance(value, torch.Tensor) and compat.owner(node) in ("", "G"):
            sizes = enumerate(value.shape)
            dims = tuple(dim for dim, size in sizes if not isinstance(size, torch.SymInt) and size in wanted)
            if dims:
                yield node, dims


def as_open(found: Iterable[tuple[fx.Node, tuple[int, ...]]]) -> list[Open]:
    """The same by the names Dynamo has for the inputs, where it has."""
    return [
        Open(source, compat.example_value(node).dim(), dims)
        for node, dims in found
        if (source := compat.source_name(node))
    ]


def note(dims: Iterable[Open]) -> list[Open]:
    """Have these dimensions captured open from the next attempt on, and say which of them were not to be already.

    To be called while Dynamo captures a graph or hands it to its backend. Nothing is noted twice (Dynamo may have found
    a reason to fix a size), nor where shapes are to be static (``dynamic=False``).
    """
    captured = frame()
    if captured is None or not _automatic(captured):
        return []
    read = inputs()
    found: list[Open] = []
    for each in dims:
        if each.rank == 0:
            found += [each] if _note_number(captured, each.source) else []
        elif news := _note(captured, each, each.source in read):
            found.append(Open(each.source, each.rank, news))
    return found


def numbers(wanted: Collection[int]) -> list[Open]:
    """Numbers among the arguments of the region that this thread captures which are one of these, and were read."""
    captured = frame()
    given: dict[str, Any] = {} if captured is None else dict(captured.f_locals)
    by_source = {f"L[{name!r}]": value for name, value in given.items()}
    for name, value in given.items():
        if type(value) is dict:  # keyword arguments
            by_source |= {f"L[{name!r}][{key!r}]": item for key, item in cast("dict[Any, Any]", value).items()}
    found = (source for source, value in by_source.items() if type(value) is int and value in wanted)
    return [Open(source, 0) for source in found if type(_seen(captured, source).scalar) is int]


def inputs() -> set[str]:
    """Inputs of the graph that this thread captures, as far as they have been read."""
    captured = frame()
    nodes = () if captured is None else captured.output.tracers[0].graph.find_nodes(op="placeholder")
    return set(map(compat.source_name, nodes))


def region() -> str:
    """What the region that this thread captures can be told by before it is captured: its code and the kinds of what it
    is called with, which tells caches that grow from those that do not; "" if it is called with no module.
    """
    captured = frame()
    given = () if captured is None else tuple(captured.f_locals.values())
    if captured is None or not any(isinstance(value, nn.Module) for value in given):
        return ""
    kinds = " ".join(map(_kinds, given))
    return f"{captured.f_code.co_filename}:{captured.f_code.co_firstlineno} {kinds}"


def _kinds(value: Any, depth: int = 3) -> str:
    """The type of a value and of what it holds: all parts of a module, else as many levels as caches of models have."""
    name = _kind(value)
    held: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        return " ".join(map(_kind, value.modules()))
    if isinstance(value, list | tuple | set | frozenset):
        held = cast("Iterable[Any]", value)
    elif isinstance(value, dict):
        held = cast("dict[Any, Any]", value).values()
    elif not isinstance(value, torch.Tensor | type):
        held = getattr(value, "__dict__", {}).values()
    inner = {_kinds(each, depth - 1) for each in held} if depth else set[str]()
    return f"{name}({' '.join(sorted(inner))})" if inner else name


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def frame() -> Any:
    """The outermost frame of the region that this thread captures, None if it captures none."""
    from torch._dynamo.symbolic_convert import tls

    return getattr(tls, "current_tx", None)


def _automatic(captured: Any) -> bool:
    """True if Dynamo may choose which sizes are open, and this process decides that alone."""
    from torch._dynamo import config

    settings: Any = config  # its fields are installed at run time
    return bool(settings.automatic_dynamic_shapes) and captured.distributed_state is None


def _note(captured: Any, wanted: Open, read: bool) -> tuple[int, ...]:
    """Note that these dimensions change from call to call; returns those that were not known to. What was read and is
    not known at all is none of Dynamo's choices.
    """
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset, update_automatic_dynamic

    seen = _seen(captured, wanted.source).size
    known = (auto_unset,) * wanted.rank if seen is auto_unset and not read else seen
    if not isinstance(known, tuple) or len(known) != wanted.rank:
        return ()
    news = tuple(dim for dim in wanted.dims if known[dim] is not auto_dynamic)
    if news:
        sizes: Any = tuple(auto_dynamic if dim in news else auto_unset for dim in range(wanted.rank))
        update_automatic_dynamic(captured, wanted.source, FrameStateSizeEntry(size=sizes))
    if wanted.rank > 2:
        _seen(captured, wanted.source).__class__ = _with_strides()
    return news


def _note_number(captured: Any, source: str) -> bool:
    """Note that a number changes from call to call; False if it was known to, or is a tensor elsewhere."""
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, update_automatic_dynamic

    if _seen(captured, source).scalar is auto_dynamic:
        return False
    open_number = FrameStateSizeEntry(scalar=auto_dynamic, size=auto_dynamic, stride=auto_dynamic)
    update_automatic_dynamic(captured, source, open_number)
    return True


def _seen(captured: Any, source: str) -> Any:
    """What Dynamo has seen of an input of this code."""
    from torch._dynamo.pgo import FrameStateSizeEntry, update_automatic_dynamic

    return update_automatic_dynamic(captured, source, FrameStateSizeEntry())


@functools.cache
def _with_strides() -> Any:
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic

    class OpenStrides(FrameStateSizeEntry):
        """Of a tensor with an open size, strides are open that count rows of it: a cache that was cut back is a slice,
        whose strides are no products of its sizes. Torch has them so, and captures a slice anew.
        """

        def is_stride_dynamic(self, dim: int) -> bool:
            return isinstance(self.size, tuple) and auto_dynamic in self.size[dim + 1 :]

        def __reduce__(self) -> Any:
            """On disk, where torch keeps what it has seen, it is torch's own."""
            plain = FrameStateSizeEntry()
            vars(plain).update(vars(self))
            return plain.__reduce_ex__(2)

    return OpenStrides


def capture_again(reason: str) -> Exception:
    """What to raise, while Dynamo captures or hands a graph to its backend, for the region to be captured anew."""
    return _capture_again()(restart_reason=reason)


@functools.cache
def _capture_again() -> Any:
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    class CaptureAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
        """Of both kinds: the first passes through a backend, the second makes Dynamo forget what it speculated."""

    return CaptureAgain
