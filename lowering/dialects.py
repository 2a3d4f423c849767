"""How an op reads in each language that programs are emitted in: a table a dialect, over the operands' texts.

An emitter (``emitter.py``) brings the operands into the shape that an op wants (transposed, with an axis more, loaded)
and leaves the op itself to the dialect. What a target has several ways to do, products above all, is a rule of its
emitters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .errors import TileProgramError
from .ir import Op, OpKind


@dataclass(frozen=True)
class Dialect:
    """``{0}``, ``{1}``, ... in a template are operands, ``{by}`` and the like attributes of the op."""

    name: str
    templates: Mapping[OpKind, str]

    def text(self, op: Op, operands: Sequence[str]) -> str:
        """The expression of an op."""
        if op.kind not in self.templates:
            raise TileProgramError(f"no {self.name} text for this op", str(op))
        attributes = {"strict": False, "reverse": False, "trans_a": False, **dict(op.attrs)}
        return self.templates[op.kind].format(*operands, **attributes)


TORCH = Dialect(
    "torch",
    {
        OpKind.ADD: "torch.add({0}, {1})",
        OpKind.SUB: "torch.sub({0}, {1})",
        OpKind.MUL: "torch.mul({0}, {1})",
        OpKind.EXP: "torch.exp({0})",
        OpKind.LOG: "torch.log({0})",
        OpKind.NEG: "torch.neg({0})",
        OpKind.MAX: "torch.maximum({0}, {1})",
        OpKind.SCALE: "{0} * rt.scalars[{by!r}]",
        OpKind.NORMALISE: "{0} * ({0}.square().sum(-1, keepdim=True) + rt.scalars[{by!r}]).rsqrt()",
        OpKind.CAST: "{0}",
        OpKind.TRANSPOSE: "{0}.mT",
        OpKind.REDUCE: "{0}.sum(1, keepdim=True)",
        OpKind.ROW_SUM: "{0}.sum(-1, keepdim=True)",
        OpKind.ROW_MAX: "tiles.row_max({0})",
        OpKind.CUMSUM: "tiles.cumsum({0}, reverse={reverse})",
        OpKind.MASK: "tiles.lower({0}, strict={strict})",
        OpKind.EYE: "rt.eye({dim!r})",
        OpKind.GATED_DOT: "tiles.gated_dot({0}, {1}, {2}, trans={trans_a})",
        OpKind.UNIT_LOWER_INVERSE: "tiles.unit_lower_inverse({0})",
    },
)
"""Of the executor."""

TRITON = Dialect(
    "Triton",
    {
        OpKind.ADD: "{0} + {1}",
        OpKind.SUB: "{0} - {1}",
        OpKind.MUL: "{0} * {1}",
        OpKind.EXP: "tl.exp({0})",
        OpKind.NEG: "-{0}",
        OpKind.MAX: "tl.maximum({0}, {1})",
        OpKind.SCALE: "{0} * {by}",
        OpKind.NORMALISE: "{0} * row_rates({0}, {by})[:, None]",
        OpKind.ROW_SUM: "tl.sum({0}, 1)",
        OpKind.ROW_MAX: "tl.max({0}, 1)",
    },
)
"""Of CUDA and of Ascend."""
