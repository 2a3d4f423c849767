"""Linear attention whose tokens lie on several ranks: ``kdacompile::linear_attention_parallel``.

1. Each rank makes the affine map of each of its fragments, as if no state came in (:mod:`.maps`).
2. One all-gather of the maps, and a fold: the state that enters each fragment. Between many ranks the maps are
   composed in steps instead (:mod:`.scan`).
3. The local pass with the states that enter.

The backward op does the same in reverse: what the outputs ask of the entering state, one all-gather, a fold with
the transposed maps, the local backward with the gradients of the states that leave. Nothing is differentiated through
the maps. The op keeps its operands, the entering states and the maps' A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.compat.groups import group_of
from kdacompile.distributed import collectives, maps
from kdacompile.distributed.fragments import Fragments, Sequences, packed, rows
from kdacompile.distributed.scan import entering_by_steps, leaving_by_steps
from kdacompile.lowering.calls import Call
from kdacompile.lowering.operands import Result
from kdacompile.ops import definitions
from kdacompile.ops.checks import check_sequence
from kdacompile.ops.errors import ContextParallelError
from kdacompile.ops.signature import LINEAR_ATTENTION

_WITH_TOKENS = ("q", "k", "v", "beta")


@dataclass(frozen=True)
class ParallelCall(Call):
    """The operand table of the op: a rank's tokens, the bounds and states of whole sequences.

    ``total``: T of all ranks together, or 0 where it need not be known. ``steps``: see :mod:`.scan`. The final state is
    this rank's part: the sum over ranks is the state.
    """

    _: KW_ONLY
    group: str
    ranks: int
    order: str
    total: int = 0
    steps: bool = False

    @cached_property
    def fragments(self) -> Fragments:
        return Fragments(self.order, self.ranks)

    @property
    def results(self) -> tuple[Result, ...]:  # type: ignore[override]
        """Of o, the final state, the states that enter this rank's fragments, and A of every fragment.

        With ``steps``, A of this rank's.
        """
        o, (state, dtype) = super().results
        runs, (heads, keys, values) = 1 if self.cu_seqlens is not None else self.q.shape[0], state[1:]
        entering = (self.fragments.per_rank, runs, heads, keys, values)
        held = self.fragments.per_rank if self.steps else self.fragments.count
        a = (held, runs, heads, keys, keys if self.delta else 1)
        return o, (state, dtype), (entering, dtype), (a, dtype)


def check_parallel(call: ParallelCall, *, symbolic: bool = False) -> None:
    check_sequence(call, symbolic=symbolic)
    here = call.q.shape[1]
    if call.fragments.per_rank == 2 and not symbolic and here % 2:
        raise ContextParallelError(problem=f"zigzag needs two fragments of one length on every rank, got {here} tokens")


def forward(call: ParallelCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o ``[B, T, HV, V]``, this rank's part of the final state, and what the backward op keeps."""
    local = _Local(call)
    written, a = local.map()
    initial = local.initial[0] if call.cu_seqlens is None else None
    if call.steps:
        entering = entering_by_steps(a, written, initial, call.group)
    else:
        every = _of_every_fragment(torch.cat([a, written], -1), call)
        a, written = every[..., : a.shape[-1]], every[..., a.shape[-1] :]
        entering = local.held_of(maps.entering(a, written, initial))
    o, final = local.run(local.states(entering))
    part = torch.where(local.mask(local.sequences.ends), final, 0).sum(0)
    return o, part, entering, a.contiguous()


