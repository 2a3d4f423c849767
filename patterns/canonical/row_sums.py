"""Scores that are divided by their own row sums: the sums as one more column of what the scores are multiplied with.

    A = mask(q k^T);  o = (A / f(A.sum(-1, keepdim=True))) v
    becomes    [n | s] = A [v | 1];  o = n / f(s)

A factor per row commutes with a product from the right, and a row sum is a product with ones. Written like this, the
scores are read by one product only, and that is linear attention with one more value column. Whatever the scores and
``f`` are, both texts are the same function; they are compared on small random tensors all the same.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Value
from kdacompile.patterns.canonical.proof import RUN_ERRORS, TOLERANCE
from kdacompile.patterns.canonical.rules import name_of

PRODUCTS = frozenset("matmul bmm".split())
FACTORS = frozenset("div truediv mul".split())


@dataclass(frozen=True)
class Subscripts:
    """Dimensions of a product: of the scores (the summed one last), of the values, of the result."""

    scores: str
    values: str
    result: str

    @property
    def column(self) -> str:
        """The dimension that the scores do not have."""
        return next(letter for letter in self.values if letter not in self.scores)


@dataclass(frozen=True)
class Site:
    """A product of scores, the factors per row that stand between (the one applied last first), and the row sums."""

    product: fx.Node
    subscripts: Subscripts
    scores: fx.Node
    values: fx.Node
    factors: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]

    def touched(self) -> set[fx.Node]:
        """What must not be written to: it is read elsewhere afterwards."""
        read = {arg for factor in self.factors for arg in factor.all_input_nodes}
        return {self.product, self.scores, self.values, *self.sums, *read}


def _site(node: fx.Node) -> Site | None:
    found = _product(node)
    if found is None:
        return None
    scores, values, subscripts = found
    if not all(isinstance(compat.example_value(each), Tensor) for each in (scores, values, node)):
        return None
    factors: list[fx.Node] = []
    while _is_factor(scores):
        factors.append(scores)
        scores = scores.all_input_nodes[0]
    sums = tuple(user for user in scores.users if _is_row_sum(user, scores))
    dtypes = {compat.example_value(each).dtype for each in (scores, values, node, *sums, *factors)}
    width = compat.example_value(values).shape[subscripts.values.index(subscripts.column)]
    if not sums or len(dtypes) > 1 or not isinstance(width, int) or _is_repeated(scores, node, subscripts):
        return None
    if factors and torch.float16 in dtypes:
        return None  # what is not yet normalised may be too large for it
    site = Site(node, subscripts, scores, values, tuple(factors), sums)
    try:
        return site if _holds(site) else None
    except RUN_ERRORS:
        return None


def _is_repeated(scores: fx.Node, product: fx.Node, subscripts: Subscripts) -> bool:
    """True if the values are more batches or heads than the scores: then there would be as many sums."""
    before, after = (compat.example_value(each).shape for each in (scores, product))
    rows = zip(subscripts.scores[:-1], before, strict=False)
    return any(str(size) != str(after[subscripts.result.index(letter)]) for letter, size in rows)


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, Subscripts] | None:
    """Left operand, right operand and dimensions of a product that sums over the last dimension of the left one."""
    name = name_of(node)
    if name in PRODUCTS and len(node.args) == 2 and not node.kwargs:
        left, right = node.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
            return None
        operands = [compat.example_value(each) for each in (left, right)]
        ranks = {each.dim() if isinstance(each, Tensor) else 0 for each in operands}
        if len(ranks) > 1 or min(ranks) < 2:
            return None
        batch = "abcdef"[: min(ranks) - 2]
        return left, right, Subscripts(f"{batch}ij", f"{batch}jv", f"{batch}iv")
    if name != "einsum" or len(node.args) != 3 or not isinstance(node.args[0], str):
        return None
    equation = node.args[0].replace(" ", "")
    if "->" not in equation or "." in equation:
        return None
    read, result = equation.split("->")
    pairs = list(zip(read.split(","), node.all_input_nodes, strict=False))
    if len(pairs) != 2 or any(len(set(subscripts)) < len(subscripts) for subscripts, _ in pairs):
        return None
    for (scores, left), (values, right) in (pairs, pairs[::-1]):
        new = [letter for letter in values if letter not in scores]
        if len(new) == 1 and scores[-1:] in values and sorted(result) == sorted(scores[:-1] + new[0]):
            return left, right, Subscripts(scores, values, result)
    return None


def _is_factor(node: fx.Node) -> bool:
    """``A / r`` or ``A * r`` with one number of ``r`` for each row of ``A``."""
    if name_of(node) not in FACTORS or len(node.args) != 2 or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    whole, factor = (compat.example_value(arg) for arg in node.all_input_nodes)
    tensors = isinstance(factor, Tensor) and isinstance(whole, Tensor) and whole.dim() > 1
    rows = tensors and factor.dim() == whole.dim() and compat.is_one(factor.shape[-1])
    return rows and len(node.users) == 1 and str(compat.example_value(node).shape) == str(whole.shape)


def _is_row_sum(node: fx.Node, scores: fx.Node) -> bool:
    if name_of(node) != "sum" or node.args[0] is not scores or set(node.kwargs) - {"dim", "keepdim"}:
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    return isinstance(dim, int) and dim in (-1, compat.example_value(scores).dim() - 1)


class _OnTensors:
    """Makes calls by making them."""

    def method(self, like: Any, one: Tensor, name: str, *args: object) -> Tensor:
        return getattr(one, name)(*args)

    def call(self, like: fx.Node, *args: object) -> Tensor:
        target: Any = like.target
        return getattr(args[0], target)(*args[1:]) if like.op == "call_method" else target(*args)

    def with_ones(self, values: Tensor, along: int) -> Tensor:
        return torch.cat([values, torch.ones_like(values.narrow(along, 0, 1))], along)


def _with_sums(on: Any, site: Site, scores: Any, values: Any, width: int) -> tuple[Any, Any]:
    """The product with ones beside the values, and its new column, laid out like the scores with one entry a row."""
    subscripts, node = site.subscripts, site.product
    values = on.with_ones(values, subscripts.values.index(subscripts.column))
    left = site.factors[0] if site.factors else site.scores
    whole = on.call(node, *map_arg(node.args, {left: scores, site.values: values}.__getitem__))
    column = on.method(node, whole, "narrow", subscripts.result.index(subscripts.column), width, 1)
    order = [subscripts.result.index(letter) for letter in (*subscripts.scores[:-1], subscripts.column)]
    return whole, on.method(node, column, "permute", *order)


def _result(on: Any, site: Site, whole: Any, factors: list[Any], width: int) -> Any:
    """The product without its new column, with the factors of each row (the one applied last first)."""
    subscripts = site.subscripts
    rows = (*subscripts.scores[:-1], subscripts.column)
    result = on.method(site.product, whole, "narrow", subscripts.result.index(subscripts.column), 0, width)
    for node, factor in reversed(list(zip(site.factors, factors, strict=True))):
        factor = on.method(node, factor, "permute", *(rows.index(letter) for letter in subscripts.result))
        result = on.call(node, result, factor)
    return result


def _holds(site: Site) -> bool:
    """True if both texts agree on small random tensors."""
    subscripts, width = site.subscripts, 4
    sizes = {letter: size for size, letter in enumerate(subscripts.scores, 2)} | {subscripts.column: width}
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: list[int]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    on = _OnTensors()
    with torch.no_grad(), compat.no_fake_modes():
        scores, values = (drawn([sizes[letter] for letter in text]) for text in (subscripts.scores, subscripts.values))
        factors = [drawn([*scores.shape[:-1], 1]).exp() for _ in site.factors]
        whole, column = _with_sums(on, site, scores, values, width)
        have = _result(on, site, whole, factors, width), column
        scaled = scores
        for node, factor in reversed(list(zip(site.factors, factors, strict=True))):
            scaled = on.call(node, scaled, factor)
        left = site.factors[0] if site.factors else site.scores
        want = on.call(site.product, *map_arg(site.product.args, {left: scaled, site.values: values}.__getitem__))
        sums = scores.sum(-1, keepdim=True)
    return all(torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE) for x, y in zip(have, (want, sums), strict=True))


@dataclass(frozen=True)
class _OnValues:
    """Makes calls on values of the functional graph, for a node of the model's."""

    edit: Edit

    def method(self, like: fx.Node, one: Value, name: str, *args: object) -> Value:
        return self.edit.call(name, one, *args, like=like)

    def call(self, like: fx.Node, *args: object) -> Value:
        return self.edit.call(like.target, *args, like=like)

    def with_ones(self, values: Value, along: int) -> Value:
        like = values.node
        ones = self.edit.call(torch.ones_like, self.method(like, values, "narrow", along, 0, 1), like=like)
        return self.edit.call(torch.cat, [values, ones], along, like=like)


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Redefine every product of scores whose rows are summed, and the sums."""
    for site in filter(None, map(_site, graph.nodes)):
        if edit.fixed.isdisjoint(site.touched()) and all(node in edit.values for node in site.touched()):
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, site)


def _rewrite(edit: Edit, site: Site) -> None:
    on, node, value = _OnValues(edit), site.product, edit.values
    if any(value[each] in edit.above(value[site.values]) for each in site.sums):
        return  # the values follow from the sums
    width = compat.example_value(site.values).shape[site.subscripts.values.index(site.subscripts.column)]
    whole, column = _with_sums(on, site, value[site.scores], value[site.values], width)
    factors = [value[_node(factor.args[1])] for factor in site.factors]
    result = _result(on, site, whole, factors, width)
    sums = [column if _keeps(old, site.scores) else on.method(old, column, "squeeze", -1) for old in site.sums]
    for old, new in zip((*site.sums, node), (*sums, result), strict=True):
        edit.redefine(value[old], new)


def _node(arg: Any) -> fx.Node:
    assert isinstance(arg, fx.Node)  # a factor is one of two tensors
    return arg


def _keeps(total: fx.Node, scores: fx.Node) -> bool:
    return compat.example_value(total).dim() == compat.example_value(scores).dim()
