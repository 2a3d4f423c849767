"""What hides tokens in an attention: causality that the graph alone decides, and masks that have to be carried along.

A mask no input reaches is computed here and compared with the causal one; masks that depend on inputs (padding, a
position in a static cache, a sparse indexer's choice) become an operand. Boolean masks are followed through the
``where`` that turns them into numbers, if its numbers leave nothing of what they hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from kdacompile.graph.ir import Op, Value, reach
from kdacompile.patterns.engine.field import unreached
from kdacompile.patterns.engine.match import Obstacle
from kdacompile.patterns.engine.reduced import EvaluationError
from kdacompile.patterns.engine.values import has_node, number, root
from kdacompile.patterns.engine.vocabulary import LAYOUT, SPREAD
from kdacompile.patterns.mla.attention import Attention, Hidden
from kdacompile.patterns.mla.constant_masks import Constant, added, selected
from kdacompile.patterns.mla.definition import MASKS
from kdacompile.patterns.mla.sources import named

LARGEST_CONSTANT = 1 << 26
"""Entries of a constant mask that is still computed."""

KEYS_LAST, KEYS_BEFORE = ("BHTS", "BTHS"), ("BHST", "BTSH", "BSTH", "BSHT")
"""Layouts of scores that a constant mask is compared in, by the dimension that the softmax runs over."""

Applied = tuple[Hidden, Constant | None]
"""A mask, with what it is if it is constant."""


@dataclass(frozen=True)
class Carried:
    """A mask that is an operand; ``keeps`` and ``fill`` as in ``Hiding``."""

    value: Value
    keeps: bool
    fill: float

    @property
    def replaces(self) -> bool:
        """Whether scores become a finite number."""
        return self.value.dtype is torch.bool and math.isfinite(self.fill)


@dataclass
class Masks:
    """The masks of one attention: those that are operands, by role, and constant ones that are causal."""

    operands: dict[str, Carried] = field(default_factory=dict[str, Carried])
    constants: list[Constant] = field(default_factory=list[Constant])
    """Causal masks of the graph's own making."""

    def causal_in(self, layout: str, sizes: dict[str, int]) -> bool | None:
        """Whether a constant mask hides just what comes after each query; None if not in this layout."""
        return bool(self.constants) if all(mask.is_causal(layout, sizes) for mask in self.constants) else None


def aligned(mask: Value, layout: str) -> str | None:
    """Axes of a mask, aligned from the right with the scores'."""
    shape = mask.shape
    if len(shape) > len(layout):
        return None
    axes = layout[len(layout) - len(shape) :]
    if any(size != 1 and axis in ".*+" for size, axis in zip(shape, axes, strict=True)):
        return None
    return "".join("." if size == 1 else axis for size, axis in zip(shape, axes, strict=True))


def read_masks(found: Attention, sizes: dict[str, int]) -> Masks | Obstacle:
    """The masks of one attention, or what about them is not understood."""
    applied: list[Applied] = []
    for hidden in found.masks:
        mask = _constant(hidden)
        if isinstance(mask, str):
            return Obstacle("mask", mask, hidden.op)
        if mask is None or mask.changes:
            applied.append((hidden, mask))
    causal = [mask for _, mask in applied if mask is not None and _is_causal_somehow(mask, found, sizes)]
    carried = _operands([item for item in applied if item[1] not in causal], sizes)
    if causal and not isinstance(carried, Obstacle) and not _leaves_causality(causal, carried):
        causal, carried = [], _operands(applied, sizes)
    return carried if isinstance(carried, Obstacle) else Masks(dict(zip(MASKS, carried, strict=False)), causal)


def _constant(hidden: Hidden) -> Constant | str | None:
    """What a constant mask is; None for one of the inputs; else why that cannot be told."""
    mask, dtype = hidden.mask, hidden.op.out.dtype
    if not mask.const or not (hidden.fill is None or _hides(number(hidden.fill), dtype)):
        return None
    if math.prod(mask.shape) > LARGEST_CONSTANT:
        return "the mask is too large to be computed here"
    try:
        if hidden.fill is None:
            return added(mask, dtype)
        return selected(mask, keeps=hidden.keeps, infinite=number(hidden.fill) == -math.inf)
    except EvaluationError as error:
        return f"the mask cannot be computed here ({error})"


