"""How calls on Hopper are cut: blocks, runs, segments, and what runs beside what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdacompile.lowering.hopper import schedule, schedules


@pytest.mark.parametrize(
    ("heads", "length", "columns", "spans"),
    [
        (32, 8192, 64, [(0, 128)]),
        (96, 8192, 128, [(0, 128)]),
        (66, 100, 64, [(0, 2)]),
        (67, 100, 128, [(0, 2)]),
        (132, 4096, 128, [(0, 64)]),
    ],
)
def test_schedules(heads: int, length: int, columns: int, spans: list[tuple[int, int]]) -> None:
    plan = schedule(1, length, heads, 128, 132)
    assert (plan.columns, plan.spans, plan.segments) == (columns, spans, 1)
    assert sum(chunks for _, chunks in plan.spans) == plan.chunks
    assert plan.scratch_bytes <= schedules.SCRATCH_LIMIT


def test_long_sequences_share_the_buffers() -> None:
    for length in (65536, 2**20):
        plan = schedule(1, length, 32, 128, 132)
        assert plan.scratch_bytes <= schedules.SCRATCH_LIMIT
        assert sum(chunks for _, chunks in plan.spans) == plan.chunks
        assert plan.spare == 132 - 64


@pytest.mark.parametrize(("keys", "width"), [(32, 64), (64, 64), (72, 128), (128, 128)])
def test_keys_are_padded_to_one_of_two_widths(keys: int, width: int) -> None:
    assert schedules.padded(keys) == width


@pytest.mark.parametrize("gate", ["channel", "token"])
def test_narrow_heads_leave_fewer_rows(gate: str) -> None:
    """M and A_qk stay 64 by 64; all else has a number a key."""
    squares = 2 * 64 * 64 * 2
    for width in schedules.WIDTHS:
        other = 3 * 64 * width * 2 + width * 4 if gate == "channel" else 4 * 64 * 4
        assert schedules.tile_bytes(gate, width) == squares + other
        plan = schedule(1, 8192, 32, 64, 132, width=width, gate=gate)
        assert (plan.early, plan.segments) == (32, 1)
        assert plan.scratch_bytes == 4096 * (schedules.tile_bytes(gate, width) + 4)
        few = schedule(1, 8192, 1, 64, 132, width=width, gate=gate)
        assert few.segments > 1
        between = () if few.few else ((few.segments, 1, width, 64),)
        assert few.segment_buffers == ((few.segments - 1, 1, width, 64 + width), *between)


def test_without_the_delta_rule_segments_need_not_run_at_once() -> None:
    plan = schedule(1, 8192, 96, 128, 132, gate="token", delta=False)
    assert (plan.columns, plan.tiles * plan.tile_bytes, plan.scratch_bytes > 0) == (64, 0, plan.segments > 1)
    few = schedule(1, 8192, 4, 128, 132, gate="token", delta=False)
    assert few.segments > 4
    assert few.scratch_bytes == 4 * (few.segments - 1) * 4 * (128 * 128 + 128)
    assert schedule(1, 8192, 4, 128, 132, gate="token", delta=False, packed=3).segments == 1
    narrow = schedule(1, 8192, 32, 64, 132, width=64, delta=False)
    assert narrow.tile_bytes == 2 * (2 * 64 * 64 + 64 * 64) + 64 * 4
    long = schedule(1, 65536, 32, 128, 132, delta=False)
    assert long.scratch_bytes <= schedules.SCRATCH_LIMIT and len(long.spans) > 1 and long.segments == 1


def test_a_scan_that_waits_for_memory_runs_alone() -> None:
    assert schedule(1, 8192, 96, 64, 132, width=64, tile_microseconds=4.1).early == 0


def test_a_scan_runs_beside_the_tiles_it_wants_last() -> None:
    for gate, microseconds in (("channel", 6.0), ("token", 4.0)):
        plan = schedule(1, 8192, 32, 128, 132, gate=gate, tile_microseconds=microseconds)
        workers = 132 * schedules.WORKERS[gate]
        assert plan.early == 32 * 2
        assert 0 < plan.rounds * workers < plan.tiles
        # The others end no later than the scan does, were a tile not slowed down by it.
        late = (plan.tiles - plan.rounds * workers) / (132 - plan.early) * microseconds
        assert late <= plan.chunks * 1.1
        apart = replace(plan, early=0, rounds=0)
        assert plan.scratch_bytes == apart.scratch_bytes + 4 * plan.tiles  # a counter for each tile
    slower = schedule(1, 8192, 32, 128, 132, tile_microseconds=9.0)
    assert slower.rounds > schedule(1, 8192, 32, 128, 132, tile_microseconds=6.0).rounds
    assert schedule(1, 8192, 96, 128, 132).early == 0  # no multiprocessors to speak of are left
    assert schedule(1, 200, 16, 128, 132).early == 0  # fewer tiles than multiprocessors


def test_few_heads_are_scanned_in_segments() -> None:
    for heads in (1, 5, 8):
        plan = schedule(1, 8192, heads, 128, 132)
        assert plan.segments > 1
        assert heads * 2 * plan.segments <= 132
    assert schedule(1, 300, 2, 128, 132).segments == 1


def test_a_dozen_heads_are_scanned_beside_their_tiles() -> None:
    for heads, width in ((12, 128), (16, 128), (24, 128), (32, 64)):
        assert schedule(1, 8192, heads, width, 132).early == heads * width // 64


def test_beside_few_blocks_no_more_tiles_come_than_they_take() -> None:
    """Others would only make their steps longer; where tiles take long, every multiprocessor is wanted."""
    at_work = {time: 132 - schedule(1, 8192, 16, 128, 132, tile_microseconds=time).early for time in (3.5, 4.2, 6.0)}
    assert at_work[6.0] == 132 - 32
    for time in (3.5, 4.2):
        taken = 16 / (0.96 * 0.92)  # tiles in a microsecond
        assert taken < at_work[time] / time < 1.1 * taken
    assert schedule(1, 8192, 32, 128, 132, tile_microseconds=4.2).early == 64  # not few


def test_the_scan_begins_beside_tiles_that_take_long_and_goes_on_in_segments() -> None:
    plan = schedule(1, 8192, 10, 128, 132)
    assert 0 < plan.leading < plan.chunks and plan.segments > 1
    assert 10 * 2 * plan.segments <= 132
    # The tiles of the leading chunks are not among the last ones.
    assert plan.leading * 10 < plan.tiles - (132 - plan.early)
    assert schedule(1, 8192, 10, 128, 132, folded=False).leading == schedule(1, 8192, 2, 128, 132).leading == 0
    assert schedule(1, 8192, 10, 128, 132, gate="token").leading == 0


def test_packed_sequences_share_the_buffers() -> None:
    plan = schedule(1, 1000, 4, 128, 132, packed=3)
    assert (plan.chunks, plan.tiles_per_chunk, plan.sequence_heads) == (1000 // 64 + 3, 4, 12)
