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


def open_up(dims: Dims) -> None:
    """Have these dimensions captured with open sizes; does not return if that takes another capture.

    To be called while Dynamo captures the graph or hands it to its backend. Does nothing for sizes that were to be open
    already (Dynamo has found a reason to fix them), for those of parameters, or where shapes are to be static
    (``dynamic=False``).
    """
    captured = frame()
    if captured is None or not _automatic(captured):
        return
    noted = [_note(captured, node, chosen) for node, chosen in dims.items()]  # all of them, before capture starts again
    if any(noted):
        raise capture_again("kdacompile: a size that will change is captured open")


def frame() -> Any:
    """The outermost frame of the region that this thread captures, None if it captures none."""
    from torch._dynamo.symbolic_convert import tls

    return getattr(tls, "current_tx", None)


def _automatic(captured: Any) -> bool:
    """True if Dynamo may choose which sizes are open, and this process decides that alone."""
    from torch._dynamo import config

    settings: Any = config  # its fields are installed at run time
    return bool(settings.automatic_dynamic_shapes) and captured.distributed_state is None


def _note(captured: Any, node: fx.Node, dims: set[int]) -> bool:
    """Note that these dimensions change from call to call; True if that is news."""
    from torch._dynamo.pgo import FrameStateSizeEntry, auto_dynamic, auto_unset, update_automatic_dynamic

    source = compat.source_name(node)
    if not source or compat.owner(node) not in ("", "G"):
        return False
    seen = update_automatic_dynamic(captured, source, FrameStateSizeEntry())
    if not isinstance(seen.size, tuple):
        return False
    news = {dim for dim in dims if isinstance(seen.size[dim], int)}
    if news:
        sizes: Any = tuple(auto_dynamic if dim in news else auto_unset for dim in range(len(seen.size)))
        update_automatic_dynamic(captured, source, FrameStateSizeEntry(size=sizes))
    return bool(news)


def capture_again(reason: str) -> Exception:
    """What to raise, while Dynamo captures or hands a graph to its backend, for the region to be captured anew."""
    return _capture_again()(restart_reason=reason)


@functools.cache
def _capture_again() -> Any:
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    class CaptureAgain(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
        """Of both kinds: the first passes through a backend, the second makes Dynamo forget what it speculated."""

    return CaptureAgain
