"""Edits of a program's text. Places are found by running it once with every expression watched: what is a tensor, and
of which shape. An edit names a place of the original tree, so that others can be left out without moving it.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.fuzz.bends import BENDS, Shape

_EXPRESSIONS = (ast.Name, ast.Call, ast.BinOp, ast.Subscript, ast.Attribute, ast.UnaryOp)


@dataclass(frozen=True)
class Mutation:
    """``kind`` says which edit, ``site`` the number of its node in the tree, ``text`` what it puts there."""

    kind: str
    site: int
    text: str
    group: str  # what the table counts it as


@dataclass
class Places:
    """Where a text can be edited."""

    tensors: dict[int, Shape]  # expressions that were floating-point tensors
    evaluations: int  # of expressions, in one run
    loops: dict[int, dict[str, Shape]]  # loops, and the tensors they carry
    nodes: dict[int, ast.AST]


def numbered(text: str) -> ast.Module:
    tree = ast.parse(text)
    for number, node in enumerate(ast.walk(tree)):
        node.number = number  # type: ignore[attr-defined]
    return tree


def _number(node: ast.AST) -> int:
    return getattr(node, "number", -1)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


class _Watch(ast.NodeTransformer):
    """Wraps expressions in bodies of functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        node.args = [self.visit(x) for x in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        return self._wrapped(node)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Call):
            return self.visit_Call(node)
        if isinstance(node, ast.FunctionDef):
            return self.visit_FunctionDef(node)
        self.generic_visit(node)
        loads = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        return self._wrapped(node) if isinstance(node, _EXPRESSIONS) and loads else node

    def _wrapped(self, node: Any) -> Any:
        number = ast.Constant(_number(node))
        return ast.copy_location(ast.Call(ast.Name("_seen", ast.Load()), [number, node], []), node)


def watch(tree: ast.Module, run: Callable[[dict[str, Any]], object], scope: dict[str, Any]) -> Places:
    """Where the text can be edited; ``run`` gets the module's names, and calls it."""
    shapes: dict[int, Shape] = {}
    evaluations = 0

    def seen(number: int, value: Any) -> Any:
        nonlocal evaluations
        evaluations += 1
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() and value.numel() > 1:
            shapes[number] = tuple(value.shape)
        return value

    watched = _Watch().visit(copy.deepcopy(tree))
    ast.fix_missing_locations(watched)
    names = {**scope, "_seen": seen}
    exec(compile(watched, "<watched>", "exec"), names)
    run(names)
    nodes = {_number(node): node for function in _functions(tree) for node in ast.walk(function)}
    return Places({n: s for n, s in shapes.items() if n in nodes}, evaluations, _loops(tree, shapes), nodes)


def _loops(tree: ast.Module, shapes: dict[int, Shape]) -> dict[int, dict[str, Shape]]:
    found: dict[int, dict[str, Shape]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.For, ast.While)):
            continue
        inside = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
        stored = {name.id for name in inside if isinstance(name.ctx, ast.Store)}
        carried = {name.id: shapes[_number(name)] for name in inside if name.id in stored and _number(name) in shapes}
        if carried:
            found[_number(node)] = carried
    return found


# -- drawing -----------------------------------------------------------------------------------------------------------

_METHODS = {
    "exp": ("exp2", "expm1"), "tril": ("triu",), "triu": ("tril",), "sum": ("mean",), "cumsum": ("cumprod",),
    "sigmoid": ("tanh",), "softplus": ("relu",), "relu": ("abs",), "stack": ("cat",), "softmax": ("sigmoid",),
}  # fmt: skip
_OPERATORS = {"Add": "Sub", "Sub": "Add", "Mult": "Div", "Div": "Mult", "MatMult": "Mult"}
_COMPARES = {"Lt": "LtE", "LtE": "Lt", "Gt": "GtE", "GtE": "Gt", "Eq": "NotEq", "NotEq": "Eq"}
_STEPS = ("step == 1", "step == 3", "step > 2", "step % 4 == 3", "step // 4 == 2", "step == 20", "step >= 33", "True")


def _bend(rng: random.Random, places: Places) -> Mutation | None:
    if not places.tensors:
        return None
    site = rng.choice(sorted(places.tensors))
    group = rng.choice(list(BENDS))
    return Mutation("bend", site, BENDS[group](rng, places.tensors[site]), group)


def _visit(rng: random.Random, places: Places) -> Mutation | None:
    """Something happens to what a loop carries, at some turn."""
    if not places.loops:
        return None
    site = rng.choice(sorted(places.loops))
    name = rng.choice(sorted(places.loops[site]))
    group = rng.choice(list(BENDS))
    text = rng.choice(("x * 0", "x.detach()", "torch.zeros_like(x)", "x * 0.5", ""))
    text = text or BENDS[group](rng, places.loops[site][name])
    where = rng.choice(("start", "end"))
    return Mutation("visit", site, f"{where}|{name}|{rng.choice(_STEPS)}|{text}", "turn of a loop")


