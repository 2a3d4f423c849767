"""A graph at each stage as text, for tlparse, for ``TORCH_LOGS="+kdacompile"`` and for ``explain(..., stages=True)``.

``dynamo`` is the graph as it came in, ``functional`` its functional copy, ``canonical`` that after a rule, ``match`` a
region that was put to the proof with what came of it, ``rewritten`` the Dynamo graph with the ops in it. Text is made
only while somebody asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import fx

from kdacompile import compat
from kdacompile.graph import text
from kdacompile.graph.ir import Graph
from kdacompile.patterns.engine.match import Candidate
from kdacompile.report.findings import Stage

log = logging.getLogger(__name__)

_kept: ContextVar[list[Stage] | None] = ContextVar("kdacompile_stages", default=None)


@contextmanager
def keeping(stages: list[Stage]) -> Generator[None]:
    """Every stage of this block is added to ``stages``."""
    token = _kept.set(stages)
    try:
        yield
    finally:
        _kept.reset(token)


def stage(name: str, graph: Graph | fx.Graph) -> None:
    """A graph at the stage of this name."""
    _stage(name, lambda: text.to_text(graph) if isinstance(graph, Graph) else text.dynamo_text(graph))


def match(found: Candidate[Any], verdict: str) -> None:
    """A region that was put to the proof, and what came of it."""
    _stage("match", lambda: f"{verdict}\n{text.region_text(found.ops, found.cut, found.outputs)}")


def _stage(name: str, made: Callable[[], str]) -> None:
    compat.trace_artifact(f"kdacompile_{name}", made)
    kept = _kept.get()
    if kept is not None:
        kept.append(Stage(name, made()))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", name, made())
