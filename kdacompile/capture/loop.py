"""A ``forward`` that adds to one tensor for each expert that was hit, and does nothing else: read in its source.

    result = torch.zeros_like(argument)
    hit = mask.sum(..).nonzero()
    for expert in hit:
        result.index_add_(..)
    return result

The result is made once and written in place; nothing else is written, no random number is drawn, and only functions of
torch and activations that the module holds are called. What the loop computes is not read.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any, NamedTuple

import torch

from kdacompile.capture.identity import is_trusted

_WRITES = frozenset("index_add_ add_ scatter_add_ index_put_ index_copy_".split())
"""In-place methods that leave a tensor's size and strides as they are."""
_PROPERTIES = frozenset("dtype device shape".split())
_BUILTINS = frozenset("int bool float range len enumerate min max".split())
_REFUSED = frozenset(
    "data grad _base set_ resize_ resize storage untyped_storage requires_grad rand randn randint rand_like randn_like "
    "randperm normal dropout bernoulli multinomial rrelu manual_seed register_hook backward apply to_ "
    "set_grad_enabled enable_grad inference_mode autocast set_default_dtype".split()
)
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.For, ast.If, ast.Continue, ast.Break, ast.Return, ast.Expr, ast.Pass)
_REFUSED_NODES = (
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield,
    ast.YieldFrom, ast.Starred, ast.Delete, ast.Global, ast.Nonlocal, ast.Try, ast.While,
)  # fmt: skip


class Loop(NamedTuple):
    """What a ``forward`` takes and uses."""

    arguments: tuple[str, ...]
    """Beside ``self``."""
    like: int
    """The place of the argument that the result measures the same as."""
    read: frozenset[str]
    """Attributes of ``self`` that are read, those that are called left out."""
    called: frozenset[str]


def read(forward: Any) -> Loop | None:
    """None for every other function."""
    if not isinstance(forward, types.FunctionType) or "nonzero" not in forward.__code__.co_names:
        return None
    return _read(forward.__code__, forward)


@functools.lru_cache(maxsize=256)
def _read(code: types.CodeType, forward: types.FunctionType) -> Loop | None:
    if hasattr(forward, "__wrapped__") or code.co_freevars or "zeros_like" not in code.co_names:
        return None
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, SyntaxError, ValueError, TypeError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return None
    return _Reading(tree, forward).loop()


