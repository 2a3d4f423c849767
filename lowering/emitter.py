"""From the ops of a program to text: the one walk over ops, whatever is emitted.

How an op reads is found in two places. Where a target has its own way with an op there is a rule, a method named after
it (``on_load``, ``on_dot``); every other op is a row of the target's dialect (``dialects.py``), over its operands as
the target writes them.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, ClassVar

from .dialects import TORCH, TRITON, Dialect
from .ir import Op, Program, Value


class Lines(list[str]):
    """Source lines; new ones are added at the current indentation."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def add(self, line: str) -> None:
        self.append("    " * self._depth + line)

    @contextmanager
    def indented(self) -> Generator[None, None, None]:
        self._depth += 1
        yield
        self._depth -= 1

    def open(self) -> None:
        """Indent what follows, to the end of the text."""
        self._depth += 1

    def text(self) -> str:
        return "\n".join(self) + "\n"


class Emitter:
    """Ops of a program as lines."""

    dialect: ClassVar[Dialect] = TRITON

    def __init__(self, program: Program, lines: Lines | None = None) -> None:
        self.program = program
        self.lines = Lines() if lines is None else lines

    def emit(self, ops: Iterable[Op]) -> None:
        for op in ops:
            text = self.expression(op)
            if text:
                self.define(op.result, text)

    def expression(self, op: Op) -> str:
        """An op as an expression; "" where its rule has written all there is to write."""
        rule: Callable[[Op], str] = getattr(self, f"on_{op.kind.value}", self.plain)
        return rule(op)

    def plain(self, op: Op) -> str:
        """The expression of an op by the dialect alone."""
        return self.dialect.text(op, self.operands(op))

    def operands(self, op: Op) -> list[str]:
        return [self.operand(value, op) for value in op.inputs]

    def operand(self, value: Value, op: Op) -> str:
        """A value as ``op`` reads it."""
        return self.name(value)

    def name(self, value: Value) -> str:
        return value.name

    def define(self, value: Value, text: str) -> None:
        self.lines.add(f"{self.name(value)} = {text}")


class TokenEmitter(Emitter):
    """A one-token program in Triton: what has one row or column is a vector, only the state is a tile."""

    def on_transpose(self, op: Op) -> str:
        return op.inputs[0].name  # a row and a column are both a vector

    def on_dot(self, op: Op) -> str:
        """A vector with a matrix is a sum, two vectors make a matrix."""
        x, y, *acc = (value.name for value in op.inputs)
        outer = bool(op.attr("trans_a", False))
        product = f"{x}[:, None] * {y}[None, :]" if outer else f"tl.sum({x}[:, None] * {y}, 0)"
        if not acc:
            return product
        return f"{acc[0]} {'-' if op.attr('negate', False) else '+'} {product}"


class TorchEmitter(Emitter):
    """Calls of torch on tensors of tiles."""

    dialect = TORCH

    def factors(self, op: Op) -> list[str]:
        """Both sides of a product."""
        return [self.factor(value, op, side) for value, side in zip(op.inputs[:2], "ab", strict=True)]

    def factor(self, value: Value, op: Op, side: str) -> str:
        return self.operand(value, op) + (".mT" if op.attr(f"trans_{side}", False) else "")

    def on_dot(self, op: Op) -> str:
        a, b = self.factors(op)
        negate = bool(op.attr("negate", False))
        if len(op.inputs) == 2:
            return f"torch.bmm({a}, {b})" + (".neg()" if negate else "")
        alpha = ", alpha=-1" if negate else ""
        return f"torch.baddbmm({self.operand(op.inputs[2], op)}, {a}, {b}{alpha})"


def python_function(source: str, name: str, **names: Any) -> Callable[..., Any]:
    """The function ``run`` of emitted Python, which sees ``names``; its source shows in tracebacks."""
    filename = f"<kdacompile {name} {len(linecache.cache)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), names)
    return names["run"]
