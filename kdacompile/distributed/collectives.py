"""Collectives that autograd and torch.compile know: ops that hold a process group by its name.

========================================  =======================================  ==============================
``kdacompile::gather``                     one tensor of each rank, ``[ranks, ..]``  gradient: ``scatter_sum``
``kdacompile::scatter_sum``                the sum over ranks of this rank's part    gradient: ``gather``
``kdacompile::sum_over_ranks``             the sum, on every rank                    gradient: the same sum
``kdacompile::exchange``                   all-to-all along the first dimension      gradient: the same exchange
``kdacompile::pass_on``                    to the next fragment of the tokens        gradient: the way back
========================================  =======================================  ==============================

The gradient that a rank hands to ``gather`` or ``sum_over_ranks`` is its own share: the loss is the sum of the ranks'.
torch's functional collectives would do but for their names, which are private where they are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.compat.groups import gather_into, group_of, scatter_sum_into
from kdacompile.ops.errors import ContextParallelError

_library = torch.library.Library("kdacompile", "FRAGMENT")


def _define(schema: str, run: Any, fake: Any) -> Any:
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kdacompile::{name}", fake, lib=_library)
    return getattr(torch.ops.kdacompile, name).default


def start_gather(x: Tensor, group: str, ranks: int) -> Callable[[], Tensor]:
    """Begin to gather, and return what waits for it: ``[ranks, ..]``. What is computed in between overlaps with it."""
    found = x.new_empty(ranks * x.numel())  # the one shape that every backend takes
    work = gather_into(found, x.reshape(-1), group=group_of(group), async_op=True)

    def wait() -> Tensor:
        if work is not None:  # this rank is not in the group
            work.wait()
        return found.view(ranks, *x.shape)

    return wait


def _gather(x: Tensor, group: str, ranks: int) -> Tensor:
    return start_gather(x, group, ranks)()


def _sum(x: Tensor, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group_of(group))
    return total


def _scatter_sum(x: Tensor, group: str) -> Tensor:
    found = x.new_empty(x[0].numel())
    scatter_sum_into(found, x.reshape(-1), group=group_of(group))
    return found.view(x.shape[1:])


def _exchange(x: Tensor, group: str) -> Tensor:
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, x.contiguous(), group=group_of(group))
    return found


def _pass_on(x: Tensor, group: str, onward: bool) -> Tensor:
    """x ``[fragments, ..]`` of this rank: what the fragment before each has, or the one behind; 0 where there is none.

    First fragments follow each other up the ranks, second ones (zigzag) down again.
    """
    found, ends = torch.zeros_like(x, memory_format=torch.contiguous_format), group_of(group)
    rank, ranks, work = dist.get_rank(ends), dist.get_world_size(ends), list[dist.P2POp]()
    for number, (mine, come) in enumerate(zip(x.unbind(), found.unbind(), strict=True)):
        step = 1 if onward == (number == 0) else -1
        if 0 <= rank + step < ranks:
            work.append(dist.P2POp(dist.isend, mine.contiguous(), dist.get_global_rank(ends, rank + step), ends))
        if 0 <= rank - step < ranks:
            work.append(dist.P2POp(dist.irecv, come, dist.get_global_rank(ends, rank - step), ends))
        elif rank - step == ranks and len(x) == 2:  # the last rank's second fragment follows its first
            come.copy_(x[1 - number])
    for request in dist.batch_isend_irecv(work) if work else ():
        request.wait()
    return found


def _empty_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


gather = _define(
    "gather(Tensor x, str group, int ranks) -> Tensor", _gather, lambda x, group, ranks: x.new_empty((ranks, *x.shape))
)
scatter_sum = _define(
    "scatter_sum(Tensor x, str group) -> Tensor", _scatter_sum, lambda x, group: x.new_empty(x.shape[1:])
)
sum_over_ranks = _define("sum_over_ranks(Tensor x, str group) -> Tensor", _sum, _empty_like)
exchange = _define("exchange(Tensor x, str group) -> Tensor", _exchange, _empty_like)
pass_on = _define("pass_on(Tensor x, str group, bool onward) -> Tensor", _pass_on, _empty_like)


def _remember_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group, ctx.more = inputs[1], inputs[2:]


def _scatter_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return scatter_sum(grad.contiguous(), ctx.group), None, None


def _gather_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return gather(grad.contiguous(), ctx.group, dist.get_world_size(group_of(ctx.group))), None


def _sum_again(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return sum_over_ranks(grad, ctx.group), None


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return exchange(grad, ctx.group), None


def _pass_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return pass_on(grad.contiguous(), ctx.group, not ctx.more[0]), None, None


for _name, _backward in (
    ("gather", _scatter_gradient),
    ("scatter_sum", _gather_gradient),
    ("sum_over_ranks", _sum_again),
    ("exchange", _exchange_back),
    ("pass_on", _pass_back),
):
    torch.library.register_autograd(f"kdacompile::{_name}", _backward, setup_context=_remember_group, lib=_library)


def check_alike(
    names: Sequence[str], values: Sequence[int], tokens: int, group: str, ranks: int, device: torch.device
) -> list[int]:
    """The tokens of every rank. Raise where a rank's values are not rank 0's, on every rank and with the ranks named.

    One small all-gather, and its result is read on the host.
    """
    mine = torch.tensor([tokens, *values], dtype=torch.int64, device=device)
    held, *columns = map(list, zip(*_gather(mine, group, ranks).tolist(), strict=True))
    for name, column in zip(names, columns, strict=True):
        odd = [rank for rank, value in enumerate(column) if value != column[0]]
        if odd:
            said = ", ".join(f"{column[rank]} on rank {rank}" for rank in odd[:4])
            raise ContextParallelError(problem=f"{name} is {column[0]} on rank 0, but {said}")
    return held
