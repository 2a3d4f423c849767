"""A rank's side of linear attention over several ranks: its runs of tokens, their maps and their states.

A *run* is a fragment or one of the equal parts that it is cut into, a sequence of the local op. Two ways to find what a
run does to states: :class:`Readers`, by one pass with more columns, and :mod:`.two_passes`, where kernels can do it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kdacompile.compat.groups import group_of
from kdacompile.distributed import maps
from kdacompile.distributed.fragments import Sequences, packed, rows
from kdacompile.distributed.parallel_call import ParallelCall
from kdacompile.lowering.calls import Call
from kdacompile.lowering.run import l2norm
from kdacompile.ops import definitions
from kdacompile.ops.kernels import prepared_gate
from kdacompile.ops.signature import LINEAR_ATTENTION

_WITH_TOKENS = ("q", "k", "v", "beta")


@dataclass(frozen=True)
class Found:
    """What the first pass finds of each run: ``written`` ``[runs, N, HV, K, V]``, the states at the end, as if nothing
    came in; and ``own`` ``[runs, B | 1, HV, K, K | 1]``, A of what enters.
    """

    written: Tensor
    own: Tensor


class Local(ABC):
    """States by run are ``[runs, N, HV, K, V]``; N is the batch, or the sequences of ``cu_seqlens``."""

    def __init__(self, call: ParallelCall) -> None:
        self.call, self.fragments = call, call.fragments
        rank = dist.get_rank(group_of(call.group))
        self.held, self.cuts, self.packed = self.fragments.held_by(rank), max(call.cuts, 1), call.cu_seqlens is not None
        self.count = len(self.held) * self.cuts
        if call.cu_seqlens is None:
            self.sequences: Sequences = rows(self.fragments, rank, self.cuts)
        else:
            here = call.q.shape[1]
            bounds = call.cu_seqlens.to(call.q.device)
            self.sequences = packed(self.fragments, rank, bounds, call.total or here * call.ranks, here)
        self.options = {name: getattr(call, name) for name in LINEAR_ATTENTION.options}

    @abstractmethod
    def first_pass(self) -> Found:
        """What the runs do to states."""

    @abstractmethod
    def readers(self) -> Tensor:
        """What is kept for ``asked`` besides the maps."""

    @abstractmethod
    def outputs(self, found: Found, entering: Tensor) -> tuple[Tensor, Tensor]:
        """o, and the states that the runs end in, from those that enter them; behind ``first_pass``."""

    @abstractmethod
    def asked(self, grad_o: Tensor, ending: Tensor | None, states: Tensor, own: Tensor, readers: Tensor) -> Tensor:
        """``[runs, B | 1, HV, K, V]``: what the results ask of the states that enter, if nothing else does.

        ``ending``: the gradients of the states in which sequences end; ``states``: before each run.
        """

    @abstractmethod
    def gradients(self, leaving: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
        """Those of the wanted operands, in their shapes but for the state's, which is one of every run; behind
        ``asked``. ``leaving``: the gradients of the states behind each run.
        """

    @cached_property
    def initial(self) -> Tensor:
        """The states before the first token ``[1, N, HV, K, V]``, in the dtype of states."""
        given, (shape, dtype) = self.call.initial_state, self.call.results[1]
        state = self.call.q.new_zeros(shape, dtype=dtype) if given is None else given.to(dtype)
        return state.unsqueeze(0)

    @property
    def starts(self) -> Tensor:
        """The states before runs in which sequences start; 0 elsewhere."""
        return self.keep(self.sequences.starts, self.initial)

    def crossing_maps(self, found: Found) -> maps.Map:
        """What each fragment does to a state that crosses it, and what it leaves to the next one."""
        leaves = self.sequences.leaves
        through = (self.sequences.enters & leaves).any(1, keepdim=True)
        a, written = self.keep(through, found.own), self.crossing(leaves, found.written)
        if self.cuts == 1:
            return a, written
        fine = maps.folding_dtype(a.device)
        runs = list(zip(self._by_cut(a).to(fine), self._by_cut(written).to(fine), strict=True))
        total = reduce(lambda before, run: maps.after(run, before), runs)
        return total[0].to(a.dtype), total[1].to(written.dtype)

    def entering_runs(self, found: Found, entering: Tensor) -> Tensor:
        """The states that enter runs, from those that enter fragments."""
        if self.cuts == 1:
            return entering
        own, written = self._by_cut(found.own), self._by_cut(found.written)
        return maps.entering(own, written, range(self.cuts), entering).transpose(0, 1).flatten(0, 1)

    def asked_of_fragments(self, own: Tensor, asked: Tensor) -> Tensor:
        """What is asked of the states that enter fragments, from what is asked of those that enter runs."""
        return asked if self.cuts == 1 else maps.leaving(self._by_cut(own), self._by_cut(asked), (-1,))[0]

    def leaving_runs(self, own: Tensor, asked: Tensor, onward: Tensor) -> Tensor:
        """The gradients of the states that leave runs, from those of the states that leave fragments."""
        if self.cuts == 1:
            return onward
        found = maps.leaving(self._by_cut(own), self._by_cut(asked), range(self.cuts), onward)
        return found.transpose(0, 1).flatten(0, 1)

    def _by_cut(self, x: Tensor) -> Tensor:
        """``[runs, ..]`` as ``[cuts, fragments, ..]``."""
        return x.unflatten(0, (-1, self.cuts)).transpose(0, 1)

    def states(self, entering: Tensor) -> Tensor:
        """The states before each run's first token: a sequence's own, or what enters."""
        come = entering if not self.packed else self.keep(self.sequences.enters, entering)
        return self.keep(self.sequences.starts, self.initial, come)

    def by_sequence(self, states: Tensor) -> Tensor:
        """``[runs, N, ..]`` in the order of the op's sequences: a row's runs lie beside each other."""
        states = states if self.packed else states.transpose(0, 1)
        return states.flatten(0, 1)

    def by_run(self, states: Tensor) -> Tensor:
        if self.packed:
            return states.unflatten(0, (self.count, -1))
        return states.unflatten(0, (-1, self.count)).transpose(0, 1)

    def crossing(self, chosen: Tensor, states: Tensor) -> Tensor:
        """The states that cross a bound of the run: of every row, or of the one packed sequence that does."""
        if self.packed:
            runs = torch.arange(self.count, device=states.device)
            states = states[runs, chosen.int().argmax(1)].unsqueeze(1)
            chosen = chosen.any(1, keepdim=True)
        return self.keep(chosen, states)

    def keep(self, chosen: Tensor, states: Tensor, other: Tensor | None = None) -> Tensor:
        """``states`` ``[runs | 1, N, ..]`` where chosen, else ``other``, or 0. Of rows it is known here which are."""
        if self.packed:
            return torch.where(chosen[..., None, None, None], states, 0 if other is None else other)
        flags = chosen.flatten().tolist()
        states = states.expand(len(flags), *states.shape[1:])
        if all(flags):
            return states
        other = torch.zeros_like(states) if other is None else other
        if not any(flags):
            return other
        return torch.stack([yes if flag else no for flag, yes, no in zip(flags, states, other, strict=True)])

    def op_gradients(
        self, grad_o: Tensor, grad_final: Tensor | None, states: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor]:
        """``gradients``, by the op of one rank, of as many runs as there are ``states``."""
        operands = self.operands(len(states)) | {"initial_state": self.by_sequence(states)}
        options = {name: x for name, x in self.options.items() if name != "out_dtype"}
        grad_o = grad_o.reshape(operands["v"].shape)
        final = None if grad_final is None else self.by_sequence(grad_final)
        found = torch.ops.kdacompile.linear_attention_backward(
            grad_o, final, *operands.values(), **options, wanted=list(wanted)
        )
        names = [name for name, want in zip(operands, wanted, strict=False) if want and operands[name] is not None]
        return [self.whole(name, x) for name, x in zip(names, found, strict=True)]

    def whole(self, name: str, grad: Tensor) -> Tensor:
        """A gradient in the shape of the operand, unless that is the state."""
        return grad if name == "initial_state" else grad.reshape(getattr(self.call, name).shape)

    def operands(self, runs: int) -> dict[str, Any]:
        """The op's operands, with so many runs of a row as rows of their own."""
        found = {operand.name: self._cut(operand.name, runs) for operand in LINEAR_ATTENTION.operands}
        return found | {"cu_seqlens": self.sequences.bounds}

    def _cut(self, name: str, runs: int) -> Any:
        x = getattr(self.call, name)
        with_tokens = name in _WITH_TOKENS or (name == "g" and self.call.gate in ("token", "channel"))
        if x is None or runs == 1 or self.call.cu_seqlens is not None or not with_tokens:
            return x
        return x.unflatten(1, (runs, -1)).flatten(0, 1)


