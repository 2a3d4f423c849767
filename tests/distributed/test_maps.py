"""Maps composed in steps by as many ranks as one likes, in this process: messages lie in a dictionary."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.distributed import maps
from kdacompile.distributed.fragments import Fragments

Box = defaultdict[tuple[int, int], deque[Tensor]]


class Rank:
    """What :mod:`kdacompile.distributed.maps` asks of ``torch.distributed``, for one rank; ``sent`` counts its
    messages, and ``box`` holds those on their way, by sender and receiver.
    """

    isend, irecv = "isend", "irecv"

    def __init__(self, rank: int, ranks: int, box: Box) -> None:
        self.rank, self.ranks, self.box, self.sent = rank, ranks, box, 0

    def get_rank(self, group: Any) -> int:
        return self.rank

    def get_world_size(self, group: Any) -> int:
        return self.ranks

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank

    def P2POp(self, kind: str, tensor: Tensor, peer: int, group: Any) -> tuple[str, Tensor, int]:
        assert 0 <= peer < self.ranks and peer != self.rank
        return kind, tensor, peer

    def batch_isend_irecv(self, work: Sequence[tuple[str, Tensor, int]]) -> list[Any]:
        for kind, tensor, peer in work:
            if kind == self.isend:
                self.box[self.rank, peer].append(tensor.clone())
                self.sent += 1
        return [
            SimpleNamespace(wait=lambda tensor=tensor, peer=peer: tensor.copy_(self.box[peer, self.rank].popleft()))
            for kind, tensor, peer in work
            if kind == self.irecv
        ]


def by_all(monkeypatch: pytest.MonkeyPatch, ranks: int, walk: Callable[[int], Generator[None, None, Tensor]]) -> Any:
    """``walk(rank)`` of every rank, each up to its next message in turn; their results, and the most messages sent."""
    box: Box = defaultdict(deque)
    found = dict[int, Tensor]()
    places = [Rank(rank, ranks, box) for rank in range(ranks)]
    monkeypatch.setattr(maps, "group_of", lambda name: name)
    running = {rank: walk(rank) for rank in range(ranks)}
    while running:
        for rank, one in list(running.items()):
            monkeypatch.setattr(maps, "dist", places[rank])
            try:
                next(one)
            except StopIteration as end:
                found[rank] = end.value
                del running[rank]
    assert not any(box.values()), "messages that nobody has read"
    return [found[rank] for rank in range(ranks)], max(place.sent for place in places)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 17, 24, 64])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("width", [3, 1])
def test_steps_are_the_fold(ranks: int, order: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that enter, and gradients of those that leave; maps that contract, and some that cut (A = 0)."""
    fragments = Fragments(order, ranks)
    generator = torch.Generator().manual_seed(ranks)
    shape = (fragments.count, 1, 2, 3)
    a = torch.randn(*shape, width, generator=generator, dtype=torch.float64)
    a = a / a.norm(dim=(-2, -1), keepdim=True) if width > 1 else a.sigmoid()
    a[::5] = 0.0
    written = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    held = [list(fragments.held_by(rank)) for rank in range(ranks)]
    for by_steps, fold in ((maps.entering_by_steps, maps.entering), (maps.leaving_by_steps, maps.leaving)):
        found, sent = by_all(monkeypatch, ranks, lambda rank, by=by_steps: by(a[held[rank]], written[held[rank]], "0"))
        for mine, have in zip(held, found, strict=True):
            torch.testing.assert_close(have, fold(a, written, mine))
        assert sent <= fragments.per_rank * ((ranks - 1).bit_length() + 1), "more messages than the cost model counts"