def backward(*arguments: Tensor | None, wanted: list[bool], **options: Any) -> list[Tensor]:
    """Gradients of the wanted operands, from those of o and of the final state (whole, on every rank)."""
    grads, inputs = PARALLEL.of_backward(arguments)
    grad_o, grad_final, _, _, entering, a = grads
    # Detached: the first pass asks for the state's gradient alone, of operands that may all require one.
    call: ParallelCall = PARALLEL.call(*(None if x is None else x.detach() for x in inputs), **options)
    local = _Local(call)
    if grad_o is None:
        grad_o = torch.zeros_like(call.v)
    sequences, states = local.sequences, local.states(entering)
    ending = None if grad_final is None else torch.where(local.mask(sequences.ends), grad_final, 0)
    only = [operand.name == "initial_state" for operand in LINEAR_ATTENTION.operands if operand.differentiable]
    (asked,) = local.gradients(grad_o, ending, states, only)
    asked = local.crossing(sequences.enters, local.by_fragment(asked))
    if call.steps:
        onward = leaving_by_steps(a, asked, call.group)
    else:
        onward = local.held_of(maps.leaving(a, _of_every_fragment(asked, call)))
    leaving = torch.where(local.mask(sequences.leaves), onward, 0 if ending is None else ending)
    place = only.index(True)
    found = local.gradients(grad_o, leaving, states, wanted)
    if not wanted[place]:
        return found
    before = sum(want and x is not None for x, want in zip(inputs[:place], wanted[:place], strict=True))
    initial = torch.where(local.mask(sequences.starts), local.by_fragment(found[before]), 0).sum(0)
    found[before] = initial.to(inputs[place].dtype)
    return found


def _of_every_fragment(mine: Tensor, call: ParallelCall) -> Tensor:
    """``[G, ..]`` in the order of tokens, from what each rank has for its fragments."""
    every = collectives.gather(mine, call.group, call.ranks).flatten(0, 1)
    # Not by a list of indices: that would be a copy from the host.
    return every if call.order == "contiguous" else torch.stack([every[place] for place in call.fragments.places])