def _replace(rng: random.Random, places: Places) -> Mutation | None:
    """A constant, an operator, a comparison, a name of a method, an operand left out, another tensor of that shape."""
    site = rng.choice(sorted(places.nodes))
    node = places.nodes[site]
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        others = [node.value + 1, node.value - 1, -node.value, node.value * 2]
        others += [node.value * (1 + 1e-9), 1e-10, 0.0] if isinstance(node.value, float) else []
        return Mutation("constant", site, repr(rng.choice(others)), "constant")
    if isinstance(node, ast.BinOp):
        if rng.random() < 0.5:
            return Mutation("drop", site, rng.choice(("left", "right")), "operand left out")
        other = _OPERATORS.get(type(node.op).__name__)
        return Mutation("operator", site, other, "operator") if other else None
    if isinstance(node, ast.Compare) and type(node.ops[0]).__name__ in _COMPARES:
        return Mutation("compare", site, _COMPARES[type(node.ops[0]).__name__], "operator")
    if isinstance(node, ast.Attribute) and node.attr in _METHODS:
        return Mutation("method", site, rng.choice(_METHODS[node.attr]), "operator")
    if isinstance(node, ast.Name) and site in places.tensors:
        like = {
            other.id
            for number, other in places.nodes.items()
            if isinstance(other, ast.Name) and places.tensors.get(number) == places.tensors[site]
        }
        others = sorted(like - {node.id})
        return Mutation("name", site, rng.choice(others), "other tensor") if others else None
    return None


def _statement(rng: random.Random, places: Places) -> Mutation | None:
    sites = [n for n, node in places.nodes.items() if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr))]
    if not sites:
        return None
    return Mutation(rng.choice(("delete", "twice")), rng.choice(sorted(sites)), "", "statement")


_KINDS = ((_bend, 60), (_visit, 12), (_replace, 24), (_statement, 4))


def drawn(rng: random.Random, places: Places, count: int) -> tuple[Mutation, ...]:
    found: list[Mutation] = []
    for _ in range(40 * count):
        (kind,) = rng.choices([kind for kind, _ in _KINDS], [weight for _, weight in _KINDS])
        mutation = kind(rng, places)
        if mutation is not None and all(mutation.site != other.site for other in found):
            found.append(mutation)
        if len(found) == count:
            break
    return tuple(found)


# -- writing -----------------------------------------------------------------------------------------------------------


class _Edit(ast.NodeTransformer):
    def __init__(self, mutations: Sequence[Mutation]) -> None:
        self.of = {mutation.site: (index, mutation) for index, mutation in enumerate(mutations)}
        self.helpers: list[str] = []

    def visit(self, node: ast.AST) -> Any:
        index, mutation = self.of.get(_number(node), (0, None))
        self.generic_visit(node)
        return node if mutation is None else getattr(self, f"_{mutation.kind}")(node, mutation.text, index)

    def _helper(self, text: str, index: int) -> str:
        body = text if "\n" in text else f"return {text}"
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        self.helpers.append(f"def bend_{index}(x):\n{lines}")
        return f"bend_{index}"

    def _bend(self, node: ast.expr, text: str, index: int) -> ast.AST:
        return ast.Call(ast.Name(self._helper(text, index), ast.Load()), [node], [])

    def _visit(self, node: Any, text: str, index: int) -> list[ast.stmt]:
        where, name, condition, bent = text.split("|", 3)
        call = f"{self._helper(bent, index)}({name})"
        count, at = f"step_{index}", condition.replace("step", f"step_{index}")
        what = ast.parse(f"if {at}:\n    {name} = {call}\n{count} += 1").body
        node.body = [*what, *node.body] if where == "start" else [*node.body, *what]
        return [*ast.parse(f"{count} = 0").body, node]

    def _constant(self, node: ast.Constant, text: str, index: int) -> ast.expr:
        return ast.parse(text, mode="eval").body

    def _drop(self, node: ast.BinOp, text: str, index: int) -> ast.expr:
        return getattr(node, text)

    def _operator(self, node: ast.BinOp, text: str, index: int) -> ast.BinOp:
        node.op = getattr(ast, text)()
        return node

    def _compare(self, node: ast.Compare, text: str, index: int) -> ast.Compare:
        node.ops[0] = getattr(ast, text)()
        return node

    def _method(self, node: ast.Attribute, text: str, index: int) -> ast.Attribute:
        node.attr = text
        return node

    def _name(self, node: ast.Name, text: str, index: int) -> ast.Name:
        node.id = text
        return node

    def _delete(self, node: ast.stmt, text: str, index: int) -> ast.stmt:
        return ast.Pass()

    def _twice(self, node: ast.stmt, text: str, index: int) -> list[ast.stmt]:
        return [node, copy.deepcopy(node)]


def edited(text: str, mutations: Sequence[Mutation]) -> str:
    """The text with all of these edits."""
    if not mutations:
        return text
    edit = _Edit(mutations)
    tree = ast.fix_missing_locations(edit.visit(numbered(text)))
    imports = "import math\nimport torch\nimport torch.nn.functional as F\n\n"
    return imports + "\n".join(edit.helpers) + "\n" + ast.unparse(tree) + "\n"
