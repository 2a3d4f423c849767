"""Graphs as text, one operator a line: what the goldens, ``TORCH_LOGS="+kdacompile"`` and tlparse show.

%3[2,64,4,32]:bf16 = aten.mul(%1, %2)  # model.py:17      of the functional graph
q_1[2,64,4,32]:bf16 = torch.mul(q, 0.5)  # model.py:17    of the Dynamo graph
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat.operators import is_operator, operator_name
from kdacompile.graph.ir import Graph, Op, Value

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LITERAL = 8
"""Entries of a list, a tensor's data say, that are written out."""


def to_text(graph: Graph) -> str:
    """A functional graph: its inputs, its operators in order, what it returns and what it overwrites."""
    read = [value for value in graph.inputs if value.users or value in graph.outputs]
    lines = [f"input {typed(value)}{_named(value)}" for value in read]
    lines += map(op_text, graph.ops)
    lines += [f"write {value_name(value)} -> {node.name}" for value, (node, _) in graph.written.items()]
    returned = sorted(graph.outputs, key=lambda value: value.index)
    return "\n".join([*lines, f"return {', '.join(map(value_name, returned))}", ""])


def region_text(ops: Iterable[Op], inputs: Iterable[Value], outputs: Iterable[Value]) -> str:
    """A part of a functional graph, under the names it has there."""
    lines = [f"input {typed(value)}{_named(value)}" for value in inputs]
    lines += [op_text(op) for op in sorted(ops, key=lambda op: op.outs[0].index)]
    return "\n".join([*lines, f"return {', '.join(map(value_name, outputs))}", ""])


def op_text(op: Op) -> str:
    """One operator, with the line of the user's code that it comes from."""
    sized = [arg for arg in op.args[:1] if isinstance(arg, Value) and arg not in op.reads]  # read for its sizes only
    given = [_type(arg.shape, arg.dtype) for arg in sized] + [_argument(arg) for arg in op.args[len(sized) :]]
    given += [f"{key}={_argument(arg)}" for key, arg in op.kwargs.items() if key != "device"]
    name = operator_name(op.target).replace("::", ".")
    return f"{', '.join(map(typed, op.outs))} = {name}({', '.join(given)}){_comment(op.node)}"


def value_name(value: Value) -> str:
    return f"%{value.index}"


def typed(value: Value) -> str:
    return f"%{value.index}{_type(value.shape, value.dtype)}"


def dynamo_text(graph: fx.Graph) -> str:
    """A Dynamo graph, one call a line. Sizes are those it was captured with, open ones by their symbols."""
    return "\n".join(filter(None, map(_call_text, graph.nodes))) + "\n"


def _call_text(node: fx.Node) -> str:
    name = node.name + _types(compat.example_value(node))
    if node.op in ("placeholder", "get_attr"):
        return f"input {name}" if node.users else ""
    given = [_argument(arg) for arg in node.args]
    given += [f"{key}={_argument(arg)}" for key, arg in node.kwargs.items() if key != "device"]
    if node.op == "output":
        return f"return {', '.join(given)}"
    if node.op == "call_method":
        return f"{name} = {given[0]}.{node.target}({', '.join(given[1:])}){_comment(node)}"
    return f"{name} = {_function(node.target)}({', '.join(given)}){_comment(node)}"


def _function(target: Any) -> str:
    if is_operator(target):
        return operator_name(target).replace("::", ".")
    module = str(getattr(target, "__module__", "") or "torch")
    return f"{module.split('.')[0].removeprefix('_')}.{getattr(target, '__name__', target)}"


def _types(example: Any) -> str:
    if isinstance(example, (list, tuple)) and not isinstance(example, torch.Size):
        return f"({', '.join(_types(item) for item in example)})"
    return _type(example.shape, example.dtype) if isinstance(example, torch.Tensor) else ""


def _type(shape: Iterable[Any], dtype: torch.dtype) -> str:
    short = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f").replace("int", "i")
    return f"[{','.join(map(str, shape))}]:{short}"


def _argument(arg: Any) -> str:
    if isinstance(arg, Value):
        return value_name(arg)
    if isinstance(arg, fx.Node):
        return arg.name
    if arg is Ellipsis:
        return "..."
    if isinstance(arg, (list, tuple)):
        items = [_argument(item) for item in arg[:_LITERAL]] + ["..."] * (len(arg) > _LITERAL)
        return f"[{', '.join(items)}]"
    if isinstance(arg, slice):
        bounds = (arg.start, arg.stop) if arg.step is None else (arg.start, arg.stop, arg.step)
        return ":".join("" if each is None else _argument(each) for each in bounds)
    return f"{arg:.9g}" if isinstance(arg, float) else str(arg).removeprefix("torch.")


def _named(value: Value) -> str:
    if value.node is not None:
        return f"  {value.node.name}"
    return "  constant" if value.const else ""


def frames_of(trace: str) -> list[tuple[str, int]]:
    """(file, line) of each frame of a node's stack trace, the outermost first."""
    return [(file, int(line)) for file, line in _FRAME.findall(trace)]


def _comment(node: Any) -> str:
    frames = frames_of(node.meta.get("stack_trace") or "") if isinstance(node, fx.Node) else []
    return f"  # {os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""
