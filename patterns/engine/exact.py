"""A region evaluated over the prime fields, by the plan of a run in float64.

Each number is known modulo ``P``, modulo ``R`` or both, as far as something reads it: what leads into an exponential is
needed modulo ``R``, everything else modulo ``P``. Masks and indices are themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kdacompile import compat
from kdacompile.graph.ir import Op, Value, map_values, walk_values
from kdacompile.patterns.engine.evaluate import Planned
from kdacompile.patterns.engine.field import GONE, Numbers, P, R, Silent, unreached
from kdacompile.patterns.engine.meanings import Field, Residues, raised_to
from kdacompile.patterns.engine.reduced import cut
from kdacompile.patterns.engine.rounded import widened, widened_all
from kdacompile.patterns.engine.traits import TRAITS, Trait
from kdacompile.patterns.engine.vocabulary import ADDING

_UNKNOWN = Trait("pointwise")

Drawn = Mapping[int, Tensor | Residues]
"""A tensor's numbers by modulus."""

Constant = Callable[[Value, Tensor, Field], Residues]
"""What a constant of the region is in one of the fields."""


class SilentAt(Silent):
    """The operator for which the field has no word, and why."""

    def __init__(self, op: Op, why: str) -> None:
        super().__init__(f"{op.name}: {why}" if why else op.name)
        self.op = op


def own_numbers(_: Value, data: Tensor, field: Field) -> Residues:
    """Constants as they are."""
    return field.constant(data)


class Evaluation:
    """One evaluation of a region: ``plan`` is that of a run with these sizes."""

    def __init__(
        self,
        plan: Sequence[Planned],
        inputs: Mapping[Value, Drawn | Tensor],
        outputs: Sequence[Value],
        constant: Constant = own_numbers,
        logarithms: Sequence[Value] = (),
    ) -> None:
        """``inputs``: numbers by modulus, or a mask as it is. ``logarithms``: outputs that are read modulo ``R``."""
        self.plan = plan
        self.inputs = inputs
        self.outputs = outputs
        self.logarithms = logarithms
        self.constant = constant
        self.numbers = Numbers()
        widest = _widest(plan)
        gone = GONE[torch.float64 if widest == torch.float64 else torch.float32]
        self.fields = {modulus: Field(modulus, self.numbers, gone, unreached(widest)) for modulus in (P, R)}
        self.known: dict[tuple[Value, int], Residues] = {}
        self.constants: dict[tuple[Value, int], Residues] = {}
        for value, drawn in inputs.items():
            if not isinstance(drawn, Tensor):
                for modulus, data in drawn.items():
                    self.known[value, modulus] = Residues(data) if isinstance(data, Tensor) else data
        self.raw = {value: drawn for value, drawn in inputs.items() if isinstance(drawn, Tensor)}
        """Masks and indices."""

    def __call__(self) -> list[Tensor]:
        """The outputs modulo P. Raises Silent."""
        wanted = self.wanted()
        for item in self.plan:
            for modulus in sorted(wanted.get(item.op, ())):
                self.run(item, modulus)
            for value in item.dead:
                for modulus in (P, R):
                    self.known.pop((value, modulus), None)
        results = [self.known.get((value, P)) for value in self.outputs]
        found = [result.x for result in results if result is not None and result.gone is None]
        if len(found) < len(results):
            raise Silent("a result that no input reaches")
        return found

    def logarithm(self, value: Value) -> Tensor:
        """Of which number, modulo P, one of ``logarithms`` is the logarithm. Raises Silent."""
        found = self.known.get((value, R))
        if found is None or found.log is None or found.gone is not None or bool(found.x.any()):
            raise Silent("a logarithm that something is added to")
        return found.log

    def wanted(self) -> dict[Op, set[int]]:
        """Modulo which primes each operator's results are read."""
        values: dict[Value, set[int]] = {value: {P} for value in self.outputs}
        values |= {value: {R} for value in self.logarithms}
        wanted: dict[Op, set[int]] = {}
        for item in reversed(self.plan):
            op = item.op
            moduli = set[int]().union(*(values.get(out, ()) for out in op.outs))
            if not moduli:
                continue
            wanted[op] = moduli if op.out.dtype.is_floating_point else {P}
            trait = TRAITS.get(op.name, _UNKNOWN)
            for place, argument in [*enumerate(op.args), *((-1, given) for given in op.kwargs.values())]:
                if place in trait.raw:
                    continue
                exponent = place == exponent_of(op, trait)
                if exponent and R in moduli:
                    raise SilentAt(op, "within an exponential")
                for value in walk_values(argument):
                    values.setdefault(value, set()).update({R} if exponent else moduli)
        return wanted

    def run(self, item: Planned, modulus: int) -> None:
        op = item.op
        if not op.out.dtype.is_floating_point:
            self.choose(item)
            return
        trait = _trait(op)
        try:
            results = self.compute(item, trait, self.fields[R if exponent_of(op, trait) is not None else modulus])
        except Silent as error:
            raise error if isinstance(error, SilentAt) else SilentAt(op, str(error)) from error
        except compat.RUN_ERRORS as error:
            raise SilentAt(op, f"it does not run on residues ({error})") from error
        for value, result in zip(op.outs, results, strict=False):
            self.known[value, modulus] = result

    def choose(self, item: Planned) -> None:
        """Masks from masks: the operator as it is."""
        if not all(isinstance(given, Tensor) or given in self.raw for given in item.sources):
            raise SilentAt(item.op, "a choice that depends on numbers")
        given = [source if isinstance(source, Tensor) else self.raw[source] for source in item.sources]
        self.raw.update(zip(item.op.outs, item.step(widened_all(cut(given, item.where))), strict=False))

    def compute(self, item: Planned, trait: Trait, field: Field) -> list[Residues]:
        operands = self.operands(item, trait, field)
        if item.op.name == "_to_copy":
            return [_numbers(operands[0])]
        if trait.meaning is None:
            if trait.kind not in ("layout", "pick", "place"):
                raise Silent("")
            return moved(item, operands, field)
        return self.meant(item, trait, operands, field)

    def meant(self, item: Planned, trait: Trait, operands: list[Any], field: Field) -> list[Residues]:
        """By the operator's meaning."""
        op = item.op
        assert trait.meaning is not None
        if op.name == "linalg_lu_factor_ex" and any(u.name != "linalg_lu_solve" for out in op.outs for u in out.users):
            raise Silent("its factors are read")
        queue = iter(operands)
        args = [map_values(argument, lambda _: next(queue)) for argument in op.args]
        kwargs = map_values({key: given for key, given in op.kwargs.items() if key != "dtype"}, lambda _: next(queue))
        if op.name == "pow" and any(isinstance(source, Tensor) for source in item.sources):
            if item.where:
                raise Silent("a table of powers is cut down")
            place = 0 if exponent_of(op, trait) is not None else 1
            args[place] = item.sources[place if len(item.sources) > 1 else 0]
        if op.name == "pow" and exponent_of(op, trait) is not None:
            return [raised_to(field, args[0], args[1])]
        found = trait.meaning(field, *args, **kwargs)
        return found if isinstance(found, list) else [found]

    def operands(self, item: Planned, trait: Trait, field: Field) -> list[Any]:
        """What the operator reads: residues, and masks and indices as they are; cut down as the plan has it."""
        args = item.op.args
        raw = {value for place in trait.raw if place < len(args) for value in walk_values(args[place])}
        found: list[Residues | Tensor | None] = []
        for value, source in zip(item.op.reads, item.sources, strict=True):
            if value in raw:
                found.append(source if isinstance(source, Tensor) else self.raw.get(value))
            elif value in self.raw:
                found.append(field.constant(self.raw[value]))
            elif isinstance(source, Tensor):
                found.append(source if item.where else self.read(value, source, field))
            else:
                found.append(self.known.get((value, field.modulus)))
        if not item.where:
            return found
        narrow = cut([part.x if isinstance(part, Residues) else part for part in found], item.where)  # type: ignore[misc]
        for index, (value, before) in enumerate(zip(item.op.reads, list(found), strict=True)):
            if isinstance(before, Residues):
                field.of(before)
                gone = before.gone
                if gone is not None:
                    places = [place for place in item.where if place[0] == index]
                    only: list[Any] = [None] * index + [gone.expand(before.x.shape)]
                    gone = cut(only, places)[index]
                found[index] = Residues(narrow[index], gone, before.fill)
            elif value not in raw:
                found[index] = self.constant(value, widened(narrow[index]), field)
            else:
                found[index] = narrow[index]
        return found

    def read(self, value: Value, data: Tensor, field: Field) -> Residues:
        key = value, field.modulus
        if key not in self.constants:
            self.constants[key] = self.constant(value, data, field)
        return self.constants[key]


