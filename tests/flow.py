"""The way of a graph through the package: which modules it enters, and how often it goes back up.

    python -m tests.flow [NAME]

One model is compiled and run (``tests/graph/models.py`` has the names). Every call is followed that is handed a graph:
Dynamo's, as a module or without one, or the functional one. A module counts as entered once. A call from one module to
another is a transition upward where the callee belongs to an earlier stage than the caller.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch

STAGES = ("capture", "backend", "search", "graph", "patterns", "rewrite", "ops", "lowering")
"""In the order in which a graph passes through them; ``report``, ``compat`` and the like serve them all."""

GRAPHS = frozenset({"GraphModule", "GraphModuleImpl", "Graph"})
"""Types of what is followed: Dynamo's graph and the functional one."""


class Flow:
    """Modules entered and transitions between them, from the entry to the kernel's launch."""

    def __init__(self) -> None:
        self.entered: dict[str, None] = {}
        self.steps: Counter[tuple[str, str]] = Counter()
        self.stack: list[str] = []
        self.frames: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "return"):
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("kdacompile") or stage_of(module) is None or "<" in frame.f_code.co_name:
            return
        if event == "return":
            if self.frames and self.frames[-1] is frame:
                self.frames.pop()
                self.stack.pop()
            return
        code = frame.f_code
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if not any(type(each).__name__ in GRAPHS for each in given):
            return
        self.frames.append(frame)
        if self.stack and self.stack[-1] != module:
            self.steps[self.stack[-1], module] += 1
        self.entered[module] = None
        self.stack.append(module)

    @property
    def upward(self) -> dict[tuple[str, str], int]:
        """Pairs of modules between which a call goes back to an earlier stage."""
        return {pair: count for pair, count in self.steps.items() if _place(pair[0]) > _place(pair[1])}


def stage_of(module: str) -> str | None:
    """The stage a module belongs to; None for what serves all of them."""
    part = module.split(".")[1] if "." in module else ""
    return part if part in STAGES else None


def _place(module: str) -> int:
    return STAGES.index(stage_of(module) or STAGES[0])


def follow(name: str) -> Flow:
    """Compile and run one model, and follow it."""
    from tests.graph.models import MODELS

    importlib.import_module("kdacompile.backend")  # its own import is not part of the way

    fn, inputs, _ = MODELS[name]
    torch._dynamo.reset()
    run = torch.compile(fn, backend="kda", options={"kda.inner": "eager", "kda.lift": False})
    flow = Flow()
    sys.setprofile(flow)
    try:
        run(*inputs())
    finally:
        sys.setprofile(None)
    return flow


def main() -> None:
    flow = follow(sys.argv[1] if len(sys.argv) > 1 else "delta_rule_loop")
    for module in flow.entered:
        print(f"  {module}")
    print(f"{len(flow.entered)} modules entered")
    for (caller, callee), count in flow.upward.items():
        print(f"  {caller} -> {callee}: {count}")
    print(f"{len(flow.upward)} transitions upward, {sum(flow.upward.values())} calls")


if __name__ == "__main__":
    main()
