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
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kdacompile.distributed import collectives, maps
from kdacompile.distributed.local import Local, Readers
from kdacompile.distributed.maps import entering_by_steps, leaving_by_steps
from kdacompile.distributed.parallel_call import ParallelCall, check_parallel, halves, heads_of
from kdacompile.distributed.two_passes import TwoPasses
from kdacompile.lowering.operands import tensors
from kdacompile.ops import definitions
from kdacompile.ops.signature import LINEAR_ATTENTION

T = TypeVar("T")


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
    cut = [halves(x, layout) for x, layout in zip(given, _LAYOUTS, strict=True)] if len(call.turns) > 1 else []
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


def _joined(halves: Sequence[Tensor], layout: str) -> Tensor:
    dim = heads_of(layout)
    return halves[0] if len(halves) == 1 or dim is None or halves[0].dim() <= dim else torch.cat(list(halves), dim)


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