class _Local:
    """A rank's side of a call: its fragments as sequences of the op, and their states by fragment.

    States by fragment are ``[fragments, N, HV, K, V]``; N is the batch, or the sequences of ``cu_seqlens``.
    """

    def __init__(self, call: ParallelCall) -> None:
        self.call, self.fragments = call, call.fragments
        rank = dist.get_rank(group_of(call.group))
        self.held = self.fragments.held_by(rank)
        if call.cu_seqlens is None:
            self.sequences: Sequences = rows(self.fragments, rank, call.q.device)
        else:
            here = call.q.shape[1]
            bounds = call.cu_seqlens.to(call.q.device)
            self.sequences = packed(self.fragments, rank, bounds, call.total or here * call.ranks, here)
        self.operands = {name: self._cut(name) for name in (o.name for o in LINEAR_ATTENTION.operands)}
        self.operands["cu_seqlens"] = self.sequences.bounds
        self.options = {name: getattr(call, name) for name in LINEAR_ATTENTION.options}

    @cached_property
    def initial(self) -> Tensor:
        """The states before the first token ``[1, N, HV, K, V]``, in the dtype of states."""
        given, (shape, dtype) = self.call.initial_state, self.call.results[1]
        state = self.call.q.new_zeros(shape, dtype=dtype) if given is None else given.to(dtype)
        return state.unsqueeze(0)

    def map(self) -> tuple[Tensor, Tensor]:
        """B and A of each fragment, ``[fragments, B | 1, HV, K, V]`` and ``[.., K | 1]``.

        Of packed sequences they are those of the one that leaves: A is 0 where it began in the fragment.
        """
        _, final = self.run(torch.where(self.mask(self.sequences.starts), self.initial, 0))
        written = self.crossing(self.sequences.leaves, final)
        return written, self.crossing(self.sequences.enters & self.sequences.leaves, self._transitions())

    def _transitions(self) -> Tensor:
        """A of every sequence of a fragment: what becomes of the identity if nothing is written."""
        call, (shape, dtype) = self.call, self.call.results[1]
        width = shape[2] if call.delta else 1
        unit = torch.eye(width, dtype=dtype, device=call.q.device) if call.delta else call.q.new_ones(1, dtype=dtype)
        v = self.operands["v"].new_zeros(()).expand(*self.operands["v"].shape[:3], width)
        states = unit.expand(self.fragments.per_rank, *shape[:3], width)
        return self.run(states, v=v)[1]

    def states(self, entering: Tensor) -> Tensor:
        """The states before each fragment's first token: a sequence's own, or what enters."""
        come = torch.where(self.mask(self.sequences.enters), entering, 0)
        return torch.where(self.mask(self.sequences.starts), self.initial, come)

    def run(self, states: Tensor, **changed: Tensor) -> tuple[Tensor, Tensor]:
        """o of the rank's tokens, and the states after each fragment."""
        operands = {**self.operands, **changed, "initial_state": self.by_sequence(states)}
        o, final = definitions.linear_attention(*operands.values(), **self.options)
        return o.reshape(*self.call.q.shape[:2], *o.shape[2:]), self.by_fragment(final)

    def gradients(
        self, grad_o: Tensor, grad_final: Tensor | None, states: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor]:
        """Those of the wanted operands, in their shapes but for the state's, which is one of every sequence here."""
        operands = {**self.operands, "initial_state": self.by_sequence(states)}
        options = {name: x for name, x in self.options.items() if name != "out_dtype"}
        grad_o = grad_o.reshape(*self.operands["v"].shape)
        final = None if grad_final is None else self.by_sequence(grad_final)
        found = torch.ops.kdacompile.linear_attention_backward(
            grad_o, final, *operands.values(), **options, wanted=list(wanted)
        )
        names = [name for name, want in zip(operands, wanted, strict=False) if want and operands[name] is not None]
        return [
            x if name == "initial_state" else x.reshape(getattr(self.call, name).shape)
            for name, x in zip(names, found, strict=True)
        ]

    def held_of(self, every: Sequence[Tensor]) -> Tensor:
        """What belongs to this rank's fragments, of a tensor for each fragment."""
        return torch.stack([every[number] for number in self.held])

    def by_sequence(self, states: Tensor) -> Tensor:
        """``[fragments, N, ..]`` in the order of the op's sequences: a row's fragments lie beside each other."""
        states = states if self.call.cu_seqlens is not None else states.transpose(0, 1)
        return states.flatten(0, 1)

    def by_fragment(self, states: Tensor) -> Tensor:
        count = self.fragments.per_rank
        if self.call.cu_seqlens is not None:
            return states.unflatten(0, (count, -1))
        return states.unflatten(0, (-1, count)).transpose(0, 1)

    def crossing(self, chosen: Tensor, states: Tensor) -> Tensor:
        """The states that cross a bound of the fragment: of every row, or of the one packed sequence that does."""
        kept = torch.where(self.mask(chosen), states, 0)
        return kept if self.call.cu_seqlens is None else kept.sum(1, keepdim=True)

    @staticmethod
    def mask(chosen: Tensor) -> Tensor:
        return chosen[..., None, None, None]

    def _cut(self, name: str) -> Any:
        """An operand with the fragments of a row as rows of their own."""
        x = getattr(self.call, name)
        with_tokens = name in _WITH_TOKENS or (name == "g" and self.call.gate in ("token", "channel"))
        count = self.fragments.per_rank
        if x is None or count == 1 or self.call.cu_seqlens is not None or not with_tokens:
            return x
        return x.unflatten(1, (count, -1)).flatten(0, 1)


PARALLEL = replace(
    LINEAR_ATTENTION,
    name="linear_attention_parallel",
    call=ParallelCall,
    check=check_parallel,
    check_values=None,
    results=("o", "final_state", "entering", "maps"),
    result_layouts=("[B, T, HV, V]", "[N, HV, K, V]", "[F, R, HV, K, V]", "[G, R, HV, K, D]"),
    kept=("entering", "maps"),
    o_layout=False,
)

op = definitions.functional(PARALLEL, forward, backward)
