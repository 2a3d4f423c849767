"""What the report says about a tensor and about a place in the user's code."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph.text import frames_of
from kdacompile.patterns.engine.placement import Placement

NOTATION = frozenset({"einops", "opt_einsum"})
"""Libraries of notation: the line that is told is their caller's, as it is for torch's own (vmap)."""

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"

LIFT = "<kdacompile lift"
"""How the file name begins under which the code runs that stands for a function of the user's."""

_LOCAL = re.compile(r"^[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_VIEWS = frozenset(
    "expand unflatten view reshape flatten unsqueeze squeeze permute transpose contiguous to float".split()
)
_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*=[^=]")


def describe(placement: Placement) -> str:
    """The tensor that plays a role: its name, the meaning of its dimensions, their sizes ("any" of what is open), its
    dtype.
    """
    value = compat.example_value(placement.value.node)
    axes = " ".join(placement.axes.replace(".", "1").replace("*", "(HK)"))
    turned = ", last token first" if placement.backwards and "T" in axes else ""
    return f"{name_of(placement.value.node)} [{axes}] {kind_of(value)}{turned}"


def kind_of(value: Any) -> str:
    """A tensor's sizes, "any" of what is open, and dtype."""
    sizes = ", ".join(str(size) if isinstance(size, int) else "any" for size in value.shape)
    return f"[{sizes}] {str(value.dtype).removeprefix('torch.')}"


def name_of(node: fx.Node) -> str:
    """What the model calls a tensor, or what it is a view of: ``q``, ``self.layer.weight``, the variable on its line.
    Else the node's name.
    """
    base, name = node, _own_name(node)
    while name is None and _target_of(base) in _VIEWS and base.all_input_nodes:
        base = base.all_input_nodes[0]
        name = _own_name(base)
    return name or node.name


def _own_name(node: fx.Node) -> str | None:
    source = compat.source_name(node)
    if source:
        return _MEMBER.sub(r".\1", _LOCAL.sub(r"\1", source))
    line = _last_frame(node)
    if line is not None and line[0].startswith(LIFT):
        return None  # its variables are nobody's
    if node.name.rstrip("0123456789").rstrip("_") != _target_of(node):
        return node.name  # Dynamo knows the variable
    assigned = _ASSIGNED.match(linecache.getline(*line)) if line else None
    last = all(_last_frame(user) != line for user in node.users)
    return assigned.group(1) if assigned and last else None


def _target_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _last_frame(node: fx.Node) -> tuple[str, int] | None:
    return next(reversed(frames_of(node.meta.get("stack_trace") or "")), None)


def source_of(node: fx.Node | None) -> str:
    """ "file:line" of the user's code a node came from, for the report only: what runs in the place of a function of
    the user's is nobody's.
    """
    frames = frames_of(node.meta.get("stack_trace") or "") if node is not None else []
    theirs = [frame for frame in frames if not _is_notation(frame[0])]
    own = [frame for frame in theirs if not frame[0].startswith(LIFT)] or theirs or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else "unknown"


def _is_notation(file: str) -> bool:
    return file.startswith(_TORCH) or not NOTATION.isdisjoint(Path(file).parts)


def first_own_line(graph: fx.Graph) -> str:
    """ "file:line" of the first call that was not written in torch itself, or in this package."""
    own = Path(__file__).parent.parent
    libraries = f"{own}{os.sep}", _TORCH
    sources = [source_of(node) for node in graph.nodes]
    return next((source for source in sources if source != "unknown" and not source.startswith(libraries)), "unknown")


# -- loops of the user's code that a region was unrolled from ---------------------------------------------------------

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
    times = Counter((node.meta.get("stack_trace") or "", _target_of(node)) for node in nodes)
    turns = {key: count // _written(*key) if count > 1 else 1 for key, count in times.items()}
    if not turns or statistics.median(turns.values()) < 2:
        return None
    around = Counter(filter(None, (_around(trace) for (trace, _), count in turns.items() if count > 1)))
    return max(around, key=around.__getitem__) if around else None


def at(file: str, line: int) -> Loop | None:
    """The innermost loop around a line."""
    found = [loop for loop in _loops(file, "".join(linecache.getlines(file))) if loop.first <= line <= loop.last]
    return max(found, key=lambda loop: loop.first) if found else None


def _around(trace: str) -> Loop | None:
    """The innermost loop of the innermost frame that stands in one."""
    return next(filter(None, (at(file, line) for file, line in reversed(frames_of(trace)))), None)


def _written(trace: str, target: str) -> int:
    """How often the line where a trace ends names an operator: its trace is the same each time where traces have no
    columns (torch 2.11, Python 3.10).
    """
    frames = frames_of(trace)
    if not frames or not set(trace.rstrip().rpartition("\n")[2]) - set(" ^~"):
        return 1
    file, line = frames[-1]
    return max(1, _words(file, "".join(linecache.getlines(file)))[line, target.strip("_")])


@functools.lru_cache(maxsize=32)
def _words(file: str, text: str) -> Counter[tuple[int, str]]:
    """The operators that the statement of a line names, by the names that they have in a graph."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return Counter()
    found: Counter[tuple[int, str]] = Counter()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt) and not hasattr(statement, "body"):
            words = Counter(filter(None, map(_word, ast.walk(statement))))
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                found.update({(line, word): count for word, count in words.items()})
    return found


_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.MatMult: "matmul",
    ast.Pow: "pow",
    ast.USub: "neg",
    ast.Subscript: "getitem",
}


def _word(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call):
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
        return name and name.strip("_")
    return _SIGNS.get(type(node))


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
