"""What is known of the ops in a captured graph that stand where functions were lifted, for the report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from kdacompile import compat
from kdacompile.capture import hook
from kdacompile.ops.signature import LINEAR_ATTENTION
from kdacompile.report.findings import Match
from kdacompile.report.source import LIFT, kind_of, name_of

_FROM = re.compile(rf"{LIFT} (\w+)>")


def lifted(graph: fx.Graph) -> Iterator[Match]:
    """One match for every op that stands where a lifted function was called."""
    for node in graph.nodes:
        if not compat.is_own_op(node):
            continue
        key = _FROM.search(str(node.meta.get("stack_trace", "")))
        known = hook.lifts.known_by(key.group(1)) if key else None
        if known is not None:
            op = str(node.target).removesuffix(".default").replace(".", "::")
            match = next((match for match in known.matches if match.op == op), known.matches[0])
            absorbed = tuple(dict.fromkeys([*match.absorbed, *node.meta.get(compat.ABSORBED, ())]))
            yield replace(match, op=op, roles=_roles(node), absorbed=absorbed, lifted=known.verdict.function)


def _roles(node: fx.Node) -> dict[str, str]:
    given = zip(LINEAR_ATTENTION.operands, node.args, strict=False)
    return {operand.name: _describe(x) for operand, x in given if isinstance(x, fx.Node)}


def _describe(node: fx.Node) -> str:
    value = compat.example_value(node)
    if not isinstance(value, torch.Tensor):
        return name_of(node)
    return f"{name_of(node)} {kind_of(value)}"
