"""Which tokens a rank holds under context parallelism, and which sequences begin, end and pass there.

A *fragment* is a run of tokens that follow each other. Two orders give a rank its fragments:

``contiguous``: one fragment a rank, in the order of ranks. All are ``ceil(T / ranks)`` tokens long but the last ones,
which may be shorter or empty (as ``torch.chunk`` and a DTensor's ``Shard`` cut).
``zigzag``: ``2 ranks`` fragments of one length; rank r holds number r and number ``2 ranks - 1 - r``. Causal attention
then costs every rank the same. It is the order of PyTorch's ``context_parallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.distributed import collectives
from kdacompile.ops.errors import ContextParallelError

ORDERS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Fragments:
    """The fragments of ``ranks`` ranks in an order."""

    order: str
    ranks: int

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ContextParallelError(problem=f"order must be one of {', '.join(ORDERS)}; got {self.order!r}")

    @property
    def per_rank(self) -> int:
        return 2 if self.order == "zigzag" else 1

    @property
    def count(self) -> int:
        return self.ranks * self.per_rank

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's fragments, as they lie there."""
        return (rank,) if self.order == "contiguous" else (rank, self.count - 1 - rank)

    @property
    def places(self) -> tuple[int, ...]:
        """Where each fragment lies, in the order of tokens, if the fragments of all ranks are put one after another."""
        held = [number for rank in range(self.ranks) for number in self.held_by(rank)]
        return tuple(held.index(number) for number in range(self.count))

    def bounds(self, rank: int, length: int) -> tuple[tuple[int, int], ...]:
        """First token and the one after the last, of each fragment of a rank; ``length`` is T of all ranks together."""
        if self.order == "zigzag" and length % self.count:
            problem = f"zigzag over {self.ranks} ranks needs a multiple of {self.count} tokens, got {length}; pad them"
            raise ContextParallelError(problem=problem)
        size = -(-length // self.count)
        return tuple((min(n * size, length), min((n + 1) * size, length)) for n in self.held_by(rank))

    def bounds_here(self, rank: int, length: int, here: int) -> tuple[tuple[int, int], ...]:
        """``bounds``, for a rank that has ``here`` tokens; an error where those are not its own."""
        spans = self.bounds(rank, length)
        expected = sum(end - start for start, end in spans)
        if expected != here:
            problem = f"rank {rank} of {self.ranks} must hold {expected} of {length} tokens, but has {here}"
            raise ContextParallelError(problem=problem)
        return spans

    def check_halves(self, here: int) -> None:
        """Raise where a rank's tokens do not make fragments of one length."""
        if self.per_rank == 2 and here % 2:
            problem = f"zigzag needs two fragments of one length on every rank, got {here} tokens"
            raise ContextParallelError(problem=problem)

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """What ``rank`` holds of a tensor that has all tokens along ``dim``."""
        spans = self.bounds(rank, x.shape[dim])
        cut = [x.narrow(dim, start, end - start) for start, end in spans]
        return cut[0] if len(cut) == 1 else torch.cat(cut, dim)

    def in_order(self, shards: list[Tensor], dim: int = 1) -> Tensor:
        """All tokens in their order, from what every rank holds."""
        parts = [part for shard in shards for part in shard.tensor_split(self.per_rank, dim)]
        return torch.cat([parts[place] for place in self.places], dim)


@dataclass(frozen=True)
class Sequences:
    """How sequences lie in the fragments of one rank: bool tensors ``[fragments, N]``, for rows of a batch on the CPU.

    ``starts``: the first token is in the fragment. ``ends``: the last is. ``enters``: the sequence comes from the
    fragment before. ``leaves``: it goes on in the next one. A sequence without tokens starts and ends in the one place
    where it would lie. ``bounds`` ``[fragments N + 1]`` packs what is here; None where sequences are rows of a batch.
    """

    starts: Tensor
    ends: Tensor
    enters: Tensor
    leaves: Tensor
    bounds: Tensor | None = None


def rows(fragments: Fragments, rank: int, cuts: int = 1) -> Sequences:
    """Sequences that are rows of a batch, N = 1 standing for all: each runs through every fragment.

    With ``cuts``, through as many parts of each: the bool tensors are ``[fragments cuts, N]``.
    """
    numbers = torch.tensor([[number * cuts + cut] for number in fragments.held_by(rank) for cut in range(cuts)])
    first, last = numbers == 0, numbers == fragments.count * cuts - 1
    return Sequences(starts=first, ends=last, enters=~first, leaves=~last)


def packed(fragments: Fragments, rank: int, cu_seqlens: Tensor, length: int, here: int) -> Sequences:
    """Sequences packed along T with the global bounds ``cu_seqlens`` ``[N + 1]``; nothing is read on the host.

    ``length`` is T of all ranks, ``here`` this rank's.
    """
    spans = fragments.bounds_here(rank, length, here)
    numbers = _numbers(fragments, rank, cu_seqlens.device)
    size = -(-length // fragments.count)
    start, end = (numbers * size).clamp(max=length), ((numbers + 1) * size).clamp(max=length)
    first, last = cu_seqlens[:-1], cu_seqlens[1:]
    within = (first >= start) & ((first < end) | ((first == end) & (numbers == fragments.count - 1)))
    local = torch.minimum(torch.maximum(cu_seqlens, start), end) - start
    if len(spans) == 2:
        local[1] += spans[0][1] - spans[0][0]
    return Sequences(
        starts=within,
        ends=torch.where(first == last, within, (last > start) & (last <= end)),
        enters=(first < start) & (last > start),
        leaves=(first < end) & (last > end),
        bounds=torch.cat([local[0], *local[1:, 1:]]),
    )


def _numbers(fragments: Fragments, rank: int, device: torch.device) -> Tensor:
    """``[fragments, 1]``: the numbers of a rank's fragments, without a copy from the host."""
    held = fragments.held_by(rank)
    step = held[1] - held[0] if len(held) == 2 else 1
    return (torch.arange(len(held), device=device) * step + held[0]).unsqueeze(1)


# -- how tokens are spread over ranks ---------------------------------------------------------------------------------
# What :func:`kdacompile.ops.linear_attention` and ``mla`` take as ``context_parallel``.

METHODS = ("maps", "heads")
GATHERED = 16
"""Most ranks whose maps every rank holds at once: 4.2 MB each with 32 heads of 128, and as many bytes sent."""

HOST = 8
"""GPUs of one host. Between those a message of maps is short, and halves of the heads cost more than they hide."""


def take_turns(overlap: bool | None, ranks: int, heads: int = 2) -> bool:
    """Whether the halves of so many key heads take turns. None: if the ranks are more than one host."""
    return (ranks > HOST if overlap is None else overlap) and heads % 2 == 0


Key = tuple[str, str, int, str, bool, bool]
"""Group, order, T of all ranks or 0, method, steps, overlap: a context as arguments of calls in graphs, and in cache
keys.
"""


@dataclass(frozen=True)
class ContextParallel:
    """Tokens sharded over the ranks of a process group, along T.

    Args:
        group: the process group; None is the default group.
        order: which tokens a rank holds, "contiguous" or "zigzag": see :mod:`kdacompile.distributed.fragments`.
        total_length: T of all ranks together. Needed with ``cu_seqlens`` where ranks do not all hold the same number of
            tokens ("contiguous" only); else it is that of one rank times the number of ranks.
        method: "maps" sends one affine map of the state a fragment, float32 and independent of T, and reads the tokens
            twice. "heads" sends the operands themselves, so that each rank has all tokens of some heads: results are
            those of one rank bit for bit. It needs heads that divide evenly.
        steps: compose the maps in steps, log2(ranks) messages of one map, rather than gather them all. None: above 16
            ranks.
        overlap: send the maps of one half of the heads while the other half is computed, forward and backward, if the
            key heads are even. Halves of a call cost more than a whole one. None: above 8 ranks, more than one host.
        check: compare the sizes of all ranks before each call and name those that differ, at the cost of one small
            collective that the host waits for. None: where tensors are on the CPU. Compiled code does not check.

    Gradients of what is replicated (A_log, dt_bias, a gate ``[HV]``, the initial state, weights) are this rank's share:
    sum them over the group, as for parameters under data parallelism. The loss is the sum of the ranks' losses.

    Raises:
        ContextParallelError: an unknown order or method; sizes that do not fit.
    """

    group: dist.ProcessGroup | None = None
    order: str = "contiguous"
    total_length: int | None = None
    method: str = "maps"
    steps: bool | None = None
    overlap: bool | None = None
    check: bool | None = None
    name: str = field(init=False)
    rank: int = field(init=False)
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ContextParallelError(problem=f"method must be one of {', '.join(METHODS)}; got {self.method!r}")
        group = dist.group.WORLD if self.group is None else self.group
        if group is None:
            raise ContextParallelError(problem="there is no process group: call torch.distributed.init_process_group")
        object.__setattr__(self, "name", group.group_name)
        object.__setattr__(self, "rank", dist.get_rank(group))
        object.__setattr__(self, "ranks", dist.get_world_size(group))
        if self.rank < 0:
            raise ContextParallelError(problem="this process is not in the group")
        if self.steps is None:
            object.__setattr__(self, "steps", self.ranks > GATHERED)
        object.__setattr__(self, "overlap", take_turns(self.overlap, self.ranks))
        _ = self.fragments  # an unknown order

    @property
    def fragments(self) -> Fragments:
        return Fragments(self.order, self.ranks)

    @classmethod
    def checked(cls, given: object) -> ContextParallel:
        """What was given as ``context_parallel``; an error unless it is one."""
        if not isinstance(given, cls):
            raise ContextParallelError(
                problem=f"context_parallel must be a ContextParallel, got {type(given).__name__}"
            )
        return given

    @property
    def key(self) -> Key:
        return self.name, self.order, self.total_length or 0, self.method, bool(self.steps), bool(self.overlap)

    @property
    def options(self) -> dict[str, Any]:
        """Of the op, :class:`kdacompile.distributed.parallel_call.ParallelCall`."""
        name, order, total, _, steps, overlap = self.key
        return {
            "group": name, "ranks": self.ranks, "order": order, "total": total, "steps": steps, "overlap": overlap
        }  # fmt: skip

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that has all along ``dim``."""
        return self.fragments.shard(x, self.rank, dim)

    def check_alike(
        self, names: Sequence[str], values: Sequence[int], tokens: int, device: torch.device, *, packed: bool = False
    ) -> list[int] | None:
        """The tokens of every rank, if sizes are compared (``check``); raises on all of them where some do not fit.

        Sizes must be rank 0's. Tokens must be those that T of all ranks gives each, where it is given or needed: in the
        order "zigzag", and for ``packed`` sequences.
        """
        if torch.compiler.is_compiling() or not (self.check if self.check is not None else device.type == "cpu"):
            return None  # reading a result on the host would break the graph
        held = collectives.check_alike(names, values, tokens, self.name, self.ranks, device)
        total = self.total_length or (held[0] * self.ranks if packed or self.order == "zigzag" else None)
        for rank, here in enumerate(held if total is not None else ()):
            self.fragments.bounds_here(rank, total or 0, here)
        return held
