"""States of a batch that lie in a pool: ``state_indices`` ``[B]`` names a slot of ``[P, HV, K, V]`` for every request.

An index that is no slot's (a negative one: padding of the batch) stands for a request that is skipped: its o is 0 and
nothing is written for it. A slot is named by one request at most. Kernels read and write the slots where they lie; what
is here gathers them and puts them back, for those that know no pools.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .calls import Call


def named(pool: Tensor, indices: Tensor) -> Tensor:
    """Which requests have a slot, ``[B]``."""
    return (indices >= 0) & (indices < pool.shape[0])


def gather(pool: Tensor, indices: Tensor | None) -> Tensor:
    """The states ``[B, HV, K, V]`` in memory of their own: of all slots where there are no indices; those of requests
    without a slot are some slot's.
    """
    if indices is None:
        return pool.clone()
    return pool.index_select(0, indices.clamp(0, pool.shape[0] - 1))


def step_apart(call: Call, step: Callable[[Call], tuple[Tensor, Tensor]]) -> Tensor:
    """o of a step in a pool by one that knows none: on states of its own, which are put back."""
    pool, indices = call.initial_state, call.state_indices
    assert pool is not None and indices is not None
    o, states = step(call.having({"initial_state": gather(pool, indices), "state_indices": None}))
    put(pool, indices, states)
    return blank(o, pool, indices)


def put(pool: Tensor, indices: Tensor | None, states: Tensor) -> None:
    """Write what :func:`gather` yields, ``[B, HV, K, V]``, into its slots. Nothing is read on the host: a request
    without a slot writes what the first one that has a slot does and, where none has, what is there.
    """
    if indices is None:
        pool.copy_(states)
        return
    has = named(pool, indices)
    first = has.int().argmax()
    source = torch.where(has, torch.arange(indices.numel(), device=indices.device), first)
    slots = indices[source].clamp(0, pool.shape[0] - 1).long()
    there = pool.index_select(0, slots)
    pool.index_copy_(0, slots, torch.where(has.any(), states[source].to(pool.dtype), there))


def replaced(pool: Tensor, indices: Tensor, states: Tensor) -> Tensor:
    """A pool with the states in their slots, for autograd; what has no slot goes to one that is dropped."""
    wide = torch.cat([pool, pool[:1]])
    slots = torch.where(named(pool, indices), indices, pool.shape[0]).long()
    return wide.index_copy(0, slots, states.to(pool.dtype))[:-1]


def blank(o: Tensor, pool: Tensor, indices: Tensor) -> Tensor:
    """o ``[B, 1, HV, V]`` with zeros for requests without a slot."""
    return torch.where(named(pool, indices)[:, None, None, None], o, 0.0)
