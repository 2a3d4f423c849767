"""Loops of the user's code that a region was unrolled from, told by the lines its nodes come from."""

from __future__ import annotations

import ast
import functools
import linecache
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from kdacompile.graph.text import frames_of

_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Loop:
    """A loop of a source file."""

    file: str
    first: int
    last: int
    function: str
    """The function it stands in, with the classes and functions around that."""
    method: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.first}"


def unrolled(nodes: Iterable[fx.Node]) -> Loop | None:
    """The loop that left most lines of these nodes more than once; None if they were written down one by one.

    A line that makes two sums in one turn does not make a loop: most lines must have come more than once.
    """
    times = Counter((node.meta.get("stack_trace") or "", str(node.target)) for node in nodes)
    if not times or statistics.median(times.values()) < 2:
        return None
    around = Counter(filter(None, (_around(trace) for (trace, _), count in times.items() if count > 1)))
    return max(around, key=around.__getitem__) if around else None


def at(file: str, line: int) -> Loop | None:
    """The innermost loop around a line."""
    found = [loop for loop in _loops(file, "".join(linecache.getlines(file))) if loop.first <= line <= loop.last]
    return max(found, key=lambda loop: loop.first) if found else None


def _around(trace: str) -> Loop | None:
    """The innermost loop of the innermost frame that stands in one."""
    return next(filter(None, (at(file, line) for file, line in reversed(frames_of(trace)))), None)


@functools.lru_cache(maxsize=32)
def _loops(file: str, text: str) -> tuple[Loop, ...]:
    try:
        return tuple(_within(ast.parse(text), file, "", method=False))
    except SyntaxError:  # not Python, or of another version
        return ()


def _within(tree: ast.AST, file: str, function: str, *, method: bool) -> Iterator[Loop]:
    for node in ast.iter_child_nodes(tree):
        name, own = function, method
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            own = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        if isinstance(node, _LOOPS):
            yield Loop(file, node.lineno, node.end_lineno or node.lineno, function, method)
        yield from _within(node, file, name, method=own)
