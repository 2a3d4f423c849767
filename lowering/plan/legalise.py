"""A program made fit for its target's units (:mod:`.units`).

Cube multiplies two narrow tiles, accumulates into its own fp32 result and casts on store; it neither subtracts nor
starts from a tile that Vec made. So for such a target

* operands of products are narrowed by a visible ``cast``, which is where rounding happens;
* ``acc - x @ y`` becomes ``acc + (-x) @ y``, with the sign moved into whatever Vec computes upstream;
* a triangular inverse whose columns are scaled, or rounded, is multiplied by a diagonal matrix, so that it need not go
  back to Vec for it;
* ``acc + x @ y`` stays one product where ``acc`` is itself a product nobody else reads, and is a product and an
  addition on Vec where it is not (the fp32 carry is on Vec: Cube's accumulator cannot be loaded).

Where a target's compiler lets Cube do neither (``Target.accumulates``, ``Target.narrows``), sums and casts are Vec's.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import Attr, DType, Op, OpKind, Program, Value, infer
from ..target import Target
from ..validate import validate
from .units import is_product, is_widening, joined


def legalise(program: Program, target: Target, *, accumulate: bool = True, ahead: bool = False) -> Program:
    """``program`` as ``target`` computes it; the same program for a target that is one process of torch.

    ``accumulate=False`` leaves a sum of two products that the text writes as an addition to Vec. ``ahead``: as in
    :class:`~.model.Options`.
    """
    if target.name == "cpu":
        return program
    return _Legaliser(program, target, accumulate, ahead).run()


class _Legaliser:
    """The program written again op by op, as the rules above ask for."""

    def __init__(self, program: Program, target: Target, accumulate: bool, ahead: bool = False) -> None:
        self.program, self.split = program, target.split
        self.chains = target.accumulates
        self.accumulate = accumulate and target.accumulates
        self.stays = self.accumulate and target.split and target.narrows  # a triangular inverse, on Cube
        self.ops: list[Op] = []
        self.new: dict[Value, Value] = {}  # value of the old program -> of the new one
        self.producer: dict[Value, Op] = {}  # of the new program
        self.names = {op.output.name for op in program.ops if op.output is not None and op.kind is not OpKind.CAST}
        self.narrowed: dict[Value, Value] = {}
        self.negated: dict[Value, Value] = {}
        self.inverses: set[Value] = set()  # by a diagonal matrix
        self.joined = joined(program) if ahead else {}
        self.readers: dict[Value, int] = {}
        for op in program.ops:
            for value in op.inputs:
                self.readers[value] = self.readers.get(value, 0) + 1

    def run(self) -> Program:
        operands = {v for op in self.program.ops if is_product(op) for v in op.inputs[:2]}
        for op in self.program.ops:
            if op.kind is OpKind.DOT:
                self.new[op.result] = self.dot(op)
            elif op.kind is OpKind.CAST and (known := self.narrowed.get(self.new[op.inputs[0]])) is not None:
                self.new[op.result] = known  # a product has it so already
            elif op.kind is OpKind.MUL and (scaled := self.scaled_inverse(op)) is not None:
                self.new[op.result] = scaled
            elif op.kind in (OpKind.ADD, OpKind.SUB) and (total := self.sum(op)) is not None:
                self.new[op.result] = total
            else:
                inputs = tuple(self.new[v] for v in op.inputs)
                made = self.append(Op(op.kind, inputs, op.output, op.attrs))
                if op.output is None:
                    continue
                self.new[op.output] = made
            if op.result in operands:  # narrowed where it is made, by the unit that made it
                self.narrow_down(self.new[op.result])
        carry, reverse = (
            None if carry is None else replace(carry, step=self.new[carry.step])
            for carry in (self.program.carry, self.program.reverse)
        )
        program = replace(self.program, ops=tuple(self.ops), carry=carry, reverse=reverse)
        program = replace(program, ops=_live(program))
        validate(program)
        return program

    def dot(self, op: Op) -> Value:
        if not is_product(op):
            inputs = tuple(self.new[v] for v in op.inputs)
            return self.append(Op(op.kind, inputs, op.output, op.attrs))
        x, y = (self.new[v] for v in op.inputs[:2])
        acc = self.new[op.inputs[2]] if len(op.inputs) == 3 else None
        attrs = dict(op.attrs)
        if not self.split:
            return self.product(op, x, y, acc, attrs, op.result.name)
        negate = bool(attrs.pop("negate", False))
        sums = acc is not None and self._chains(op.inputs[2], acc)
        if negate and sums:
            x, negate = self.negative(x), False
        if acc is not None and not (sums and self.chains):
            raw = self.product(op, x, y, None, attrs, self.fresh(_product_name(op)))
            kind = OpKind.SUB if negate else OpKind.ADD
            return self.emit(kind, (acc, raw), op.result.name)
        if negate:
            x = self.negative(x)
        return self.product(op, x, y, acc, attrs, op.result.name)

    def _chains(self, old: Value, acc: Value) -> bool:
        made = self.producer[acc]
        return self.readers[old] == 1 and made.kind is OpKind.DOT and is_product(made)

    def sum(self, op: Op) -> Value | None:
        """``acc + x @ y`` or ``acc - x @ y`` written as two ops, as one product where Cube can form it."""
        if not self.split or not self.accumulate:
            return None
        pairs = [op.inputs] if op.kind is OpKind.SUB else [op.inputs, op.inputs[::-1]]
        for acc, term in pairs:
            made = self.producer[self.new[term]]
            if len(made.inputs) == 2 and self._chains(acc, self.new[acc]) and self._chains(term, self.new[term]):
                x, y = (self._wide(v) for v in made.inputs)
                x = self.negative(x) if op.kind is OpKind.SUB else x
                return self.product(made, x, y, self.new[acc], dict(made.attrs), op.result.name)
        return None

    def scaled_inverse(self, op: Op) -> Value | None:
        """A triangular inverse by a row of factors."""
        x, row = op.inputs
        if x in self.joined and op.result == self.joined[x].result:
            self.inverses.add(op.result)
        if not self.is_inverse(self.new[x]) or self.readers[x] != 1 or row.type.rows != 1:
            return None
        return self.times_diagonal(self.new[x], self.new[row], op.result.name)

    def times_diagonal(self, x: Value, row: Value | None, name: str) -> Value:
        """``x`` with its columns times ``row``, or times 1, as a product of fp32 tiles."""
        right = self.emit(OpKind.EYE, (), self.fresh(f"{name}_ones"), dim=x.type.cols)
        if row is not None:
            right = self.emit(OpKind.MUL, (right, row), self.fresh(f"{name}_factors"))
        result = self.emit(OpKind.DOT, (x, right), name)
        self.inverses.add(result)
        return result

    def is_inverse(self, x: Value) -> bool:
        return self.stays and x not in self.joined and self.producer[x].kind is OpKind.UNIT_LOWER_INVERSE

    def product(self, op: Op, x: Value, y: Value, acc: Value | None, attrs: dict[str, Attr], name: str) -> Value:
        operands = (self.narrow_down(x), self.narrow_down(y))
        return self.emit(op.kind, operands if acc is None else (*operands, acc), name, **attrs)

    def narrow_down(self, x: Value) -> Value:
        """``x`` in the inputs' dtype; what was loaded in it is taken as it was."""
        if x.type.dtype is DType.IO:
            return x
        made = self.producer[x]
        if is_widening(made):
            return made.inputs[0]
        if x not in self.narrowed:
            wide = self.times_diagonal(x, None, self.fresh(f"{x.name}_joined")) if self.is_inverse(x) else x
            self.narrowed[x] = self.narrowed[wide] = self.emit(
                OpKind.CAST, (wide,), self.fresh(f"{x.name}_io"), to=DType.IO.value
            )
        return self.narrowed[x]

    def negative(self, x: Value) -> Value:
        """``-x``, with the sign moved through products to where Vec can take it at no price."""
        if x in self.negated:
            return self.negated[x]
        made = self.producer[x]
        if made.kind is OpKind.CAST and not is_widening(made):
            return self.negative(made.inputs[0])
        if is_product(made) and len(made.inputs) == 2:
            wide = [self._wide(v) for v in made.inputs]
            at = 1 if self._cost(wide[1]) < self._cost(wide[0]) else 0
            wide[at] = self.negative(wide[at])
            result = self.product(made, wide[0], wide[1], None, dict(made.attrs), self.fresh(f"{x.name}_neg"))
        else:
            result = self.emit(OpKind.NEG, (x,), self.fresh(f"{x.name}_neg"))
        self.negated[x] = result
        return result

    def _wide(self, value: Value) -> Value:
        made = self.producer[value]
        return made.inputs[0] if made.kind is OpKind.CAST else value

    def _cost(self, value: Value) -> tuple[bool, bool]:
        """Negating is free on what Vec makes for this product alone, a tensor more on what is loaded or shared, and two
        hand-overs more on an inverse."""
        made = self.producer[value]
        if value in self.inverses:
            return (True, True)
        return (made.kind in (OpKind.LOAD, OpKind.CARRY), self.readers.get(value, 0) > 1)

    def emit(self, kind: OpKind, inputs: tuple[Value, ...], name: str, **attrs: Attr) -> Value:
        value = Value(name, infer(kind, inputs, attrs, name))
        return self.append(Op(kind, inputs, value, tuple(sorted(attrs.items()))))

    def append(self, op: Op) -> Value:
        self.ops.append(op)
        if op.output is None:
            return op.inputs[0]
        self.producer[op.output] = op
        self.names.add(op.output.name)
        return op.output

    def fresh(self, name: str) -> str:
        fresh, n = name, 0
        while fresh in self.names:
            n += 1
            fresh = f"{name}_{n}"
        return fresh


def _product_name(op: Op) -> str:
    """A name for the product inside ``acc + x @ y``: the change of a carry is called by what it changes."""
    name = op.result.name
    return f"d{name.removesuffix('_next')}" if name.endswith("_next") else f"{name}_product"


def _live(program: Program) -> tuple[Op, ...]:
    needed = {carry.step for carry in program.carries}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if op.output is None or op.output in needed or op.kind is OpKind.CARRY:
            needed.update(op.inputs)
            kept.append(op)
    return tuple(reversed(kept))
