"""Split-KV: into how many work items the caches of a call are cut, so that every multiprocessor has the same work.

A work item is a run of blocks of one request; a program takes one for one tile of query rows. Where all requests are
equally long, or there is one, the sizes of the call decide. Otherwise only the lengths can, and they lie on the device:
a small kernel cuts there (``lowering/triton/mla_split.py``), and the host only knows how many items there can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

BLOCK = 64  # tokens: what items are made of
OVERHEAD = 4  # blocks that a program could have done in the time of its start and end
PARTIAL = 5  # the same for writing a partial result and reading it again
STAYING = 2, 4  # both, of a program that stays and goes on with another item
SHORT = 4  # blocks, at least, of a part of a request that is left over
MANY = 4  # rounds of programs after which the lengths even out on their own


@dataclass(frozen=True)
class Split:
    """``items`` programs for each tile of rows. ``splits``: of every request, 0 where the device decides."""

    items: int
    splits: int

    @property
    def scheduled(self) -> bool:
        return self.splits == 0

    @property
    def partial(self) -> bool:
        """Whether there are partial results to combine."""
        return self.splits != 1


def split(requests: int, tiles: int, width: int, slots: int, *, lengths: bool) -> Split:
    """The cut of ``requests`` with up to ``width`` tokens and ``tiles`` tiles of rows each.

    ``slots``: programs that the GPU runs at once. ``lengths``: whether requests have lengths of their own.
    """
    if lengths and requests > 1 and requests * tiles < MANY * slots:
        return Split(workers(tiles, slots) + requests, 0)
    splits = _splits(requests * tiles, -(-width // BLOCK), slots)
    return Split(requests * splits, splits)


def workers(tiles: int, slots: int) -> int:
    """Programs at once for each tile of rows: what scheduled work is divided by."""
    return max(1, slots // tiles)


@lru_cache(maxsize=1024)  # one request has hundreds of candidates: too many to weigh in every layer and step
def _splits(lanes: int, blocks: int, slots: int) -> int:
    """The number of splits with the cheapest rounds of programs; the smallest of equals."""

    def cost(splits: int) -> int:
        rounds = -(-lanes * splits // slots)
        return rounds * (-(-blocks // splits) + OVERHEAD + (PARTIAL if splits > 1 else 0))

    return min(range(1, max(1, min(blocks, MANY * slots // lanes)) + 1), key=cost)
