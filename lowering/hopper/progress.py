"""How often the backward's scan says which of its chunks are done; ``backward_early.rounds_of`` is the kernels' own."""

from __future__ import annotations

EVERY, SHORT = 3, 64  # every 2^3 chunks, or after each one of 64 or fewer


def rounds(chunks: int) -> int:
    """How often each direction does."""
    return ((chunks - 1) >> (EVERY if chunks > SHORT else 0)) + 1
