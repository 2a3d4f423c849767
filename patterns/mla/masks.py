"""What hides tokens in an attention: causality that the graph alone decides, and masks that have to be carried along.

A mask no input reaches is computed here and compared with the causal one; masks that depend on inputs (padding, a
position in a static cache, a sparse indexer's choice) become an operand. Boolean masks are followed through the
``where`` that turns them into numbers, if its numbers leave nothing of what they hide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kdacompile.patterns.evaluate import EvaluationError, constant
from kdacompile.patterns.ir import Op, Value
from kdacompile.patterns.mla.definition import VANISHING
from kdacompile.patterns.mla.sources import named
from kdacompile.patterns.mla.walk import Attention, Hidden
from kdacompile.patterns.obstacle import Obstacle
from kdacompile.patterns.vocabulary import LAYOUT, ORDERED

LARGEST_CONSTANT = 1 << 26
"""Entries of a constant mask that is still computed."""


@dataclass
class MaskRole:
    """The masks of one attention: at most one carried, any number that are constant."""

    value: Value | None = None
    keeps: bool = True
    fill: float = 0.0
    rank: int = 4
    selects_last: bool = False
    """Whether the carried mask replaces scores that a constant one has been applied to."""
    constants: list[Tensor] = field(default_factory=list[Tensor])
    """Causal masks of the graph's own making, as numbers to add to the scores."""
    causal: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether the constants are causal, by layout: large ones are not read for every claim."""

    def letters(self, layout: str) -> str | None:
        """Letters of the carried mask, aligned from the right with the scores'."""
        assert self.value is not None
        shape = self.value.shape
        if len(shape) > len(layout):
            return None
        aligned = layout[len(layout) - len(shape) :]
        if any(size != 1 and letter in ".*" for size, letter in zip(shape, aligned, strict=True)):
            return None
        return "".join("." if size == 1 else letter for size, letter in zip(shape, aligned, strict=True))

    def causal_in(self, layout: str, sizes: dict[str, int]) -> bool | None:
        """Whether a constant mask hides just what comes after each query; None if not in this layout."""
        if layout not in self.causal:
            self.causal[layout] = all(_is_causal(mask, layout, sizes) for mask in self.constants)
        if not self.causal[layout]:
            return None
        return bool(self.constants)


def _is_causal(mask: Tensor, layout: str, sizes: dict[str, int]) -> bool:
    tokens, cached = sizes["T"], sizes["S"]
    if tokens > cached or mask.dim() > len(layout) or "T" not in layout or "S" not in layout:
        return False
    keep = torch.arange(cached) <= torch.arange(tokens)[:, None] + cached - tokens
    for _ in layout[layout.index("T") + 1 : layout.index("S")]:
        keep = keep.unsqueeze(1)
    hidden = mask <= VANISHING
    return bool(((mask == 0) | hidden).all()) and bool((hidden == ~keep).all())


def read_masks(found: Attention, sizes: dict[str, int]) -> MaskRole | Obstacle:
    """The masks of one attention, or what about them is not understood."""
    role = MaskRole()
    for hidden in found.masks:
        reason = _read_one(hidden, role, sizes) or _averages(role)
        if reason is not None:
            return Obstacle("mask", reason, hidden.op)
    return role


def _read_one(hidden: Hidden, role: MaskRole, sizes: dict[str, int]) -> str | None:
    mask = hidden.mask
    if mask.const and (hidden.fill is None or _hides(_number(hidden.fill))):
        if math.prod(mask.shape) > LARGEST_CONSTANT:
            return "the mask is too large to be computed here"
        try:
            data = _as_numbers(constant(mask), hidden)
        except EvaluationError as error:
            return f"the mask cannot be computed here ({error})"
        if not bool(data.any()):
            return None
        if data.is_floating_point() and any(_is_causal(data, layout, sizes) for layout in ("BHTS", "BTHS")):
            role.constants.append(data)
            return None
    found = _carried(hidden)
    if isinstance(found, str):
        return found
    value, keeps, fill = found
    if role.value is not None:
        return "two masks that depend on inputs are applied"
    if value.shape[-1] != sizes["S"] or len(value.shape) > 4:
        return "the mask is not one number per query and token"
    role.value, role.keeps, role.fill = value, keeps, fill
    role.selects_last = hidden.fill is not None and bool(role.constants)
    return None


def _averages(role: MaskRole) -> str | None:
    """Why a causal mask cannot be dropped beside a carried one: what a row averages over that both hide as a whole.

    Where causality leaves exactly -inf, and nothing replaces that, the op's own causality does the same.
    """
    if role.value is None or not role.constants:
        return None
    gone = all(bool(((mask == 0) | (mask == -math.inf)).all()) for mask in role.constants)
    kept = role.selects_last and role.fill != -math.inf
    return None if gone and not kept else "two masks are applied, and one of them leaves what the other hides finite"


def _as_numbers(data: Tensor, hidden: Hidden) -> Tensor:
    """A mask as what it adds to the scores."""
    if hidden.fill is None:
        return data
    fill = _number(hidden.fill) or -math.inf
    return torch.zeros(data.shape, dtype=torch.float64).masked_fill(data != hidden.keeps, fill)


def _hides(number: float | None) -> bool:
    return number is not None and number <= VANISHING


def _carried(hidden: Hidden) -> tuple[Value, bool, float] | str:
    """(mask, whether True keeps, what hidden scores become) of a mask that is an operand."""
    mask = hidden.mask
    if hidden.fill is None:
        value = named(mask)
        if value is not None:
            return value, True, 0.0
        where = _unnamed_where(mask)
        return _selected(where) if where is not None else "the mask is not a tensor of the model"
    fill, value = _number(hidden.fill), named(mask)
    if fill is None or value is None or value.dtype is not torch.bool:
        return "the scores are selected by something other than a boolean mask"
    if not _hides(fill):
        return f"hidden scores become {fill:g}, which still lets something through"
    return value, hidden.keeps, fill


def selection(mask: Value) -> tuple[Value, bool, float] | None:
    """(condition, whether True keeps, what hidden scores become) of a mask of numbers that two of them make."""
    while mask.op is not None and mask.op.name in ORDERED | {"expand"}:
        mask = mask.op.reads[0]
    found = _selected(mask.op) if mask.op is not None and mask.op.name == "where" else ""
    return None if isinstance(found, str) else found


def _unnamed_where(value: Value) -> Op | None:
    """The ``where`` behind a mask that no node of the model yields, as scaled_dot_product_attention makes it."""
    while value.op is not None and value.op.name in LAYOUT and value.node is None:
        value = value.op.reads[0]
    return value.op if value.op is not None and value.op.name == "where" else None


def _selected(where: Op) -> tuple[Value, bool, float] | str:
    condition, yes, no = where.args  # the numbers are plain ones where Inductor's dispatcher is on
    value = named(condition) if isinstance(condition, Value) else None
    numbers = _number(yes), _number(no)
    if value is None or None in numbers:
        return "the mask is not a tensor of the model"
    for keeps, (kept, hidden) in ((True, numbers), (False, numbers[::-1])):
        if kept == 0 and hidden is not None and _hides(hidden):
            return value, keeps, hidden
    return "what the mask adds to hidden scores still lets something through"


def _number(item: object) -> float | None:
    """A number that the graph fixes."""
    if isinstance(item, (int, float)):
        return float(item)
    if not isinstance(item, Value) or not item.const or math.prod(item.shape) != 1:
        return None
    try:
        return float(constant(item))
    except EvaluationError:
        return None
