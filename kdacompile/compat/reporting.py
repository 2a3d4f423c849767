"""What torch tells its users: the errors it hands through, graph breaks, traces; and how far Dynamo may go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo import config, exc
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.utils import counters

__all__ = [
    "CONTROL_FLOW",
    "DEVICE_ERRORS",
    "ShortenTraceback",
    "dynamo_settings",
    "graph_break_behind",
    "graph_breaks",
    "trace_artifact",
]

CONTROL_FLOW: tuple[type[Exception], ...] = tuple(
    getattr(exc, name)
    for name in (
        "RestartAnalysis",
        "SkipFrame",
        "SkipCodeRecursiveException",
        "RecompileLimitExceeded",
        "FailOnRecompileLimitHit",
    )
    if hasattr(exc, name)
)
"""What Dynamo steers itself with: capture anew, leave this frame alone. Not every version has each."""

DEVICE_ERRORS: tuple[type[Exception], ...] = tuple(
    getattr(torch, name) for name in ("AcceleratorError",) if hasattr(torch, name)
)
"""A device has failed: nothing that runs on it afterwards can be trusted."""


def dynamo_settings(changes: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which Dynamo's configuration differs by ``changes``."""
    patchable: Any = config  # its methods are installed at run time
    return patchable.patch(dict(changes))


def graph_breaks() -> dict[str, int]:
    """How often this process broke a graph, by reason."""
    return dict(counters["graph_break"])


def graph_break_behind(gm: torch.fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended a graph that it has captured, and where ("file:line"); None where the function ended with it."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    return reason.reason, f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Write an artifact for tlparse, if anyone is tracing."""
    torch._logging.trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )
