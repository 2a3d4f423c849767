"""HIVM in MLIR's generic form, as a tree of operations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


class UnsupportedError(NotImplementedError):
    """The text uses something this package does not know; the message names it."""


@dataclass
class Block:
    arguments: list[str] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass
class Op:
    """One operation. ``attributes`` is the text after the operands, ``type`` the text of the result type."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    attributes: str
    regions: list[Block] = field(default_factory=list)

    @property
    def type(self) -> str:
        return self.attributes.rpartition(" -> ")[2].strip()

    def find(self, pattern: str) -> str | None:
        """The first group of ``pattern`` in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    def get(self, pattern: str) -> str:
        found = self.find(pattern)
        if found is None:
            raise UnsupportedError(f"{self.name} without {pattern}: {self.attributes[:120]}")
        return found

    def integers(self, name: str) -> list[int]:
        """An attribute ``name = array<i64: 1, 2>``; empty if it is absent or has no elements."""
        found = self.find(name + r" = array<i(?:32|64)(?:: ([^>]*))?>")
        return [int(word) for word in found.split(",")] if found else []

    def walk(self) -> Iterator[Op]:
        yield self
        for block in self.regions:
            for op in block.ops:
                yield from op.walk()


@dataclass
class Module:
    """Functions with a body, by name, and the named affine maps."""

    functions: dict[str, Op]
    maps: dict[str, str]


_LINE = re.compile(r'^\s*(?:(%[\w:]+) = )?"([\w.]+)"\(([^)]*)\)')


class _Reader:
    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.at = 0

    def block(self) -> Block:
        """Operations up to the brace that closes the region."""
        block = Block()
        while self.at < len(self.lines):
            line = self.lines[self.at]
            stripped = line.strip()
            if stripped.startswith("}"):
                return block
            self.at += 1
            if stripped.startswith("^bb0"):
                block.arguments = re.findall(r"(%\w+):", stripped)
            elif stripped.startswith("^"):
                raise UnsupportedError(f"unstructured control flow: {stripped[:80]}")
            elif found := _LINE.match(line):
                block.ops.append(self.op(line, found))
        return block

    def op(self, line: str, found: re.Match[str]) -> Op:
        operands = tuple(word.strip() for word in found.group(3).split(",") if word.strip())
        op = Op(found.group(2), _results(found.group(1)), operands, line[found.end() :])
        if line.rstrip().endswith("({"):
            while True:
                op.regions.append(self.block())
                closing = self.lines[self.at].strip()
                self.at += 1
                if not closing.startswith("}, {"):
                    op.attributes += " " + closing
                    break
        return op


def _results(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    name, _, count = text.partition(":")
    return tuple(f"{name}#{i}" for i in range(int(count))) if count else (name,)


def parse(generic: str) -> Module:
    """Parse the generic form (``bishengir-opt --mlir-print-op-generic``)."""
    maps = dict(re.findall(r"^(#map\d*) = affine_map<(.*)>$", generic, re.M))
    module = _Reader(generic).block().ops[0]
    functions = {
        op.get(r'sym_name = "(\w+)"'): op
        for op in module.regions[0].ops
        if op.name == "func.func" and op.regions and op.regions[0].ops
    }
    return Module(functions, maps)
