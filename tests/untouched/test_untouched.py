"""The pass leaves programs without linear attention as they are: what reaches Inductor is the graph that Dynamo made.

What Inductor makes of it is compared bit for bit by ``python -m tests.untouched``, and for a sample of programs in
``tests/backend/test_everything_else.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdacompile.search import compiler_pass
from kdacompile.settings import Settings
from tests.compare import tensors
from tests.untouched.networks import NETWORKS, Compile
from tests.untouched.operators import OPERATORS


def checking(graphs: list[str]) -> Compile:
    """Compiles with a backend that runs the pass and asserts that it changed nothing."""

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nodes, code = list(gm.graph.nodes), gm.print_readable(print_output=False)
        report = compiler_pass.run(gm, Settings())
        assert not report.matches
        assert list(gm.graph.nodes) == nodes
        assert gm.print_readable(print_output=False) == code
        graphs.append(code)
        return gm.forward

    return lambda fn: torch.compile(fn, backend=backend)


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name: str) -> None:
    torch._dynamo.reset()
    graphs: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        fn, arguments = OPERATORS[name](dtype)
        checking(graphs)(fn)(*arguments)
    assert 1 <= len(graphs) <= 2  # integers and booleans have one dtype


@pytest.mark.parametrize("name", NETWORKS)
def test_network(name: str) -> None:
    if name.startswith("qwen2"):
        pytest.importorskip("transformers")
    torch._dynamo.reset()
    graphs: list[str] = []
    run = NETWORKS[name]
    ours = run(checking(graphs))
    theirs = run(lambda fn: fn)
    assert graphs
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(tensors(ours), tensors(theirs), strict=True))
