"""Operators that a run on example values came to, as nodes of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kdacompile.compat.local import Recorded

Put = Callable[[Any, tuple[Any, ...], dict[str, Any], fx.Node, Any], fx.Node]
"""Puts a call into a graph: the operator, its arguments, the node that came to it, and what it yielded in the run."""


class Nodes:
    """The nodes that yield what a run has read and computed, by the ids of tensors, which the run keeps."""

    def __init__(self, put: Put, number: Callable[[torch.SymInt], fx.Node]) -> None:
        self.put, self.number = put, number
        self.made: dict[int, fx.Node] = {}

    def name(self, value: Any, node: fx.Node, like: fx.Node) -> None:
        """Remember what yields a tensor, or each of several; ``like``: the node that stood for it."""
        if isinstance(value, torch.Tensor):
            self.made[id(value)] = node
        elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            for index, item in enumerate(value):
                self.name(item, self.put(operator.getitem, (node, index), {}, like, item), like)

    def write(self, call: Recorded, like: fx.Node) -> None:
        """The node of one operator, which ``like`` came to; KeyError where it reads what no node is known to yield."""
        kwargs = {name: self.given(item) for name, item in call.kwargs.items()}
        node = self.put(call.target, tuple(map(self.given, call.args)), kwargs, like, call.result)
        self.name(call.result, node, like)

    def given(self, item: Any) -> Any:
        """An argument of an operator, tensors and open sizes by the nodes that yield them."""
        if isinstance(item, torch.Tensor):
            return self.made[id(item)]
        if isinstance(item, torch.SymInt):
            return self.number(item)
        return type(item)(map(self.given, item)) if type(item) in (list, tuple) else item
