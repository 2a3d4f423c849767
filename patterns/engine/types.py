"""Types: how each element of each value of a region depends on some of its inputs.

    nothing (zero)      free: does not depend on them      linear: of degree one in them, without a remainder

Zero joins anything; free and linear numbers are never added; a product has at most one linear factor; what is divided
by, inverted or raised to a power is free. An element that breaks a rule is lost, and so is what is made of it. The
rules are those of the column ``linear`` of the table of operators (``traits.py``), element by element:
``cat([v, k exp(g)])`` holds both types. Of a number nothing counts but whether it is zero: none is too small, or too
far away, to be seen.

With ``logs`` the inputs are log gates: sums and multiples of them alone may stand in an exponent, and what an
exponential makes of them is free again (a factor); -inf, and what is as good in the region's dtype, is no term.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from kdacompile.graph.ir import Op, Value
from kdacompile.patterns.engine.evaluate import Planned
from kdacompile.patterns.engine.exact import Evaluation, exponent_of, moved
from kdacompile.patterns.engine.field import Numbers, P, Silent
from kdacompile.patterns.engine.meanings import Field, Residues
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.traits import TRAITS, Trait
from kdacompile.patterns.engine.vocabulary import ADDING

FREE, LINEAR, LOST = 1, 2, 4

_UNKNOWN = Trait("pointwise", linear="")


class Types(Field):
    """Numbers as types."""

    logs = False

    def of(self, item: Any, *, replaces: bool = False, logs: bool = False) -> Residues:
        if isinstance(item, (bool, int, float)):
            return Residues(self.code(torch.tensor(float(item), dtype=torch.float64)))
        return super().of(item, replaces=replaces, logs=logs)

    def constant(self, data: Tensor) -> Residues:
        return Residues(self.code(data))

    def code(self, data: Tensor) -> Tensor:
        nothing = data == 0
        if self.logs and data.is_floating_point():
            nothing = nothing | (data <= self.gone)
        return torch.where(nothing, 0, FREE)


class Typing(Evaluation):
    """The types of a region's results; ``linear``: the inputs whose degree is counted."""

    def __init__(
        self, plan: Sequence[Planned], shapes: Mapping[Value, Sequence[int]], outputs: Sequence[Value],
        linear: Set[Value], *, logs: bool = False,
    ) -> None:  # fmt: skip
        codes = {
            value: {P: torch.full(tuple(shape), LINEAR if value in linear else FREE)} for value, shape in shapes.items()
        }
        super().__init__(plan, codes, outputs)
        types = Types(P, Numbers(), self.fields[P].gone)
        types.logs = logs
        self.fields = {P: types}
        self.logs = logs
        self.first_lost: Op | None = None
        """Where the first element was lost."""

    def wanted(self) -> dict[Op, set[int]]:
        return {item.op: {P} for item in self.plan}

    def run(self, item: Planned, modulus: int) -> None:
        op = item.op
        if not op.out.dtype.is_floating_point:
            self.choose(item)
            return
        results = self.compute(item, TRAITS.get(op.name, _UNKNOWN), self.fields[P])
        self.known.update({(value, P): result for value, result in zip(op.outs, results, strict=False)})
        if self.first_lost is None and any(bool((result.x & LOST).any()) for result in results):
            self.first_lost = op

    def compute(self, item: Planned, trait: Trait, field: Field) -> list[Residues]:
        op = item.op
        operands = self.operands(item, trait, field)
        if op.name == "_to_copy":
            return operands
        if op.name in ADDING or op.name in ("sum", "cumsum"):
            return [Residues(self.bit_by_bit(item, operands))]
        if trait.kind in ("layout", "pick") or (trait.kind == "place" and trait.meaning is None):
            return moved(item, operands, field)
        if trait.kind in ("select", "place"):
            return self.meant(item, trait, operands, field)
        numbers = [each.x for each in operands if isinstance(each, Residues)]
        known = trait.linear or trait.kind == "pointwise"
        codes = self.rule(op, trait, numbers) if known and trait.meaning else anything(item, operands)
        return [Residues(code) for code in codes]

    def rule(self, op: Op, trait: Trait, numbers: list[Tensor]) -> list[Tensor]:
        """By the column ``linear``; literals among the operands are free, or nothing."""
        if self.logs and exponent_of(op, trait) is not None:
            return [torch.where(numbers[-1] & (FREE | LOST) != 0, LOST, FREE)]
        literals = [self.fields[P].of(arg).x for arg in op.args[:2] if isinstance(arg, (int, float))]
        both = numbers + literals if isinstance(op.args[0], Value) else literals + numbers
        product = contraction if trait.kind == "product" else times
        if trait.linear == "all":
            return [join(*both)]
        if trait.linear == "each":
            return [product(*both)]
        if trait.linear == "added":
            term = product(numbers[1], free(numbers[2]) if op.name == "addcdiv" else numbers[2])
            return [join(numbers[0], term) if op.kwargs.get("beta", 1) else term]
        if trait.linear == "first":
            return [times(both[0], free(both[1]))]
        if trait.linear == "blend":
            weight = numbers[2] if len(numbers) > 2 else self.fields[P].of(op.args[2]).x
            return [join(numbers[0], times(weight, join(*numbers[:2])))]
        if trait.linear == "last":
            return [solved(op, numbers[0], numbers[-1])]
        return [free(join(*both))]

    def bit_by_bit(self, item: Planned, operands: list[Any]) -> Tensor:
        """A sum: one run for each of the types tells where any of its terms has it."""
        bits = [
            (item.step([_indicator(each, bit) for each in operands])[0] > 0).to(torch.int64) * bit
            for bit in (FREE, LINEAR, LOST)
        ]
        return join(*bits)


