"""What the report says about a tensor and about a place in the user's code."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import Path

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph.text import frames_of
from kdacompile.patterns.engine.placement import Placement

NOTATION = frozenset({"einops", "opt_einsum"})
"""Libraries of notation: the line that is told is their caller's."""

_LOCAL = re.compile(r"^[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*=[^=]")


def describe(placement: Placement) -> str:
    """The tensor that plays a role: its name, the meaning of its dimensions, their sizes ("any" of what is open), its
    dtype.
    """
    value = compat.example_value(placement.value.node)
    axes = " ".join(placement.axes.replace(".", "1").replace("*", "(HK)"))
    turned = ", last token first" if placement.backwards and "T" in axes else ""
    dtype = str(value.dtype).removeprefix("torch.")
    sizes = ", ".join(str(size) if isinstance(size, int) else "any" for size in value.shape)
    return f"{name_of(placement.value.node)} [{axes}] [{sizes}] {dtype}{turned}"


def name_of(node: fx.Node) -> str:
    """What the model calls a tensor: ``q``, ``self.layer.weight``, the variable on its line; else the node's name."""
    source = compat.source_name(node)
    if source:
        return _MEMBER.sub(r".\1", _LOCAL.sub(r"\1", source))
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    line = _last_frame(node)
    if node.name.rstrip("0123456789").rstrip("_") != target or not line:
        return node.name  # Dynamo knows the variable, or nobody does
    assigned = _ASSIGNED.match(linecache.getline(*line))
    last = all(_last_frame(user) != line for user in node.users)
    return assigned.group(1) if assigned and last else node.name


def _last_frame(node: fx.Node) -> tuple[str, int] | None:
    return next(reversed(frames_of(node.meta.get("stack_trace") or "")), None)


def source_of(node: fx.Node | None) -> str:
    """ "file:line" of the user's code a node came from, for the report only."""
    frames = frames_of(node.meta.get("stack_trace") or "") if node is not None else []
    own = [frame for frame in frames if NOTATION.isdisjoint(Path(frame[0]).parts)] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else "unknown"


def first_own_line(graph: fx.Graph) -> str:
    """ "file:line" of the first call that was not written in torch itself, or in this package."""
    own = Path(__file__).parent.parent
    libraries = tuple(f"{folder}{os.sep}" for folder in (own, Path(torch.__file__).parent))
    sources = [source_of(node) for node in graph.nodes]
    return next((source for source in sources if source != "unknown" and not source.startswith(libraries)), "unknown")
