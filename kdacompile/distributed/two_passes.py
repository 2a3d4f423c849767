"""Linear attention over several ranks, where kernels can do it in two passes over chunks that are prepared once.

The first pass finds the maps and makes no outputs; the second begins with the state that enters, as on one rank, so
outputs are rounded no more than there. The backward does the same in reverse (:mod:`kdacompile.lowering.passes`).
Every rank of a group may choose for itself: what they exchange is the same as with :class:`~.local.Readers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdacompile.distributed.local import Found, Local
from kdacompile.lowering import cuda as kernels
from kdacompile.lowering.adjoint import Gradients
from kdacompile.lowering.calls import Call
from kdacompile.ops.signature import LINEAR_ATTENTION


class TwoPasses(Local):
    """The kernels' own maps.

    A rank that nothing enters makes none: its states follow each other, and its gradients are those of one rank.
    """

    @property
    def first(self) -> bool:
        """Whether nothing enters this rank."""
        return self.call.cu_seqlens is None and self.held == (0,)

    @property
    def last(self) -> bool:
        """Whether nothing leaves it."""
        return self.call.cu_seqlens is None and self.held == (self.fragments.count - 1,)

    def first_pass(self) -> Found:
        held = len(self.held)
        self._passes = kernels.forward_passes(self._call(held, None), self.cuts)
        starts = self.by_sequence(self.starts.unflatten(0, (held, self.cuts))[:, 0])
        a, written = self._passes.maps(starts, enters=not self.first, leaves=not self.last)
        return Found(self._by_run(written), self.crossing(self.sequences.enters, self._by_run(a)).contiguous())

    def readers(self) -> Tensor:
        return self.call.q.new_empty(0)

    def outputs(self, found: Found, entering: Tensor) -> tuple[Tensor, Tensor]:
        states = self.states(entering).unflatten(0, (len(self.held), self.cuts)).transpose(0, 1)
        parts = torch.stack([self.by_sequence(part) for part in states])
        o, final = self._passes.outputs(parts)
        # Only the last part of a fragment has a state that anyone asks for.
        return o.reshape(self.call.v.shape), self._by_run(final.expand(self.cuts, *final.shape))

    def asked(self, grad_o: Tensor, ending: Tensor | None, states: Tensor, own: Tensor, readers: Tensor) -> Tensor:
        self._grad_o, self._states = grad_o, states[:1] if self.first else states
        call = self._call(len(self._states), self.by_sequence(self._states))
        self._adjoint = kernels.backward_passes(call, grad_o.reshape(call.v.shape))
        if self._adjoint is not None:
            self._adjoint.ready()
        if self.first:
            return torch.zeros_like(states)
        if self._adjoint is None:
            of_state = [operand.name == "initial_state" for operand in LINEAR_ATTENTION.operands]
            found = self.op_gradients(grad_o, ending, states, of_state)[0]
        else:
            ending = torch.zeros_like(states) if ending is None else ending
            found = self._adjoint.asked(self.by_sequence(ending))
        return self.crossing(self.sequences.enters, self.by_run(found))

    def gradients(self, leaving: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
        leaving = leaving[-1:] if self.first else leaving
        names = [operand.name for operand in LINEAR_ATTENTION.operands]
        names = [n for n, want in zip(names, wanted, strict=False) if want and getattr(self.call, n) is not None]
        if self._adjoint is None:
            found = self.op_gradients(self._grad_o, leaving, self._states, wanted)
        else:
            every = dict(zip((o.name for o in LINEAR_ATTENTION.operands), self._gradients(leaving), strict=False))
            found = [self.whole(name, x) for name in names if (x := every[name]) is not None]
        if self.first and "initial_state" in names:  # of the first run alone
            place = names.index("initial_state")
            others = found[place].new_zeros(self.cuts - 1, *found[place].shape)
            found[place] = self.by_sequence(torch.cat([found[place].unsqueeze(0), others]))
        return found

    def _gradients(self, leaving: Tensor) -> Gradients:
        assert self._adjoint is not None
        return self._adjoint.gradients(self.by_sequence(leaving))

    def _by_run(self, states: Tensor) -> Tensor:
        """``[parts, rows, ..]`` of the kernels, by run."""
        if self.call.cu_seqlens is not None:
            return states[0].unflatten(0, (self.count, -1))
        return states.unflatten(1, (-1, len(self.held))).permute(2, 0, 1, 3, 4, 5).flatten(0, 1)

    def _call(self, runs: int, states: Tensor | None) -> Call:
        operands = self.operands(runs) | {"initial_state": states}
        return LINEAR_ATTENTION.call(*operands.values(), **self.options)
