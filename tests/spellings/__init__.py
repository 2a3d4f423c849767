"""The corpus of spellings: one computation, many texts. Importing this package fills the registries."""

from __future__ import annotations

from tests.spellings import (
    bonus,
    chunked_delta,
    chunked_delta_inverse,
    chunked_plain,
    closed_forms,
    early_reads,
    fla_naive,
    folds_and_flat_states,
    gate_units,
    gradient_steps_and_windows,
    mathematicians,
    near_misses_chunked,
    near_misses_more,
    near_misses_published,
    parallel,
    products,
    recurrent_delta,
    recurrent_plain,
    scans_and_padding,
    steps,
    tables_in_place,
    time_turned,
    token_loops,
    upstream,
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
    token_loops,
    closed_forms,
    gate_units,
    scans_and_padding,
    folds_and_flat_states,
    tables_in_place,
    mathematicians,
    time_turned,
    gradient_steps_and_windows,
    bonus,
    early_reads,
    products,
    near_misses_more,
    near_misses_chunked,
    near_misses_published,
)
SPELLINGS: tuple[Spelling, ...] = tuple(REGISTRY.values())
NEAR_MISSES: tuple[NearMiss, ...] = tuple(NEAR_REGISTRY.values())

__all__ = ["NEAR_MISSES", "PATTERNS", "SPELLINGS", "TEXTS", "NearMiss", "Spelling"]
