"""Linear attention whose tokens lie on several ranks: ``kdacompile::linear_attention_parallel``.

The recurrence is linear in the state, column by column. So one local pass of V + K columns has all there is to know of
a fragment: the V columns of the values, as if no state came in, and K columns that begin as the identity and write
nothing. What these end as is the fragment's map A, what the others end as is its B (:mod:`.maps`), and the outputs of
the K columns are the *readers* ``P_t = scale q_t^T A_t``, where A_t is the map of the tokens up to t. Without the delta
rule these need no pass (:mod:`.decays`).

1. That pass.
2. One all-gather of the maps, and a fold: the state S that enters each fragment. Between many ranks the maps are
   composed in steps instead (:mod:`.scan`).
3. ``o_t += P_t S``: one matrix product.

The backward op needs no pass to find what the outputs ask of the state that came in: it is ``dS = sum_t P_t^T do_t``.
One all-gather, a fold with the transposed maps, and the local backward with the gradients of the states that leave.
Nothing is differentiated through the maps. The op keeps its operands, the entering states, the maps' A and P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kdacompile.compat.groups import group_of
from kdacompile.distributed import collectives, maps
from kdacompile.distributed.decays import decays
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
        """Of o, the final state, and what the backward op keeps:

        the states that enter this rank's fragments, A of every fragment (with ``steps``, of this rank's), A of what
        enters this rank's fragments up to its own last token there, and the readers P.
        """
        o, (state, dtype) = super().results
        runs, (heads, keys, values) = 1 if self.cu_seqlens is not None else self.q.shape[0], state[1:]
        held, width = self.fragments.per_rank, keys if self.delta else 1
        entering, own = (held, runs, heads, keys, values), (held, runs, heads, keys, width)
        every = own if self.steps else (self.fragments.count, *own[1:])
        readers = (*self.v.shape[:3], keys)
        return o, (state, dtype), (entering, dtype), (every, dtype), (own, dtype), (readers, self.passing_dtype)

    @property
    def passing_dtype(self) -> torch.dtype:
        """The dtype of the first pass' outputs, which are added to what the entering state makes of them.

        On a CPU that of states: the kernels there compute in it. Elsewhere that of v, in which kernels round their
        operands as well, and hand-tuned ones have no other outputs.
        """
        return self.state_dtype if self.v.device.type == "cpu" else self.v.dtype


def check_parallel(call: ParallelCall, *, symbolic: bool = False) -> None:
    check_sequence(call, symbolic=symbolic)
    here = call.q.shape[1]
    if call.fragments.per_rank == 2 and not symbolic and here % 2:
        raise ContextParallelError(problem=f"zigzag needs two fragments of one length on every rank, got {here} tokens")


def forward(call: ParallelCall) -> tuple[Tensor, ...]:
    """o ``[B, T, HV, V]``, this rank's part of the final state, and what the backward op keeps."""
    local = _Local(call)
    passed, leaves = local.first_pass(), local.sequences.leaves
    through = (local.sequences.enters & leaves).any(1, keepdim=True)
    a, written = torch.where(local.mask(through), passed.own, 0), local.crossing(leaves, passed.written)
    initial = local.initial[0] if call.cu_seqlens is None else None
    if call.steps:
        readers = passed.readers.contiguous()
        entering = entering_by_steps(a, written, initial, call.group)
    else:
        sent = collectives.start_gather(torch.cat([a, written], -1), call.group, call.ranks)
        readers = passed.readers.contiguous()  # while the maps are on their way
        every = _in_order(sent(), call)
        a, written = every[..., : a.shape[-1]].contiguous(), every[..., a.shape[-1] :]
        entering = local.held_of(maps.entering(a, written, initial))
    o, part = local.with_states(passed, entering)
    return o, part, entering, a, passed.own, readers


def backward(*arguments: Tensor | None, wanted: list[bool], **options: Any) -> list[Tensor]:
    """Gradients of the wanted operands, from those of o and of the final state (whole, on every rank)."""
    grads, inputs = PARALLEL.of_backward(arguments)
    grad_o, grad_final, *_, entering, a, own, readers = grads
    call: ParallelCall = PARALLEL.call(*(None if x is None else x.detach() for x in inputs), **options)
    local = _Local(call)
    if grad_o is None:
        grad_o = torch.zeros_like(call.v)
    sequences, states = local.sequences, local.states(entering)
    asked, ending = local.asked(grad_o, readers), None
    if grad_final is not None:
        ending = torch.where(local.mask(sequences.ends), grad_final, 0)
        fine = maps.folding_dtype(asked.device)
        ended = local.crossing(sequences.enters & sequences.ends, ending).to(fine)
        asked = (asked.to(fine) + maps.pull_back(own.to(fine), ended)).to(asked.dtype)
    if call.steps:
        onward = leaving_by_steps(a, asked, call.group)
    else:
        every = _in_order(collectives.start_gather(asked, call.group, call.ranks)(), call)
        onward = local.held_of(maps.leaving(a, every))
    leaving = torch.where(local.mask(sequences.leaves), onward, 0 if ending is None else ending)
    found = local.gradients(grad_o, leaving, states, wanted)
    place = [operand.name for operand in LINEAR_ATTENTION.operands].index("initial_state")
    if not wanted[place]:
        return found
    before = sum(want and x is not None for x, want in zip(inputs[:place], wanted[:place], strict=True))
    initial = torch.where(local.mask(sequences.starts), local.by_fragment(found[before]), 0).sum(0)
    found[before] = initial.to(inputs[place].dtype)
    return found


