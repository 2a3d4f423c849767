"""Linear attention whose tokens lie on several ranks: ``kdacompile::linear_attention_parallel``.

The recurrence is linear in the state, so a fragment maps it affinely, ``S_out = A S_in + B`` (:mod:`.maps`).

1. A pass that finds (A, B) of this rank's fragments (:mod:`.local`, :mod:`.two_passes`).
2. One all-gather of the maps, and a fold: the state S that enters each fragment. Between many ranks the maps are
   composed in steps instead (:func:`.maps.entering_by_steps`).
3. The outputs, which S has a part in.

With ``overlap`` the halves of the heads take turns: while the maps of one are on their way, the other's pass runs.

The backward asks first what the outputs ask of the state that came in, ``dS_in = A^T dS_out + B'``. One all-gather of
B', a fold with the transposed maps, and the local backward with the gradients of the states that leave. Nothing is
differentiated through the maps. The op keeps its operands, the entering states and the maps' A, and what
:class:`.local.Readers` keeps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from kdacompile.distributed import collectives, maps
from kdacompile.distributed.fragments import Fragments, take_turns
from kdacompile.distributed.local import Local, Readers
from kdacompile.distributed.maps import entering_by_steps, leaving_by_steps
from kdacompile.distributed.two_passes import TwoPasses
from kdacompile.lowering import cuda as kernels
from kdacompile.lowering.calls import Call
from kdacompile.lowering.operands import Result, dimensions, tensors
from kdacompile.ops import definitions
from kdacompile.ops.checks import check_sequence
from kdacompile.ops.signature import LINEAR_ATTENTION

T = TypeVar("T")


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
        cut = [(o.name, _halves(getattr(self, o.name), o.text(self))) for o in LINEAR_ATTENTION.operands]
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


Waiting = Generator[None, None, T]
"""Yields whenever a message is on its way, and returns what it has made in the end."""


def forward(call: ParallelCall) -> tuple[Tensor, ...]:
    """o ``[B, T, HV, V]``, this rank's part of the final state, and what the backward op keeps."""
    found = _in_turn(_forward(turn) for turn in call.turns)
    return tuple(_joined(x, layout) for x, layout in zip(zip(*found, strict=True), _LAYOUTS, strict=True))


def _forward(call: ParallelCall) -> Waiting[tuple[Tensor, ...]]:
    local = _local(call)
    found = local.first_pass()
    a, written = local.crossing_maps(found)
    if call.steps:
        readers = local.readers()
        entering = yield from entering_by_steps(a, written, call.group)
    else:
        sent = collectives.start_gather(torch.cat([a, written], -1), call.group, call.ranks)
        readers = local.readers()  # while the maps are on their way
        yield
        every = _in_order(sent(), call)
        a, written = every[..., : a.shape[-1]].contiguous(), every[..., a.shape[-1] :]
        entering = maps.entering(a, written, local.held)
    entering = local.entering_runs(found, entering)
    o, final = local.outputs(found, entering)
    part = local.keep(local.sequences.ends, final).sum(0)
    return o, part, entering, a, found.own, readers


def backward(*arguments: Tensor | None, wanted: list[bool], **options: Any) -> list[Tensor]:
    """Gradients of the wanted operands, from those of o and of the final state (whole, on every rank)."""
    grads, inputs = PARALLEL.of_backward(arguments)
    grad_o, grad_final, *_, entering, a, own, readers = grads
    call: ParallelCall = PARALLEL.call(*(None if x is None else x.detach() for x in inputs), **options)
    given = (torch.zeros_like(call.v) if grad_o is None else grad_o, grad_final, entering.detach(), a, own, readers)
    cut = [_halves(x, layout) for x, layout in zip(given, _LAYOUTS, strict=True)] if len(call.turns) > 1 else []
    each = zip(*cut, strict=True) if cut else (given,)
    found = _in_turn(_backward(turn, *some, wanted=wanted) for turn, some in zip(call.turns, each, strict=True))
    operands = zip(LINEAR_ATTENTION.operands, inputs, wanted, strict=False)
    layouts = [operand.text(call) for operand, x, want in operands if want and x is not None]
    return [_joined(x, layout) for x, layout in zip(zip(*found, strict=True), layouts, strict=True)]


