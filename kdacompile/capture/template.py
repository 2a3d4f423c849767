"""The rewritten function as text: one graph for every batch and length, from the graphs captured at a few.

The graphs must be the same up to whole numbers, and each number must be one simple function of the batch B and the
tokens T: a constant, a multiple of B, of T or of B T, or T plus a constant. Strides of results may have gaps besides,
of a fixed size or up to whole chunks, and be others within one chunk. What does not fit has the length burnt in, so the
function is not lifted.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import fx

from kdacompile.capture.calls import Call, Sizes
from kdacompile.capture.draft import Captured, Layout, aliased
from kdacompile.capture.errors import Unliftable
from kdacompile.capture.verify import LARGEST_CHUNK
from kdacompile.compat.operators import declaration, is_operator, operator_name, overload_name, tree_leaves

NAME = "replacement"

_FUNCTIONS: dict[Callable[..., Any], str] = {
    operator.getitem: "operator.getitem",
    operator.add: "operator.add",
    operator.mul: "operator.mul",
    torch.tensor: "torch.tensor",
    torch.nn.functional.pad: "torch.nn.functional.pad",
}
_PLAIN = (torch.dtype, torch.memory_format, torch.layout)
_Found = tuple[Sizes, Layout]


def write(
    captured: Sequence[Captured],
    call: Call,
    numbers: Set[int],
    modulus: int | None = None,
    seen: Iterable[Captured] = (),
    dtypes: Sequence[torch.dtype | None] = (),
) -> str:
    """Python source of ``replacement(*tensors)``; raises ``Unliftable`` if the graphs are not one function.

    ``numbers``: what the function may take for a chunk. ``modulus``: it takes only lengths divisible by that. ``seen``:
    the function at other sizes, where its graph need not be the same: whole chunks show no gap behind the last token.
    ``dtypes``: those of the results, where they are others than in the graphs.
    """
    graphs, sizes = [each.graph for each in captured], [each.sizes for each in captured]
    live = [[node for node in graph.nodes if node.op != "placeholder"] for graph in graphs]
    inputs = [[node for node in graph.nodes if node.op == "placeholder"] for graph in graphs]
    if len({len(nodes) for nodes in live}) != 1:
        raise Unliftable("what is left of it differs with the length")
    writer = _Writer(sizes, call, numbers)
    for index, row in enumerate(zip(*inputs, strict=True)):
        writer.name(row, f"x{index}")
    *rows, results = zip(*live, strict=True)
    body = [writer.line(row) for row in rows]
    body += writer.casts(results, dtypes)
    body += writer.layouts(results, [*captured, *(each for each in seen if each not in captured)])
    body.append(writer.line(results))
    check = [f"assert T % {modulus} == 0"] if modulus else []
    head = f"def {NAME}({', '.join(f'x{index}' for index in range(len(inputs[0])))}):"
    code = [*check, *body]
    names = set(re.findall(r"\w+", " ".join(code)))
    sizes_read = [line for axis, line in writer.sizes_from_arguments().items() if axis in names]
    return "\n    ".join([head, *sizes_read, *code]) + "\n"


class _Writer:
    """Text of a function from rows of nodes: one node of each length, which must say the same but for its sizes."""

    def __init__(self, sizes: Sequence[Sizes], call: Call, numbers: Set[int]) -> None:
        self.sizes = sizes
        self.call = call
        self.chunks = sorted((number for number in numbers if 1 < number <= LARGEST_CHUNK), reverse=True)
        self.names: dict[fx.Node, str] = {}
        self.lines = 0

    def name(self, row: Sequence[fx.Node], name: str) -> None:
        self.names.update(dict.fromkeys(row, name))

    def sizes_from_arguments(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for index, (_, tensor) in enumerate(self.call.tensors()):
            for dim, axis in enumerate(tensor.dims):
                if isinstance(axis, str):
                    found.setdefault(axis, f"{axis} = x{index}.size({dim})")
        return found

    def line(self, row: Sequence[fx.Node]) -> str:
        first = row[0]
        if any(node.op != first.op or node.target != first.target for node in row):
            raise Unliftable("what is left of it differs with the length")
        if first.op == "output":
            return f"return {self.value([node.args[0] for node in row])}"
        args = self.values([node.args for node in row])
        if any(list(node.kwargs) != list(first.kwargs) for node in row):
            raise Unliftable("what is left of it differs with the length")
        kwargs = [f"{key}={self.value([node.kwargs[key] for node in row])}" for key in first.kwargs]
        self.lines += 1
        self.name(row, f"v{self.lines}")
        return f"{self.names[first]} = {self.callee(first, args, kwargs)}"

    def casts(self, results: Sequence[fx.Node], dtypes: Sequence[torch.dtype | None]) -> Iterator[str]:
        """Give results the dtypes that they have under autocast; what is an input stays the input."""
        for row, dtype in zip(zip(*(tree_leaves(node.args[0]) for node in results), strict=True), dtypes, strict=False):
            if dtype is None or not isinstance(row[0], fx.Node) or _of_input(row[0]):
                continue
            self.lines += 1
            yield f"v{self.lines} = {self.names[row[0]]}.to({dtype})"
            self.name(row, f"v{self.lines}")

    def layouts(self, results: Sequence[fx.Node], known: Sequence[Captured]) -> Iterator[str]:
        """Lay results out in memory as the function does: its caller may take views that need it."""
        leaves = zip(*(tree_leaves(node.args[0]) for node in results), strict=True)
        if len({len(each.layouts) for each in known}) != 1:
            raise Unliftable("how many results it has differs with the length")
        for row, found in zip(leaves, zip(*(each.layouts for each in known), strict=True), strict=True):
            layouts = [(each.sizes, layout) for each, layout in zip(known, found, strict=True) if layout is not None]
            if not layouts or _of_input(row[0]) or (made := self.laid_out(self.names[row[0]], layouts)) is None:
                continue
            self.lines += 1
            self.name(row, f"v{self.lines}")
            yield f"v{self.lines} = {made}"

    def laid_out(self, name: str, found: Sequence[_Found]) -> str | None:
        """``name`` in memory as at these sizes, within one chunk otherwise; None where that follows from no size."""
        made = self.laid_out_alike(name, found)
        for chunk in self.chunks if made is None else ():
            parts = ([pair for pair in found if (pair[0]["T"] > chunk) == longer] for longer in (True, False))
            texts = [self.laid_out_alike(name, part) if part else None for part in parts]
            if None not in texts:
                return f"{texts[0]} if T > {chunk} else {texts[1]}"
        return made

    def laid_out_alike(self, name: str, found: Sequence[_Found]) -> str | None:
        sizes, layouts = zip(*found, strict=True)
        first, order = layouts[0], layouts[0].order
        if len(order) < len(first.shape) or not order or first.strides[order[-1]] != 1:
            return None
        if any(layout.order != order for layout in layouts):
            return None
        extents: dict[int, str] = {}
        """What dimensions were cut from, where that is more than they are, from the innermost on."""
        apart = [dim for dim in order if any(layout.shape[dim] > 1 for layout in layouts)]  # others have any stride
        for outer, dim in reversed(list(itertools.pairwise(apart))):
            row = [layout.strides[outer] / layout.strides[dim] for layout in layouts]
            least = [layout.shape[dim] for layout in layouts]
            if row != least:
                text = self.extent(row, sizes)
                if text is None or any(map(operator.lt, row, least)):  # entries share memory
                    return None
                extents[dim] = text
        text = name if list(order) == sorted(order) else f"{name}.permute({order})"
        text = f"{text}.contiguous()"
        if extents:
            more = [f"0, {extents[dim]} - {name}.size({dim})" if dim in extents else "0, 0" for dim in reversed(order)]
            text = f"torch.nn.functional.pad({text}, ({', '.join(more)},))"
            text += "".join(f".narrow({order.index(dim)}, 0, {name}.size({dim}))" for dim in extents)
        return text if list(order) == sorted(order) else f"{text}.permute({_inverse(order)})"

    def extent(self, row: Sequence[float], sizes: Sequence[Sizes]) -> str | None:
        """What a dimension was cut from."""
        whole = list(map(int, row))
        if whole != row:
            return None
        for chunk in self.chunks:
            if whole == [-(-at["T"] // chunk) * chunk for at in sizes]:
                return f"((T + {chunk - 1}) // {chunk} * {chunk})"
        text = _constant(whole, sizes) or _offset(whole, sizes)
        return None if text is None else f"({text})"

    def callee(self, node: fx.Node, args: list[str], kwargs: list[str]) -> str:
        if node.op == "call_method":
            if str(node.target).endswith("_"):
                raise Unliftable("it writes its arguments")
            return f"{args[0]}.{node.target}({', '.join([*args[1:], *kwargs])})"
        if node.op != "call_function":
            raise Unliftable("it holds tensors of its own")
        target: Any = node.target
        if is_operator(target):
            if declaration(target).is_mutable:
                raise Unliftable("it writes its arguments")
            if torch.Tag.nondeterministic_seeded in target.tags:
                raise Unliftable("it draws random numbers")
            name = f"torch.ops.{operator_name(target).replace('::', '.')}.{overload_name(target)}"
        elif target in _FUNCTIONS:
            name = _FUNCTIONS[target]
        else:
            raise Unliftable(f"what is left of it calls {target}")
        return f"{name}({', '.join([*args, *kwargs])})"

    def values(self, columns: Sequence[Sequence[Any]]) -> list[str]:
        if len({len(column) for column in columns}) != 1:
            raise Unliftable("what is left of it differs with the length")
        return [self.value(list(row)) for row in zip(*columns, strict=True)]

    def value(self, row: list[Any]) -> str:
        first = row[0]
        if any(type(item) is not type(first) for item in row):
            raise Unliftable("what is left of it differs with the length")
        if isinstance(first, fx.Node):
            names = {self.names[item] for item in row}
            if len(names) != 1:
                raise Unliftable("what is left of it differs with the length")
            return names.pop()
        if isinstance(first, (list, tuple)):
            items = self.values(row)
            return f"[{', '.join(items)}]" if isinstance(first, list) else f"({''.join(f'{item}, ' for item in items)})"
        if isinstance(first, int) and not isinstance(first, bool):
            return self.number(row)
        if any(item != first for item in row):
            raise Unliftable("a number in it differs with the length")
        return _literal(first)

    def number(self, row: Sequence[int]) -> str:
        for form in _FORMS:
            text = form(row, self.sizes)
            if text is not None:
                return text
        raise Unliftable(f"a size in it does not follow from batch and length: {list(row)}")


def _of_input(node: fx.Node) -> bool:
    """True if the node is an input of the graph or shares its memory."""
    source = aliased(node)
    return node.op == "placeholder" if source is None else _of_input(source)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _literal(item: Any) -> str:
    if isinstance(item, float):
        return repr(item) if item == item and abs(item) != float("inf") else f'float("{item}")'
    if isinstance(item, (bool, str)) or item is None:
        return repr(item)
    if isinstance(item, _PLAIN):
        return str(item)
    if isinstance(item, torch.device):
        return "x0.device"
    raise Unliftable(f"what is left of it holds a {type(item).__name__}")


def _constant(row: Sequence[int], sizes: Sequence[Sizes]) -> str | None:
    return str(row[0]) if len(set(row)) == 1 else None


def _multiple(*axes: str) -> Callable[[Sequence[int], Sequence[Sizes]], str | None]:
    def form(row: Sequence[int], sizes: Sequence[Sizes]) -> str | None:
        product = [1] * len(row)
        for axis in axes:
            product = [have * at.get(axis, 1) for have, at in zip(product, sizes, strict=True)]
        factor, rest = divmod(row[0], product[0])
        if rest or any(have * factor != want for have, want in zip(product, row, strict=True)):
            return None
        return " * ".join([*axes, *([str(factor)] if factor != 1 else [])])

    return form


def _offset(row: Sequence[int], sizes: Sequence[Sizes]) -> str | None:
    steps = {want - at["T"] for want, at in zip(row, sizes, strict=True)}
    return f"T + {steps.pop()}" if len(steps) == 1 else None


_FORMS = (_constant, _multiple("T"), _multiple("B"), _multiple("B", "T"), _offset)
