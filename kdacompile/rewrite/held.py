"""Values that a proof holds constant: decay tables and masks that a module owns.

Some models read one decay from several buffers (lightning attention: a causal mask of decays, the decay up to either
end of a block, a slope). Only their values show that they agree. So the region is proven with those values, and because
a buffer may be overwritten at any time, the compiled graph is entered only while they still hold: ``Guarded`` compares
them at every call, whoever wrote them in whatever way (``load_state_dict``, ``.data``, NumPy), and otherwise runs the
graph as Dynamo captured it. Versions and addresses would be cheaper to compare, but miss some of those ways.

The compiler's caches do not see values. A graph that may hold some is therefore rewritten before it reaches the
compiler, not by a pass inside it: what is cached is then the code of the rewritten graph, under that graph's key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from kdacompile import compat
from kdacompile.containment import contain

log = logging.getLogger(__name__)

LARGEST = 1 << 26
"""Elements up to which a tensor's values are looked at."""

Tables = Mapping[fx.Node, Tensor]


def tables(gm: fx.GraphModule, inputs: Sequence[Any]) -> Tables:
    """Inputs of ``gm`` that modules own and whose values a proof may hold: tables, with what their module owns beside
    them. Empty for almost every graph.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        return {}
    owned = {
        node: tensor
        for node, tensor in zip(placeholders, inputs, strict=True)
        if type(tensor) is Tensor and not tensor.requires_grad and tensor.numel() <= LARGEST and _owner(node)
    }
    owners = {_owner(node) for node, tensor in owned.items() if _is_table(tensor)}
    return {node: tensor.clone() for node, tensor in owned.items() if _owner(node) in owners}


def _owner(node: fx.Node) -> str:
    """The module (or the globals) an input of the graph belongs to; "" for arguments of the call."""
    return compat.owner(node)


def _is_table(tensor: Tensor) -> bool:
    """True for masks and for tables of factors: at least two dimensions, entries from 0 to 1 (or a mask of -inf)."""
    if sum(size > 1 for size in tensor.shape) < 2 or tensor.is_complex() or tensor.layout != torch.strided:
        return False
    if tensor.is_floating_point() and tensor.itemsize == 1:  # a quantised weight: torch does not compare those
        return False
    if tensor.dtype == torch.bool:
        return True
    return bool(((tensor >= 0) & (tensor <= 1) | (tensor == -math.inf)).all())


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """``gm`` with a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


@dataclass(frozen=True)
class Held:
    """One input of the graph, and the values it must have."""

    index: int
    name: str
    values: Tensor


class Guarded:
    """Compiled code that is right for certain values of some inputs, and the captured graph for all others."""

    def __init__(self, compiled: Callable[..., Any], plain: fx.GraphModule, held: Iterable[Held]) -> None:
        self.compiled = compiled
        self.plain = plain
        self.held = list(held)
        self.warned = False

    def __call__(self, *args: Any) -> Any:
        if contain("comparing tables", lambda: self.holds(args), lambda _: False):
            return self.compiled(*args)
        if not self.warned:
            self.warned = True
            names = ", ".join(item.name for item in self.held)
            log.warning(
                "tensors among %s have changed since they were compiled for; this graph now runs without fused "
                "kernels (torch._dynamo.reset() compiles it anew)",
                names,
            )
        return self.plain(*args)

    def holds(self, args: Sequence[Any]) -> bool:
        """True if every held input has its values; one wait per device, and none while a CUDA graph is recorded."""
        pending: list[Tensor] = []
        for item in self.held:
            given = args[item.index]
            if type(given) is not Tensor or given.device != item.values.device or given.shape != item.values.shape:
                return False
            if given.device.type == "cpu":
                if not torch.equal(given, item.values):
                    return False
            else:
                pending.append((given == item.values).all())
        if not pending:
            return True
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        return bool(torch.stack(pending).all())


def guarded(compiled: Callable[..., Any], plain: fx.GraphModule, values: Tables) -> Callable[..., Any]:
    """``compiled`` for as long as these inputs have these values; ``plain`` is the graph as it was captured."""
    if not values:
        return compiled
    known = {node.name: tensor for node, tensor in values.items()}
    names = [node.name for node in plain.graph.nodes if node.op == "placeholder"]
    return Guarded(compiled, plain, [Held(i, name, known[name]) for i, name in enumerate(names) if name in known])