class _Reading:
    def __init__(self, tree: ast.FunctionDef, forward: types.FunctionType) -> None:
        self.tree, self.globals = tree, forward.__globals__
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.nodes = [node for statement in tree.body for node in ast.walk(statement)]
        self.stored = [node.id for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self.result = ""

    def loop(self) -> Loop | None:
        given = self.tree.args
        names = [argument.arg for argument in given.args]
        others = given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults
        made = [found for statement in self.tree.body if (found := self.made(statement))]
        if others or not names or names[0] != "self" or len(made) != 1:
            return None
        self.result, like = made[0]
        plain = like in names[1:] and self.stored.count(self.result) == 1 and not set(names) & set(self.stored)
        if not plain or not self.goes_over_hits() or not all(map(self.is_plain, self.nodes)):
            return None
        own = {node for node in self.nodes if isinstance(node, ast.Attribute) and _is_self(node.value)}
        called = {node for node in own if isinstance(call := self.parents[node], ast.Call) and call.func is node}
        read = frozenset(node.attr for node in own - called)
        return Loop(tuple(names[1:]), names.index(like) - 1, read, frozenset(node.attr for node in called))

    def made(self, statement: ast.stmt) -> tuple[str, str] | None:
        """``result = torch.zeros_like(argument)``."""
        match statement:
            case ast.Assign([ast.Name(result)], ast.Call(ast.Attribute() as function, [ast.Name(like)], [])):
                return (result, like) if self.resolved(function) is torch.zeros_like else None
            case _:
                return None

    def goes_over_hits(self) -> bool:
        """A loop over what ``nonzero`` has yielded, and every result that is returned is the one that was made."""
        hits = {
            name
            for node in self.nodes
            if isinstance(node, ast.Assign) and any(_calls_nonzero(part) for part in ast.walk(node.value))
            for name in [target.id for target in node.targets if isinstance(target, ast.Name)]
        }
        loops = [node.iter for node in self.nodes if isinstance(node, ast.For)]
        returned = [node.value for node in self.nodes if isinstance(node, ast.Return)]
        last = isinstance(self.tree.body[-1], ast.Return)
        over = any(isinstance(each, ast.Name) and each.id in hits for each in loops)
        return over and last and all(isinstance(each, ast.Name) and each.id == self.result for each in returned)

    def is_plain(self, node: ast.AST) -> bool:
        if isinstance(node, _REFUSED_NODES) or (isinstance(node, ast.stmt) and not self.is_statement(node)):
            return False
        if isinstance(node, ast.Call):
            return self.is_plain_call(node)
        if isinstance(node, ast.Attribute):
            return isinstance(node.ctx, ast.Load) and node.attr not in _REFUSED
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return isinstance(node.value, ast.Name) and node.value.id == self.result
        if isinstance(node, ast.Name):
            return self.is_plain_name(node)
        return True

    def is_statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.With):  # a context that torch.compile would enter as well
            items = [item.context_expr for item in node.items]
            return all(isinstance(item, ast.Call) and self.resolved(item.func) is torch.no_grad for item in items)
        if isinstance(node, ast.AugAssign):
            return isinstance(node.target, ast.Subscript)
        return isinstance(node, _STATEMENTS)

    def is_plain_name(self, node: ast.Name) -> bool:
        parent = self.parents[node]
        if node.id == self.result and isinstance(node.ctx, ast.Load):
            written = isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load)
            used = isinstance(parent, ast.Attribute) and parent.attr in _WRITES | _PROPERTIES
            return written or used or isinstance(parent, ast.Return)
        if node.id == "self":
            return isinstance(parent, ast.Attribute)
        local = node.id in self.stored or node.id in {argument.arg for argument in self.tree.args.args}
        return local or isinstance(self.globals.get(node.id), types.ModuleType) or node.id in _BUILTINS

    def is_plain_call(self, node: ast.Call) -> bool:
        if any(keyword.arg in (None, "out", "inplace") for keyword in node.keywords):
            return False
        function = node.func
        if isinstance(function, ast.Name):
            return function.id in _BUILTINS and function.id not in self.globals and function.id not in self.stored
        if not isinstance(function, ast.Attribute):
            return False
        if self.is_of_a_module(function):
            found = self.resolved(function)
            inside = is_trusted(str(getattr(found, "__module__", None) or "torch"))
            return found is not None and inside and not _writes(found, node)
        if isinstance(function.value, ast.Name) and function.value.id == self.result:
            return function.attr in _WRITES
        return not function.attr.endswith("_")

    def is_of_a_module(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id not in self.stored and node.id in self.globals

    def resolved(self, node: ast.expr) -> Any:
        """What a dotted name that begins with a global stands for; None if that is no module of torch's."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts, node = [node.attr, *parts], node.value
        found = self.globals.get(node.id) if isinstance(node, ast.Name) else None
        if not isinstance(found, types.ModuleType) or found.__name__.split(".")[0] != "torch":
            return None
        for part in parts:
            found = getattr(found, part, None)
        return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _writes(function: Any, call: ast.Call) -> bool:
    """Whether a function of torch may write one of its arguments, or change the process."""
    name = str(getattr(function, "__name__", "_"))
    try:
        place = list(inspect.signature(function).parameters).index("inplace")
    except (ValueError, TypeError):  # a builtin, which takes no such argument, or one without it
        place = len(call.args)
    return name.endswith("_") or name.startswith(("set_", "use_", "manual_", "save", "load")) or len(call.args) > place


def _calls_nonzero(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "nonzero"
