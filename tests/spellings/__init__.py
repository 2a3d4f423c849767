"""The corpus of spellings: one computation, many texts. Importing this package fills the registries."""

from __future__ import annotations

from tests.spellings import (
    bonus,
    chunked_delta,
    chunked_delta_inverse,
    chunked_plain,
    fla_naive,
    mathematicians,
    near_misses_chunked,
    near_misses_more,
    near_misses_published,
    other_hands_closed,
    other_hands_loops,
    other_hands_units,
    outsiders,
    parallel,
    recurrent_delta,
    recurrent_plain,
    steps,
    strangers,
    tables_in_place,
    time_turned,
    upstream,
    visitors,
)
from tests.spellings.near_misses import REGISTRY as NEAR_REGISTRY
from tests.spellings.near_misses import NearMiss
from tests.spellings.registry import PATTERNS, REGISTRY, Spelling

# Imported for what they register.
TEXTS = (
    recurrent_delta,
    recurrent_plain,
    chunked_delta,
    chunked_delta_inverse,
    chunked_plain,
    parallel,
    upstream,
    steps,
    fla_naive,
    other_hands_loops,
    other_hands_closed,
    other_hands_units,
    outsiders,
    strangers,
    tables_in_place,
    mathematicians,
    time_turned,
    visitors,
    bonus,
    near_misses_more,
    near_misses_chunked,
    near_misses_published,
)
SPELLINGS: tuple[Spelling, ...] = tuple(REGISTRY.values())
NEAR_MISSES: tuple[NearMiss, ...] = tuple(NEAR_REGISTRY.values())

__all__ = ["NEAR_MISSES", "PATTERNS", "SPELLINGS", "TEXTS", "NearMiss", "Spelling"]