def _in_order(gathered: Tensor, call: ParallelCall) -> Tensor:
    """``[G, ..]`` in the order of tokens, from what each rank has for its fragments, ``[ranks, fragments, ..]``."""
    every = gathered.flatten(0, 1)
    # Not by a list of indices: that would be a copy from the host.
    return every if call.order == "contiguous" else torch.stack([every[place] for place in call.fragments.places])


@dataclass(frozen=True)
class _Passed:
    """What the first pass finds: ``rows`` ``[B, T, HV, V]``, o as if nothing came in; ``readers`` ``[B, T, HV, K]``;
    ``written`` ``[fragments, N, HV, K, V]``, the states at the end; and ``own`` ``[fragments, B | 1, HV, K, K | 1]``,
    A of what enters.
    """

    rows: Tensor
    readers: Tensor
    written: Tensor
    own: Tensor


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

    def first_pass(self) -> _Passed:
        """One pass, which also shows what becomes of a state that enters, see above."""
        call, (_, heads, keys, values) = self.call, self.call.results[1][0]
        starts = torch.where(self.mask(self.sequences.starts), self.initial, 0)
        if not call.delta:
            o, final = self.run(starts, v=self.operands["v"])
            readers, own = decays(call, self.sequences, self.fragments.per_rank)
            return _Passed(o, readers.to(call.passing_dtype), final, own.contiguous())
        unit = torch.eye(keys, dtype=starts.dtype, device=call.q.device)
        columns = torch.where(self.mask(self.sequences.enters), unit, 0).expand(*starts.shape[:2], heads, keys, keys)
        o, final = self.run(torch.cat([starts, columns], -1), v=F.pad(self.operands["v"], (0, keys)))
        own = self.crossing(self.sequences.enters, final[..., values:]).contiguous()
        return _Passed(o[..., :values], o[..., values:], final[..., :values], own)

    def with_states(self, passed: _Passed, entering: Tensor) -> tuple[Tensor, Tensor]:
        """o and this rank's part of the final state, of ``passed`` and the states that enter. Overwrites its rows."""
        rows, readers = self.cut(passed.rows), self.cut(passed.readers)
        for fragment, states in enumerate(entering):
            for row, state in enumerate(states):
                o, p = rows[row, fragment].transpose(0, 1), readers[row, fragment].transpose(0, 1)
                o.baddbmm_(p, state.to(p.dtype))
        fine = maps.folding_dtype(entering.device)
        come = maps.apply(passed.own.to(fine), entering.to(fine)).to(entering.dtype)
        final = passed.written + torch.where(self.mask(self.sequences.enters), come, 0)
        part = torch.where(self.mask(self.sequences.ends), final, 0).sum(0)
        return passed.rows.to(self.call.out_dtype).contiguous(), part

    def asked(self, grad_o: Tensor, readers: Tensor) -> Tensor:
        """``sum_t P_t^T do_t`` ``[fragments, B | 1, HV, K, V]``: what the outputs ask of the states that enter."""
        dtype = self.call.state_dtype
        more: Any = {} if readers.dtype is dtype else {"out_dtype": dtype}
        pairs = zip(self.cut(readers), self.cut(grad_o.to(readers.dtype)), strict=True)
        found = [
            [torch.bmm(p.permute(1, 2, 0), do.transpose(0, 1), **more) for p, do in zip(*pair, strict=True)]
            for pair in pairs
        ]
        return torch.stack([torch.stack(row) for row in found], 1)

    def cut(self, x: Tensor) -> Tensor:
        """``[B, T, ..]`` as ``[B, fragments, T / fragments, ..]``."""
        count = self.fragments.per_rank
        return x.unflatten(1, (count, x.shape[1] // count))

    def states(self, entering: Tensor) -> Tensor:
        """The states before each fragment's first token: a sequence's own, or what enters."""
        come = torch.where(self.mask(self.sequences.enters), entering, 0)
        return torch.where(self.mask(self.sequences.starts), self.initial, come)

    def run(self, states: Tensor, *, v: Tensor) -> tuple[Tensor, Tensor]:
        """o of the rank's tokens in the columns of v, and the states after each fragment."""
        operands = {**self.operands, "v": v, "initial_state": self.by_sequence(states)}
        options = {**self.options, "out_dtype": self.call.passing_dtype}
        o, final = definitions.linear_attention(*operands.values(), **options)
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
        if self.call.cu_seqlens is not None:
            fragments = torch.arange(self.fragments.per_rank, device=states.device)
            states = states[fragments, chosen.int().argmax(1)].unsqueeze(1)
            chosen = chosen.any(1, keepdim=True)
        return torch.where(self.mask(chosen), states, 0)

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
    results=("o", "final_state", "entering", "maps", "own", "readers"),
    result_layouts=(
        "[B, T, HV, V]",
        "[N, HV, K, V]",
        "[F, R, HV, K, V]",
        "[G, R, HV, K, D]",
        "[F, R, HV, K, D]",
        "[B, T, HV, K]",
    ),
    kept=("entering", "maps", "own", "readers"),
    o_layout=False,
)

op = definitions.functional(PARALLEL, forward, backward)
