"""What is known of the ops in a captured graph that stand where functions were lifted, for the report."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from kdacompile import compat
from kdacompile.capture import hook
from kdacompile.capture.lifting import Lifted
from kdacompile.ops.signature import LINEAR_ATTENTION
from kdacompile.report.findings import Match
from kdacompile.report.source import LIFT, kind_of, name_of

_FROM = re.compile(rf'{LIFT} (\w+)>"?(?:, line (\d+))?')
_CALL = "torch.ops.kdacompile."


def lifted(graph: fx.Graph) -> Iterator[Match]:
    """One match for every op that stands where a lifted function was called."""
    for node in graph.nodes:
        if not compat.is_own_op(node) or compat.REPORTED in node.meta:  # found in what is left of such a function
            continue
        place = _FROM.search(str(node.meta.get("stack_trace", "")))
        known = hook.lifts.known_by(place.group(1)) if place else None
        if place is not None and known is not None:
            op = str(node.target).removesuffix(".default").replace(".", "::")
            match = _standing_at(known, int(place.group(2) or 0), op)
            absorbed = tuple(dict.fromkeys([*match.absorbed, *node.meta.get(compat.ABSORBED, ())]))
            yield replace(match, op=op, roles=_roles(node), absorbed=absorbed, lifted=known.verdict.function)


def _standing_at(known: Lifted, line: int, op: str) -> Match:
    """What the op in a line of the replacement's text was put there for; what absorbs more stands behind that line."""
    lines = [number for number, text in enumerate(known.verdict.text.splitlines(), 1) if _CALL in text]
    found = bisect_right(lines, line) - 1
    if 0 <= found < len(known.matches):
        return known.matches[found]
    return next((match for match in known.matches if match.op == op), known.matches[0])


def _roles(node: fx.Node) -> dict[str, str]:
    given = zip(LINEAR_ATTENTION.operands, node.args, strict=False)
    return {operand.name: _describe(x) for operand, x in given if isinstance(x, fx.Node)}


def _describe(node: fx.Node) -> str:
    value = compat.example_value(node)
    if not isinstance(value, torch.Tensor):
        return name_of(node)
    return f"{name_of(node)} {kind_of(value)}"