def _backward(
    call: ParallelCall, grad_o: Tensor, grad_final: Tensor | None, *kept: Tensor, wanted: list[bool]
) -> Waiting[list[Tensor]]:
    entering, a, own, readers = kept
    local = _local(call)
    sequences = local.sequences
    ending = None if grad_final is None else local.keep(sequences.ends, grad_final.unsqueeze(0))
    asked = local.asked(grad_o, ending, local.states(entering), own, readers)
    of_fragments = local.asked_of_fragments(own, asked)
    if call.steps:
        onward = yield from leaving_by_steps(a, of_fragments, call.group)
    else:
        sent = collectives.start_gather(of_fragments, call.group, call.ranks)
        yield
        onward = maps.leaving(a, _in_order(sent(), call), local.held)
    onward = local.leaving_runs(own, asked, onward)
    leaving = local.keep(sequences.leaves, onward, ending)
    found = local.gradients(leaving, wanted)
    place = [operand.name for operand in LINEAR_ATTENTION.operands].index("initial_state")
    if not wanted[place] or call.initial_state is None:
        return found
    before = sum(want and x is not None for x, want in zip(tensors(call)[:place], wanted[:place], strict=True))
    initial = local.keep(sequences.starts, local.by_run(found[before])).sum(0)
    found[before] = initial.to(call.initial_state.dtype)
    return found


def _in_turn(calls: Iterable[Waiting[T]]) -> list[T]:
    """What the calls make. Each runs until it has sent something, then the next does."""
    running, made = dict(enumerate(calls)), dict[int, T]()
    while running:
        for place, one in list(running.items()):
            try:
                next(one)
            except StopIteration as end:
                made[place] = end.value
                del running[place]
    return [made[place] for place in sorted(made)]


def _halves(x: Tensor | None, layout: str) -> Sequence[Tensor | None]:
    """Of the heads, or what has none twice."""
    dim = heads_of(layout)
    return (x, x) if x is None or dim is None or x.dim() != len(dimensions(layout)) else x.tensor_split(2, dim)


def _joined(halves: Sequence[Tensor], layout: str) -> Tensor:
    dim = heads_of(layout)
    return halves[0] if len(halves) == 1 or dim is None or halves[0].dim() <= dim else torch.cat(list(halves), dim)


def heads_of(layout: str) -> int | None:
    """The dimension of the heads in a layout."""
    found = [i for i, name in enumerate(dimensions(layout)) if LINEAR_ATTENTION.axes.get(name) == "heads"]
    return found[0] if found else None


def _local(call: ParallelCall) -> Local:
    return TwoPasses(call) if call.cuts else Readers(call)


def _in_order(gathered: Tensor, call: ParallelCall) -> Tensor:
    """``[G, ..]`` in the order of tokens, from what each rank has for its fragments, ``[ranks, fragments, ..]``."""
    every = gathered.flatten(0, 1)
    # Not by a list of indices: that would be a copy from the host.
    return every if call.order == "contiguous" else torch.stack([every[place] for place in call.fragments.places])


_LAYOUTS = (
    "[B, T, HV, V]",
    "[N, HV, K, V]",
    "[F, R, HV, K, V]",
    "[G, R, HV, K, D]",
    "[F, R, HV, K, D]",
    "[B, T, HV, K]",
)
"""Of the results; of two passes the last, the readers, is empty."""

PARALLEL = replace(
    LINEAR_ATTENTION,
    name="linear_attention_parallel",
    call=ParallelCall,
    check=check_parallel,
    check_values=None,
    results=("o", "final_state", "entering", "maps", "own", "readers"),
    result_layouts=_LAYOUTS,
    kept=("entering", "maps", "own", "readers"),
    o_layout=False,
)

op = definitions.functional(PARALLEL, forward, backward)