class Readers(Local):
    """One pass, and P: what every token reads of a state that enters, ``P_t = scale q_t^T A_t``."""

    def first_pass(self) -> Found:
        """V columns of the values, and K that begin as the identity and write nothing: their outputs are P."""
        call, (_, heads, keys, values) = self.call, self.call.results[1][0]
        if not call.delta:
            self._rows, written = self._run(self.starts)
            readers, own = decays(call, self.sequences, self.fragments.per_rank)
            self._readers = readers.to(call.passing_dtype)
            return Found(written, own.contiguous())
        starts = self.starts
        unit = torch.eye(keys, dtype=starts.dtype, device=call.q.device)
        unit = unit.expand(*starts.shape[:2], heads, keys, keys)
        columns = self.keep(self.sequences.enters, unit)
        o, final = self._run(torch.cat([starts, columns], -1), more=keys)
        self._rows, self._readers = o[..., :values], o[..., values:]
        own = self.crossing(self.sequences.enters, final[..., values:]).contiguous()
        return Found(final[..., :values], own)

    def readers(self) -> Tensor:
        self._readers = self._readers.contiguous()
        return self._readers

    def outputs(self, found: Found, entering: Tensor) -> tuple[Tensor, Tensor]:
        """``o_t += P_t S``. Overwrites the rows of the first pass."""
        rows, readers = self._in_runs(self._rows), self._in_runs(self._readers)
        for run, states in enumerate(entering):
            for row, state in enumerate(states):
                o, p = rows[row, run].transpose(0, 1), readers[row, run].transpose(0, 1)
                o.baddbmm_(p, state.to(p.dtype))
        fine = maps.folding_dtype(entering.device)
        come = maps.apply(found.own.to(fine), entering.to(fine)).to(entering.dtype)
        final = found.written + self.keep(self.sequences.enters, come)
        return self._rows.to(self.call.out_dtype).contiguous(), final

    def asked(self, grad_o: Tensor, ending: Tensor | None, states: Tensor, own: Tensor, readers: Tensor) -> Tensor:
        """``sum_t P_t^T do_t``, and what ``ending`` asks by way of A."""
        self._grad_o, self._states = grad_o, states
        dtype, fine = self.call.state_dtype, maps.folding_dtype(grad_o.device)
        more: Any = {} if readers.dtype is dtype else {"out_dtype": dtype}
        pairs = zip(self._in_runs(readers), self._in_runs(grad_o.to(readers.dtype)), strict=True)
        found = [
            [torch.bmm(p.permute(1, 2, 0), do.transpose(0, 1), **more) for p, do in zip(*pair, strict=True)]
            for pair in pairs
        ]
        asked = torch.stack([torch.stack(row) for row in found], 1)
        if ending is None:
            return asked
        ended = self.crossing(self.sequences.enters & self.sequences.ends, ending).to(fine)
        return (asked.to(fine) + maps.pull_back(own.to(fine), ended)).to(asked.dtype)

    def gradients(self, leaving: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
        return self.op_gradients(self._grad_o, leaving, self._states, wanted)

    def _in_runs(self, x: Tensor) -> Tensor:
        """``[B, T, ..]`` as ``[B, runs, T / runs, ..]``."""
        return x.unflatten(1, (self.count, x.shape[1] // self.count))

    def _run(self, states: Tensor, more: int = 0) -> tuple[Tensor, Tensor]:
        """o of the rank's tokens, with so many more columns of v, which are 0, and the states after each run."""
        operands = self.operands(self.count) | {"initial_state": self.by_sequence(states)}
        operands["v"] = F.pad(operands["v"], (0, more)) if more else operands["v"]
        options = {**self.options, "out_dtype": self.call.passing_dtype}
        o, final = definitions.linear_attention(*operands.values(), **options)
        return o.reshape(*self.call.q.shape[:2], *o.shape[2:]), self.by_run(final)


# -- what tokens read of a state that enters, without the delta rule ---------------------------------------------------
# S_t = diag(exp g_t) S_{t-1} + ..      G_t = g_1 + .. + g_t      P_t = scale exp(G_t) q_t      A = diag(exp G_T)


def decays(call: Call, sequences: Sequences, fragments: int) -> tuple[Tensor, Tensor]:
    """P ``[B, T, HV, K]`` and the diagonal of A ``[fragments, B | 1, HV, K, 1]``, of what enters each fragment.

    Both are 0 where nothing enters, and P behind the end of a packed sequence that did.
    """
    batch, tokens, heads, keys = *call.q.shape[:2], call.v.shape[2], call.q.shape[3]
    dtype, length, device = call.state_dtype, tokens // fragments, call.q.device
    entering = sequences.enters.any(1)  # [fragments]
    if sequences.bounds is None:  # known on the host, and all but a first fragment; a copy would have to be waited for
        entering = torch.arange(fragments, device=device) >= int(not entering[0])
    last = entering.new_full((fragments,), length, dtype=torch.int64)
    if sequences.bounds is not None:
        lengths = sequences.bounds.diff().unflatten(0, (fragments, -1))
        last = torch.where(sequences.enters, lengths, 0).sum(1)
    total = _log_decays(call, dtype).unflatten(1, (fragments, length)).cumsum(2)  # [B, fragments, T, HV, K | 1]
    q = l2norm(call.q.to(dtype), call.qk_l2norm_eps).repeat_interleave(heads // call.q.shape[2], 2)
    here = torch.arange(length, device=device) < torch.where(entering, last, 0).unsqueeze(1)  # [fragments, T]
    read = call.scale * total.exp() * q.unflatten(1, (fragments, length))
    readers = torch.where(here[..., None, None], read, 0).flatten(1, 2)
    ends = total.new_zeros(batch, fragments, *total.shape[3:])
    if length:
        at = total[:, torch.arange(fragments, device=device), (last - 1).clamp(min=0)]
        ends = torch.where((last > 0)[:, None, None], at, ends)
    own = torch.where(entering[:, None, None], ends.exp(), 0).expand(batch, fragments, heads, keys)
    return readers, own.transpose(0, 1).unsqueeze(-1)


def _log_decays(call: Call, dtype: torch.dtype) -> Tensor:
    """g of each token, ``[B, T, HV, K | 1]``."""
    g, shape = prepared_gate(call, dtype), call.v.shape[:3]
    if g is None:
        return torch.zeros((), dtype=dtype, device=call.q.device).expand(*shape, 1)
    g = g.log() if call.gate_fn == "factor" else g
    return g if call.gate == "channel" else g.unsqueeze(-1).expand(*shape, 1)