def _is_causal_somehow(mask: Constant, found: Attention, sizes: dict[str, int]) -> bool:
    layouts = KEYS_BEFORE if found.along_rows else KEYS_LAST
    return any(mask.is_causal(layout, sizes) for layout in layouts)


def _leaves_causality(causal: list[Constant], carried: list[Carried]) -> bool:
    """Whether causal masks can be dropped beside those that are carried: it shows in rows that both hide as a whole.

    Where causality leaves exactly -inf, and nothing replaces that, the op's own causality does the same.
    """
    return not carried or (all(mask.gone for mask in causal) and not any(mask.replaces for mask in carried))


def _operands(applied: list[Applied], sizes: dict[str, int]) -> list[Carried] | Obstacle:
    """These masks as operands, or what forbids it."""
    found: list[Carried] = []
    for hidden, constant in applied:
        mask = _operand(hidden, constant, sizes)
        if isinstance(mask, str):
            return Obstacle("mask", mask, hidden.op)
        numbers_added = mask.value.dtype is not torch.bool and (constant is None or constant.raises)
        if numbers_added and any(before.replaces for before in found):
            return Obstacle("mask", "numbers are added to what another mask has put in the place of scores", hidden.op)
        found.append(mask)
    if len(found) > len(MASKS):
        return Obstacle("mask", f"more than {len(MASKS)} masks are applied", applied[0][0].op)
    return found


def _operand(hidden: Hidden, constant: Constant | None, sizes: dict[str, int]) -> Carried | str:
    mask = _carried(hidden)
    if isinstance(mask, str):
        return mask
    if sizes["S"] not in mask.value.shape or len(mask.value.shape) > 4:
        return "the mask is not one number per query and token"
    gone = hidden.fill is None and constant is not None and constant.gone
    return replace(mask, fill=-math.inf) if gone else mask


def _hides(number: float | None, dtype: torch.dtype) -> bool:
    """Whether no score in this dtype reaches a number."""
    return number is not None and number <= unreached(dtype)


def _carried(hidden: Hidden) -> Carried | str:
    mask = hidden.mask
    if hidden.fill is None:
        value = named(mask)
        if value is not None:
            return Carried(value, keeps=True, fill=0.0)
        where = _unnamed_where(mask)
        return _selected(where, hidden.op.out.dtype) if where is not None else "the mask is not a tensor of the model"
    fill, value = number(hidden.fill), named(mask)
    if fill is None or value is None or value.dtype is not torch.bool:
        return "the scores are selected by something other than a boolean mask"
    if not _hides(fill, hidden.op.out.dtype):
        return f"hidden scores become {fill:g}, which other scores may reach"
    return Carried(value, hidden.keeps, fill)


def selection(mask: Value) -> Carried | None:
    """The condition of a mask of numbers that two of them make."""
    op = root(mask, SPREAD).op
    found = _selected(op, _sums(mask)) if op is not None and op.name == "where" else ""
    return None if isinstance(found, str) else found


def _unnamed_where(value: Value) -> Op | None:
    """The ``where`` behind a mask that no node of the model yields, as scaled_dot_product_attention makes it."""
    op = root(value, until=has_node).op
    return op if op is not None and op.name == "where" else None


def _sums(mask: Value) -> torch.dtype:
    """The widest dtype in which a mask is added to scores."""
    added = reach(mask.users, lambda op: op.out.users if op.name in LAYOUT else ())
    dtypes = {mask.dtype, *(op.out.dtype for op in added)}
    return min((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).min)


def _selected(where: Op, dtype: torch.dtype) -> Carried | str:
    condition, yes, no = where.args  # the numbers are plain ones where Inductor's dispatcher is on
    value = named(condition) if isinstance(condition, Value) else None
    numbers = number(yes), number(no)
    if value is None or None in numbers:
        return "the mask is not a tensor of the model"
    for keeps, (kept, hidden) in ((True, numbers), (False, numbers[::-1])):
        if kept == 0 and _hides(hidden, dtype):
            return Carried(value, keeps, hidden or 0.0)
    return "what the mask adds to hidden scores still lets something through"