def _indicator(operand: Any, bit: int) -> Any:
    return (operand.x & bit != 0).double() if isinstance(operand, Residues) else operand


def join(*codes: Tensor) -> Tensor:
    """A sum."""
    found = codes[0]
    for code in codes[1:]:
        found = found | code
    return torch.where((found & LOST != 0) | (found & (FREE | LINEAR) == FREE | LINEAR), LOST, found)


def times(a: Tensor, b: Tensor) -> Tensor:
    both = (a != 0) & (b != 0)
    lost = ((a | b) & LOST != 0) | (a & b & LINEAR != 0)
    return torch.where(both, torch.where(lost, LOST, torch.where((a | b) & LINEAR != 0, LINEAR, FREE)), 0)


def contraction(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, of matrices or vectors."""
    if a.dim() == 1:
        return contraction(a[None], b)[0]
    if b.dim() == 1:
        return contraction(a, b[:, None])[..., 0]
    left, right = ([(x & bit != 0).float() for bit in (FREE, LINEAR, LOST)] for x in (a, b))
    lost = left[1] @ right[1] + left[2] @ (b != 0).float() + (a != 0).float() @ right[2] > 0
    linear = left[1] @ right[0] + left[0] @ right[1] > 0
    return join((left[0] @ right[0] > 0) * FREE, linear * LINEAR, lost * LOST)


def free(code: Tensor) -> Tensor:
    """What may be any function of its operand."""
    return torch.where(code & (LINEAR | LOST) != 0, LOST, FREE)


def solved(op: Op, matrix: Tensor, right: Tensor) -> Tensor:
    """``matrix ** -1 right``: every element of a column is made of that column."""
    if bool((matrix & (LINEAR | LOST) != 0).any()):
        return torch.full_like(right, LOST)
    vector = op.name == "_linalg_solve_ex" and right.dim() < matrix.dim()
    dim = -1 if vector or op.kwargs.get("left") is False else -2
    bits = [(right & bit != 0).any(dim, keepdim=True) * bit for bit in (FREE, LINEAR, LOST)]
    return join(*bits).expand(right.shape)


def anything(item: Planned, operands: list[Any]) -> list[Tensor]:
    """What may be any function of all elements of its operands; one run tells its sizes."""
    numbers = [each.x for each in operands if isinstance(each, Residues)]
    code = LOST if any(bool((each & (LINEAR | LOST) != 0).any()) for each in numbers) else FREE
    draw = torch.Generator().manual_seed(0)
    try:
        made = item.step(
            [
                torch.rand(x.x.shape, generator=draw, dtype=torch.float64) if isinstance(x, Residues) else x
                for x in operands
            ]
        )
    except EvaluationError as error:
        raise Silent(str(error)) from error
    return [torch.full(out.shape, code) for out in made]
