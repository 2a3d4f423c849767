"""A function or class, with everything of the tests that it needs, as the text of a module of its own."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType, ModuleType
from typing import Any

import torch


class Unusable(Exception):
    """The object cannot be written down: a closure, a lambda, a global that is no literal."""


class _Bare(ast.NodeTransformer):
    """Without annotations and docstrings."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value)), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        return self._body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return self._body(node)

    def _body(self, node: Any) -> Any:
        first = node.body[0]
        if len(node.body) > 1 and isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del node.body[0]
        self.generic_visit(node)
        return node


def _definition(thing: Any) -> ast.stmt:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError, SyntaxError) as error:
        raise Unusable(str(error)) from error
    found = tree.body[0]
    if not isinstance(found, (ast.FunctionDef, ast.ClassDef)):
        raise Unusable(f"{thing!r} is not a def")
    found.decorator_list = []
    return _Bare().visit(found)


def _is_literal(thing: Any) -> bool:
    if isinstance(thing, tuple):
        return all(isinstance(x, (bool, int, float)) for x in thing)
    return isinstance(thing, (bool, int, float, str, torch.dtype))


class _Module:
    """Collects definitions, each after what it needs."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self.begun: set[str] = set()  # functions may need each other

    def add(self, name: str, thing: Any) -> None:
        if name in self.begun:
            return
        self.begun.add(name)
        own = str(getattr(thing, "__module__", "")).startswith("tests.")
        if isinstance(thing, ModuleType):
            self.lines[name] = f"import {thing.__name__} as {name}"
        elif _is_literal(thing):
            self.lines[name] = f"{name} = {thing!r}"
        elif own and isinstance(thing, (FunctionType, type)):
            self._define(name, thing)
        elif own or getattr(thing, "__module__", "builtins") == "builtins" or not hasattr(thing, "__name__"):
            raise Unusable(f"{name} = {thing!r}")
        else:
            self.lines[name] = f"from {thing.__module__} import {thing.__name__} as {name}"

    def _define(self, name: str, thing: Any) -> None:
        if getattr(thing, "__closure__", None) or thing.__name__ != name:
            raise Unusable(f"{name} is a closure or has another name")
        definition = _definition(thing)
        scope = thing.__globals__ if isinstance(thing, FunctionType) else vars(inspect.getmodule(thing))
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and node.id in scope and node.id != name:
                self.add(node.id, scope[node.id])
        self.lines[name] = ast.unparse(definition)


def text_of(thing: Any) -> str:
    """The text of a module that defines ``thing`` under its own name."""
    module = _Module()
    module.add("torch", torch)
    module.add(thing.__name__, thing)
    return "\n".join(module.lines.values()) + "\n"