def _trait(op: Op) -> Trait:
    trait = TRAITS.get(op.name)
    if trait is None:
        raise SilentAt(op, "")
    return trait


def exponent_of(op: Op, trait: Trait) -> int | None:
    """The argument that stands in an exponent, if the operator has one."""
    if op.name == "pow" and isinstance(op.args[1], Value) and not op.args[1].const:
        if isinstance(op.args[0], Value) and not op.args[0].const:
            raise SilentAt(op, "data raised to data")
        return 1
    return trait.exponent


def _numbers(operand: Any) -> Residues:
    if not isinstance(operand, Residues):
        raise Silent("something that is no number")
    return operand


def moved(item: Planned, operands: list[Any], field: Field) -> list[Residues]:
    """Elements are moved whatever they are: the operator itself runs on residues, and on the marks of -inf."""
    moved = item.step([given.x if isinstance(given, Residues) else given for given in operands])
    adds = item.op.name in ADDING
    if adds:
        moved = [result % field.modulus for result in moved]
    logs = _logs(item, operands)
    if all(given.gone is None for given in operands if isinstance(given, Residues)):
        return [Residues(result, log=log) for result, log in zip(moved, logs or [None] * len(moved), strict=True)]
    if adds or logs:
        raise Silent("-inf in something other than a sum")
    marks = [
        (given.gone.expand(given.x.shape) if given.gone is not None else given.x < 0)
        if isinstance(given, Residues)
        else given
        for given in operands
    ]
    fill = max(given.fill for given in operands if isinstance(given, Residues))
    return [Residues(one, mark, fill) for one, mark in zip(moved, item.step(marks), strict=True)]


def _logs(item: Planned, operands: list[Any]) -> list[Tensor]:
    """The same of logarithms; none if there are none."""
    residues = [given for given in operands if isinstance(given, Residues)]
    if all(given.log is None for given in residues):
        return []
    if len(residues) > 1:
        raise Silent("logarithms beside other numbers")
    given: list[Any] = [each.log if isinstance(each, Residues) else each for each in operands]
    return item.step(given)


def _widest(plan: Sequence[Planned]) -> torch.dtype:
    """The dtype that reaches farthest of those a region computes in."""
    found = {out.dtype for item in plan for out in item.op.outs if out.dtype.is_floating_point}
    return min(found, key=lambda dtype: torch.finfo(dtype).min, default=torch.float32)
