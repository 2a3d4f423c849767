"""How tokens are spread over ranks: what :func:`kdacompile.ops.linear_attention` and ``mla`` take as
``context_parallel``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.distributed import collectives
from kdacompile.distributed.fragments import Fragments
from kdacompile.ops.errors import ContextParallelError

METHODS = ("maps", "heads")
GATHERED = 16
"""Most ranks whose maps every rank holds at once: 4.2 MB each with 32 heads of 128, and as many bytes sent."""

Key = tuple[str, str, int, str, bool]
"""Group, order, T of all ranks or 0, method, steps: a context as arguments of calls in graphs, and in cache keys."""


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
        _ = self.fragments  # an unknown order

    @property
    def fragments(self) -> Fragments:
        return Fragments(self.order, self.ranks)

    @property
    def key(self) -> Key:
        return self.name, self.order, self.total_length or 0, self.method, bool(self.steps)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that has all along ``dim``."""
        return self.fragments.shard(x, self.rank, dim)

    def check_alike(self, names: Sequence[str], values: Sequence[int], device: torch.device) -> None:
        """Raise where a rank's sizes differ from the others', if that is asked for."""
        if torch.compiler.is_compiling():
            return  # reading a result on the host would break the graph
        if self.check if self.check is not None else device.type == "cpu":
            collectives.check_alike(names, values, self.name, self.ranks, device)
