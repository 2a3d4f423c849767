"""Structured trace artifacts: with ``TORCH_TRACE`` set, tlparse shows what the pass saw and what it made of it.

Nothing here costs anything unless a trace is being written: torch calls the payload functions only then.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from kdacompile import compat
from kdacompile.graph.ir import Graph
from kdacompile.patterns.mla.definition import MlaCandidate
from kdacompile.patterns.recurrence.candidates import Candidate


def before(gm: fx.GraphModule) -> None:
    """The Dynamo graph as it came in."""
    _artifact("before", lambda: _readable(gm))


def after(gm: fx.GraphModule) -> None:
    """The Dynamo graph with the ops in it."""
    _artifact("after", lambda: _readable(gm))


def functional(graph: Graph) -> None:
    """The functional copy that regions are found in."""
    _artifact(
        "functional", lambda: "\n".join([f"inputs: {graph.inputs}", *map(repr, graph.ops), f"outputs: {graph.outputs}"])
    )


def candidate(found: Candidate | MlaCandidate, verdict: str) -> None:
    """A region that was put to the proof, and what came of it."""

    def text() -> str:
        ops = sorted(found.ops, key=lambda op: op.outs[0].index)
        ends = [f"inputs: {found.cut}", f"outputs: {found.outputs}"]
        return "\n".join([*ends, f"verdict: {verdict}", *map(repr, ops)])

    _artifact("candidate", text)


def _readable(gm: fx.GraphModule) -> str:
    return gm.print_readable(print_output=False)


def _artifact(name: str, text: Callable[[], str]) -> None:
    compat.trace_artifact(f"kdacompile_{name}", text)
