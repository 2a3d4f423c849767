"""Calls in two passes on a CPU: a check of ``test_context_parallel.py`` with stand-ins for the kernels of a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.distributed import ContextParallel
from kdacompile.lowering import cuda
from kdacompile.lowering.calls import Call
from kdacompile.ops.signature import LINEAR_ATTENTION
from tests.distributed.checks import BOUNDS, TOKENS, attend, compare, operands, with_tokens
from tests.distributed.processes import Ranks

OPS = torch.ops.kdacompile


def options(call: Call) -> dict[str, Any]:
    return {name: getattr(call, name) for name in LINEAR_ATTENTION.options}


class Forward:
    """Both passes by the op, part after part, from the columns of an identity."""

    def __init__(self, call: Call, parts: int) -> None:
        self.call, self.parts = call, parts

    def maps(self, starts: Tensor, *, enters: bool = True, leaves: bool = True) -> tuple[Tensor, Tensor]:
        keys, values = starts.shape[2:]
        unit = torch.eye(keys, dtype=starts.dtype).expand(*starts.shape[:2], keys, keys)
        unit, found, state = unit if enters or not self.call.delta else torch.zeros_like(unit), [], starts
        for part in range(self.parts):
            final = self.run(part, torch.cat([state, unit], -1), keys)[1]
            state = torch.zeros_like(state) if enters or not self.call.delta else final[..., :values]
            if part == self.parts - 1 and not leaves:
                final = torch.full_like(final, 7.0)
            found.append(final)
        every = torch.stack(found)
        a = every[..., values:]
        return (a if self.call.delta else a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)), every[..., :values]

    def outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        o, final = zip(*(self.run(part, state) for part, state in enumerate(states)), strict=True)
        return torch.cat(o, 1), final[-1]

    def run(self, part: int, initial: Tensor, more: int = 0) -> tuple[Tensor, Tensor]:
        given = {o.name: getattr(self.call, o.name) for o in LINEAR_ATTENTION.operands}
        for name in ("q", "k", "v", "beta", "g"):
            x = given[name]
            given[name] = None if x is None else x.tensor_split(self.parts, 1)[part]
        assert given["v"] is not None
        given |= {"initial_state": initial, "v": F.pad(given["v"], (0, more))}
        return OPS.linear_attention(*given.values(), **options(self.call))


class Backward:
    def __init__(self, call: Call, grad_o: Tensor) -> None:
        self.call, self.grad_o = call, grad_o

    def ready(self) -> None:
        pass

    def asked(self, grad_state: Tensor) -> Tensor:
        found = self.gradients(grad_state)[5]
        assert found is not None
        return found

    def gradients(self, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        given = [getattr(self.call, o.name) for o in LINEAR_ATTENTION.operands]
        without = [name for name in options(self.call) if name != "out_dtype"]
        left = {name: options(self.call)[name] for name in without}
        wanted = [x is not None and x.is_floating_point() for x in given]
        found = iter(OPS.linear_attention_backward(self.grad_o, grad_state, *given, **left, wanted=wanted))
        return tuple(next(found) if want else None for want in wanted)


def two_passes(ranks: Ranks) -> None:
    """The maps of runs of a fragment, joined and taken apart; with and without kernels for the gradients."""

    def cuts(call: Call, runs: int) -> int:
        return 1 if call.cu_seqlens is not None else 2

    for kernels in (Backward, lambda call, grad_o: None):
        stand_ins: dict[str, Any] = {"cuts_in_two_passes": cuts, "forward_passes": Forward, "backward_passes": kernels}
        with mock.patch.multiple(cuda, **stand_ins):
            for order, steps in (("contiguous", False), ("contiguous", True), ("zigzag", True), ("zigzag", False)):
                context = ContextParallel(order=order, steps=steps, overlap=steps == (order == "zigzag"))
                for bounds, delta in ((None, True), (BOUNDS, True), (BOUNDS, False), (None, False)):
                    compare(
                        lambda x, c, b=bounds, d=delta: attend(x, c, b, delta=d),
                        operands("channel", bounds, TOKENS), with_tokens("channel"), context, shared=1,
                    )  # fmt: skip
