"""A call of ``kdacompile::linear_attention_parallel``: one rank's operands, and how its tokens lie among all ranks'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kdacompile.distributed.fragments import Fragments, take_turns
from kdacompile.lowering import cuda as kernels
from kdacompile.lowering.calls import Call
from kdacompile.lowering.operands import Result, dimensions
from kdacompile.ops.checks import check_sequence
from kdacompile.ops.signature import LINEAR_ATTENTION


@dataclass(frozen=True)
class ParallelCall(Call):
    """The operand table of the op: a rank's tokens, the bounds and states of whole sequences.

    ``total``: T of all ranks together, or 0 where it need not be known. ``steps``: see
    :func:`.maps.entering_by_steps`. ``overlap``: see :attr:`turns`. The final state is this rank's part: the sum over
    ranks is the state.
    """

    _: KW_ONLY
    group: str
    ranks: int
    order: str
    total: int = 0
    steps: bool = False
    overlap: bool = False

    @cached_property
    def fragments(self) -> Fragments:
        return Fragments(self.order, self.ranks)

    @cached_property
    def turns(self) -> tuple[ParallelCall, ...]:
        """The calls that take turns: of each half of the heads, or this one. An odd number of key heads is not cut."""
        if not take_turns(self.overlap, self.ranks, self.q.shape[2]):
            return (self,)
        cut = [(o.name, halves(getattr(self, o.name), o.text(self))) for o in LINEAR_ATTENTION.operands]
        return tuple(replace(self, **{name: x[half] for name, x in cut}, overlap=False) for half in range(2))

    @cached_property
    def cuts(self) -> int:
        """In how many runs each fragment is cut where kernels find the maps, see :mod:`.two_passes`; else 0."""
        return kernels.cuts_in_two_passes(self.turns[0], self.fragments.per_rank)

    @property
    def results(self) -> tuple[Result, ...]:  # type: ignore[override]
        """Of o, the final state, and what the backward op keeps:

        the states that enter this rank's runs, A of every fragment (with ``steps``, of this rank's), A of what enters
        this rank's runs up to its own last token there, and the readers P.
        """
        o, (state, dtype) = super().results
        runs, (heads, keys, values) = 1 if self.cu_seqlens is not None else self.q.shape[0], state[1:]
        held, width = self.fragments.per_rank, keys if self.delta else 1
        mine, every = held * max(self.cuts, 1), held if self.steps else self.fragments.count
        entering, own, every = ((n, runs, heads, keys, w) for n, w in ((mine, values), (mine, width), (every, width)))
        readers = (0,) if self.cuts else (*self.v.shape[:3], keys)
        return o, (state, dtype), (entering, dtype), (every, dtype), (own, dtype), (readers, self.passing_dtype)

    @property
    def passing_dtype(self) -> torch.dtype:
        """The dtype of the first pass' outputs, which are added to what the entering state makes of them.

        On a CPU that of states: the kernels there compute in it. Elsewhere that of v, in which kernels round their
        operands as well, but for fp16: the states that enter may be beyond its range.
        """
        return self.state_dtype if self.v.device.type == "cpu" or self.v.dtype is torch.float16 else self.v.dtype


def check_parallel(call: ParallelCall, *, symbolic: bool = False) -> None:
    check_sequence(call, symbolic=symbolic)
    if not symbolic:
        call.fragments.check_halves(call.q.shape[1])


def halves(x: Tensor | None, layout: str) -> Sequence[Tensor | None]:
    """Of the heads, or what has none twice."""
    dim = heads_of(layout)
    return (x, x) if x is None or dim is None or x.dim() != len(dimensions(layout)) else x.tensor_split(2, dim)


def heads_of(layout: str) -> int | None:
    """The dimension of the heads in a layout."""
    found = [i for i, name in enumerate(dimensions(layout)) if LINEAR_ATTENTION.axes.get(name) == "heads"]
    return found[0] if found else None
