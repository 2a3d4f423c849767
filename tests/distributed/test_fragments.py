"""Which tokens a rank holds, which sequences begin and end there, and how maps of states are folded."""

from __future__ import annotations

import itertools

import pytest
import torch

from kdacompile.distributed import maps
from kdacompile.distributed.fragments import Fragments, packed
from kdacompile.ops.errors import ContextParallelError


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_make_up_the_whole(order: str, ranks: int) -> None:
    fragments, x = Fragments(order, ranks), torch.arange(48).unsqueeze(0)
    shards = [fragments.shard(x, rank) for rank in range(ranks)]
    assert torch.equal(fragments.in_order(shards), x)


def test_zigzag_gives_each_rank_an_early_and_a_late_fragment() -> None:
    fragments = Fragments("zigzag", 2)
    assert [fragments.bounds(rank, 8) for rank in range(2)] == [((0, 2), (6, 8)), ((2, 4), (4, 6))]


def test_contiguous_fragments_are_those_of_a_dtensor() -> None:
    fragments = Fragments("contiguous", 4)
    assert [fragments.bounds(rank, 9) for rank in range(4)] == [((0, 3),), ((3, 6),), ((6, 9),), ((9, 9),)]
    chunks = torch.arange(9).chunk(4)
    assert [tuple(fragments.shard(torch.arange(9), rank, 0).tolist()) for rank in range(3)] == [
        tuple(chunk.tolist()) for chunk in chunks
    ]


def naive_sequences(bounds: list[int], start: int, end: int, last: bool) -> list[tuple[bool, ...]]:
    """(starts, ends, enters, leaves) of each sequence, token by token."""
    found = []
    for first, stop in itertools.pairwise(bounds):
        if first == stop:
            here = start <= first < end or (last and first == end)
            found.append((here, here, False, False))
            continue
        tokens = set(range(first, stop)) & set(range(start, end))
        starts, ends = first in tokens, stop - 1 in tokens
        before, after = first < start < stop, first < end < stop
        found.append((starts, ends, before, after))
    return found


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "bounds", [[0, 24], [0, 3, 3, 11, 24, 24], [0, 0, 6, 12, 18, 24], [0, 1, 23, 24], [0, 12, 12, 24]]
)
def test_where_packed_sequences_begin_end_and_pass(order: str, bounds: list[int]) -> None:
    fragments = Fragments(order, 2)
    for rank in range(2):
        spans = fragments.bounds(rank, 24)
        here = packed(fragments, rank, torch.tensor(bounds), 24, 12)
        for row, ((start, end), number) in enumerate(zip(spans, fragments.held_by(rank), strict=True)):
            expected = naive_sequences(bounds, start, end, number == fragments.count - 1)
            flags = (here.starts, here.ends, here.enters, here.leaves)
            assert [tuple(bool(flag[row, n]) for flag in flags) for n in range(len(bounds) - 1)] == expected
        assert here.bounds is not None
        lengths = [max(0, min(stop, e) - max(first, s)) for s, e in spans for first, stop in itertools.pairwise(bounds)]
        assert here.bounds.diff().tolist() == lengths and int(here.bounds[0]) == 0


def test_folding_is_the_composition_of_maps_forward_and_back() -> None:
    torch.manual_seed(0)
    a, b, first = torch.randn(5, 4, 4).double(), torch.randn(5, 4, 3).double(), torch.randn(4, 3).double()
    state = first.clone().requires_grad_()
    chain = [state]
    for i in range(5):
        chain.append(a[i] @ chain[-1] + b[i])
    torch.testing.assert_close(list(maps.entering(a, b, range(5), first)), chain[:-1])
    torch.testing.assert_close(maps.entering(a, b, (1, 3), first), torch.stack([chain[1], chain[3]]))
    asked = torch.randn_like(b)
    total = torch.stack([(x * weight).sum() for x, weight in zip(chain, asked, strict=False)]).sum()
    expected = torch.autograd.grad(total, chain[1:-1])
    *have, last = maps.leaving(a, asked, range(5))
    torch.testing.assert_close(have, list(expected))
    torch.testing.assert_close(maps.leaving(a, asked, (1, 3)), torch.stack([have[1], have[3]]))
    assert not last.any()  # nothing comes after the last run


def test_what_cannot_be_cut_is_said() -> None:
    with pytest.raises(ContextParallelError, match="order must be one of contiguous, zigzag"):
        Fragments("striped", 2)
    with pytest.raises(ContextParallelError, match="a multiple of 4 tokens, got 10; pad them"):
        Fragments("zigzag", 2).bounds(0, 10)
    with pytest.raises(ContextParallelError, match="rank 1 of 2 must hold 5 of 10 tokens, but has 4"):
        packed(Fragments("contiguous", 2), 1, torch.tensor([0, 10]), 10, 4)
