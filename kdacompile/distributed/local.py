"""A rank's side of linear attention over several ranks: its runs of tokens, their maps and their states.

A *run* is a fragment or one of the equal parts that it is cut into, a sequence of the local op. Two ways to find what a
run does to states: :class:`Readers`, by one pass with more columns, and :mod:`.two_passes`, where kernels can do it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kdacompile.compat.groups import group_of
from kdacompile.distributed import maps
from kdacompile.distributed.decays import decays
from kdacompile.distributed.fragments import Sequences, packed, rows
from kdacompile.ops import definitions
from kdacompile.ops.signature import LINEAR_ATTENTION

if TYPE_CHECKING:
    from kdacompile.distributed.linear_attention import ParallelCall

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
        self.held, self.cuts = self.fragments.held_by(rank), max(call.cuts, 1)
        self.count = len(self.held) * self.cuts
        if call.cu_seqlens is None:
            self.sequences: Sequences = rows(self.fragments, rank, call.q.device, self.cuts)
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
        return torch.where(self.mask(self.sequences.starts), self.initial, 0)

    def crossing_maps(self, found: Found) -> maps.Map:
        """What each fragment does to a state that crosses it, and what it leaves to the next one."""
        leaves = self.sequences.leaves
        through = (self.sequences.enters & leaves).any(1, keepdim=True)
        a, written = torch.where(self.mask(through), found.own, 0), self.crossing(leaves, found.written)
        if self.cuts == 1:
            return a, written
        every = self._in_fragments(a), self._in_fragments(written)
        total = every[0][:, 0], every[1][:, 0]
        for run in range(1, self.cuts):
            total = maps.after((every[0][:, run], every[1][:, run]), total)
        return total[0].to(a.dtype), total[1].to(written.dtype)

    def entering_runs(self, found: Found, entering: Tensor) -> Tensor:
        """The states that enter runs, from those that enter fragments."""
        if self.cuts == 1:
            return entering
        own, written = self._in_fragments(found.own), self._in_fragments(found.written)
        states = [entering.to(own.dtype)]
        for run in range(self.cuts - 1):
            states.append(maps.apply(own[:, run], states[-1]) + written[:, run])
        return torch.stack(states, 1).flatten(0, 1).to(entering.dtype)

    def asked_of_fragments(self, own: Tensor, asked: Tensor) -> Tensor:
        """What is asked of the states that enter fragments, from what is asked of those that enter runs."""
        return asked if self.cuts == 1 else self._backwards(own, asked, None)[:, 0].to(asked.dtype)

    def leaving_runs(self, own: Tensor, asked: Tensor, onward: Tensor) -> Tensor:
        """The gradients of the states that leave runs, from those of the states that leave fragments."""
        if self.cuts == 1:
            return onward
        before = self._backwards(own, asked, onward)
        states = torch.cat([before[:, 1:], onward.unsqueeze(1).to(before.dtype)], 1)
        return states.flatten(0, 1).to(onward.dtype)

    def _backwards(self, own: Tensor, asked: Tensor, onward: Tensor | None) -> Tensor:
        """``[fragments, cuts, ..]``: the gradients of the states that enter runs."""
        own, asked = self._in_fragments(own), self._in_fragments(asked)
        found: list[Tensor] = []
        behind = onward
        for run in reversed(range(self.cuts)):
            here = asked[:, run]
            behind = here if behind is None else maps.pull_back(own[:, run], behind.to(here.dtype)) + here
            found.append(behind)
        return torch.stack(found[::-1], 1)

    def _in_fragments(self, x: Tensor) -> Tensor:
        """``[runs, ..]`` as ``[fragments, cuts, ..]``, in the dtype of folds."""
        return x.to(maps.folding_dtype(x.device)).unflatten(0, (-1, self.cuts))

    def states(self, entering: Tensor) -> Tensor:
        """The states before each run's first token: a sequence's own, or what enters."""
        come = torch.where(self.mask(self.sequences.enters), entering, 0)
        return torch.where(self.mask(self.sequences.starts), self.initial, come)

    def by_sequence(self, states: Tensor) -> Tensor:
        """``[runs, N, ..]`` in the order of the op's sequences: a row's runs lie beside each other."""
        states = states if self.call.cu_seqlens is not None else states.transpose(0, 1)
        return states.flatten(0, 1)

    def by_run(self, states: Tensor) -> Tensor:
        if self.call.cu_seqlens is not None:
            return states.unflatten(0, (self.count, -1))
        return states.unflatten(0, (-1, self.count)).transpose(0, 1)

    def crossing(self, chosen: Tensor, states: Tensor) -> Tensor:
        """The states that cross a bound of the run: of every row, or of the one packed sequence that does."""
        if self.call.cu_seqlens is not None:
            runs = torch.arange(self.count, device=states.device)
            states = states[runs, chosen.int().argmax(1)].unsqueeze(1)
            chosen = chosen.any(1, keepdim=True)
        return torch.where(self.mask(chosen), states, 0)

    @staticmethod
    def mask(chosen: Tensor) -> Tensor:
        return chosen[..., None, None, None]

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
        columns = torch.where(self.mask(self.sequences.enters), unit, 0).expand(*starts.shape[:2], heads, keys, keys)
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
        final = found.written + torch.where(self.mask(self.sequences.enters), come, 0)
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
