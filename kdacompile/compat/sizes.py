"""Which sizes of a region's inputs Dynamo leaves open.

Dynamo captures every size as the number it is, until another call shows another number; what it has seen is kept per
code object and input. Where it is known beforehand that a size will change, that is noted here and capture starts anew:
the first graph then serves every size already.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from kdacompile import compat

Dims = Mapping[fx.Node, "set[int]"]
"""Inputs of a graph, and the dimensions of each."""


def of_size(graph: fx.Graph, wanted: Collection[int]) -> Dims:
    """Dimensions of the inputs of a graph that have one of these sizes, and not as a symbol."""
    found: dict[fx.Node, set[int]] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = compat.example_value(node)
        if isinstance(value, torch.Tensor):
            sizes = enumerate(value.shape)
            found[node] = {dim for dim, size in sizes if not isinstance(size, torch.SymInt) and size in wanted}
    return {node: dims for node, dims in found.items() if dims}


def odd_strides(node: fx.Node) -> set[int]:
    """Dimensions of size one of an input along which the stride is not that of a contiguous tensor."""
    value = compat.example_value(node)
    found: set[int] = set()
    inner = 1
    for dim in reversed(range(value.dim())):
        if isinstance(value.shape[dim], int) and value.shape[dim] == 1 and compat.size_hint(value.stride(dim)) != inner:
            found.add(dim)
        inner *= compat.size_hint(value.shape[dim])
    return found


def open_up(dims: Dims, strides: Dims | None = None) -> None:
    """Have these dimensions captured with open sizes (or strides); does not return if that takes another capture.

    To be called while Dynamo captures the graph or hands it to its backend. Does nothing for sizes that were to be open
    already (Dynamo has found a reason to fix them), for those of parameters, or where shapes are to be static
    (``dynamic=False``). ``strides`` are for dimensions of size one only.
    """
    frame = _frame()
    if frame is None or not _automatic(frame):
        return
    noted = [_note(frame, node, chosen) for node, chosen in dims.items()]  # all of them, before capture starts again
    noted += [_note_strides(frame, node, chosen) for node, chosen in (strides or {}).items()]
    if any(noted):
        raise _capture_again()


def _frame() -> Any:
    """The frame this thread captures, None if it captures none."""
    from torch._dynamo.symbolic_convert import tls

    return getattr(tls, "current_tx", None)


def _automatic(frame: Any) -> bool:
    """True if Dynamo may choose which sizes are open, and this process decides that alone."""
    from torch._dynamo import config

    settings: Any = config  # its fields are installed at run time
    return bool(settings.automatic_dynamic_shapes) and frame.distributed_state is None


def _note(frame: Any, node: fx.Node, dims: set[int]) -> bool:
    """Note that these dimensions change from call to call; True if that is news."""
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset, update_automatic_dynamic

    source, seen = _seen(frame, node)
    if seen is None:
        return False
    news = {dim for dim in dims if isinstance(seen.size[dim], int)}
    if news:
        sizes: Any = tuple(auto_dynamic if dim in news else auto_unset for dim in range(len(seen.size)))
        update_automatic_dynamic(frame, source, FrameStateSizeEntry(size=sizes))
    return bool(news)


def _note_strides(frame: Any, node: fx.Node, dims: set[int]) -> bool:
    """The same for the strides along dimensions of size one."""
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset, update_automatic_dynamic

    source, seen = _seen(frame, node)
    loose = _loose_strides()
    if seen is None or not isinstance(seen.stride, tuple) or isinstance(seen, loose):
        return False
    strides: Any = tuple(auto_dynamic if dim in dims else auto_unset for dim in range(len(seen.stride)))
    update_automatic_dynamic(frame, source, FrameStateSizeEntry(stride=strides))
    seen.__class__ = loose
    return True


def _seen(frame: Any, node: fx.Node) -> tuple[str, Any]:
    """An input's name, and what Dynamo has seen of its sizes; None if they are not for Dynamo to open."""
    from torch._dynamo.pgo import FrameStateSizeEntry, update_automatic_dynamic

    source = compat.source_name(node)
    if not source or compat.owner(node) not in ("", "G"):
        return source, None
    seen = update_automatic_dynamic(frame, source, FrameStateSizeEntry())
    return source, seen if isinstance(seen.size, tuple) else None


@functools.cache
def _loose_strides() -> type[Any]:
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic

    class LooseStrides(FrameStateSizeEntry):
        """What was seen of an input whose strides along sizes of one are open.

        Dynamo opens no stride beside an open size, and guards the others, though one along a size of one means nothing.
        """

        def is_stride_dynamic(self, dim: int) -> bool:
            return isinstance(self.stride, tuple) and self.stride[dim] is auto_dynamic

        def __reduce__(self) -> Any:  # as Dynamo's own, for profiles that processes without kdacompile may read
            return FrameStateSizeEntry, (self.scalar, self.size, self.stride)

    return LooseStrides


@functools.cache
def _capture_again() -> type[Exception]:
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    class CaptureAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
        """Of both kinds: the first passes through a backend, the second makes Dynamo forget what it speculated."""

        def __init__(self) -> None:
            super().__init__(restart_reason="kdacompile: a size that will change is captured open")

    return CaptureAgain
