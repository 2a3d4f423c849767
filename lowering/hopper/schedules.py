"""How a call on Hopper is cut: blocks of V, runs of chunks that share a buffer, segments that are scanned at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

CHUNK = 64
WIDTH = 128  # K, padded
ROWS = {"channel": 256, "token": 64}  # of WIDTH bf16 that a chunk leaves between the kernels, by the gate's kind
WORKERS = {"channel": 1, "token": 3}  # tiles a block prepares at once
FACTORS = {"channel": 128, "token": 256}  # fp32 numbers beside them
SCRATCH_LIMIT = 2**30  # bytes between the kernels, unless one chunk of all heads takes more
MAX_SEGMENTS = 64

# Microseconds on an H200: a step of the scan by columns, carrying the state over one segment, the launches that
# segments take more, and what another run costs (kernels that start and end, and share the memory's bandwidth).
_BESIDE = 1.08  # how much longer a tile takes beside a scan
_STEP, _COMBINE, _SEGMENTS, _RUN = {64: 1.1, 128: 2.3}, 2.2, 11.0, 45.0


@dataclass(frozen=True)
class Schedule:
    """``chunks`` of a sequence (packed: the most there can be of all), ``run`` of them share one buffer.

    A block of the scan has ``columns`` of V's ``padded_values``; ``segments`` of a run are scanned at once. With
    ``spare`` multiprocessors that a scan leaves idle the next run is prepared beside it, ``beside`` tiles on each.
    With ``early`` blocks that leave after ``rounds`` tiles the scan starts while the others still prepare tiles.
    ``tiles_per_chunk``: value heads, times batch entries unless these are packed. ``lanes``: sequences times heads.
    """

    chunks: int
    run: int
    columns: int
    segments: int
    padded_values: int
    tiles_per_chunk: int
    lanes: int
    gate: str = "channel"
    spare: int = 0
    beside: int = 0
    rounds: int = 0
    early: int = 0

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First chunk and number of chunks of every run."""
        return [(first, min(self.run, self.chunks - first)) for first in range(0, self.chunks, self.run)]

    @property
    def tiles(self) -> int:
        return self.tiles_per_chunk * self.run

    @property
    def segment_buffers(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """What the first pass over segments leaves, and the states between them; fp32."""
        lines = (self.lanes, WIDTH)
        values = self.padded_values
        return (self.segments - 1, *lines, values + WIDTH), (self.segments, *lines, values)

    @property
    def scratch_bytes(self) -> int:
        """What a call allocates between its kernels."""
        segmented = sum(4 * a * b * c * d for a, b, c, d in self.segment_buffers) if self.segments > 1 else 0
        announced = 4 * self.tiles if self.early else 0
        return self.buffers * self.tiles * tile_bytes(self.gate) + segmented + announced

    @property
    def buffers(self) -> int:
        """Runs that are in memory at once."""
        return 2 if self.spare else 1


def tile_bytes(gate: str) -> int:
    """What a chunk of one head leaves between the kernels."""
    return ROWS[gate] * WIDTH * 2 + FACTORS[gate] * 4


@cache
def schedule(
    batch: int,
    length: int,
    heads: int,
    values: int,
    multiprocessors: int,
    *,
    packed: int | None = None,
    gate: str = "channel",
    beside: bool = True,
    tile_microseconds: float = 6.0,
) -> Schedule:
    """The schedule of ``batch`` entries, or of ``packed`` sequences in one, on a GPU with so many multiprocessors.

    The scan's steps depend on each other, and a block fills a multiprocessor: half the columns a block while that
    still lets every block run at once, and segments while they still fill idle multiprocessors. What is idle still
    prepares the next run, ``tile_microseconds`` a tile.
    """
    chunks = -(-length // CHUNK) if packed is None else length // CHUNK + packed
    lanes = heads * (batch if packed is None else packed)
    tiles = heads * batch
    columns = 64 if values <= 64 or lanes * -(-values // 64) <= multiprocessors else 128
    blocks = -(-values // columns)
    fits = max(1, SCRATCH_LIMIT // (tiles * tile_bytes(gate)))
    run = min(chunks, fits)
    plain = Schedule(chunks, run, columns, 1, blocks * columns, tiles, lanes, gate)
    if packed is not None:
        return plain
    segments = _segments(run, lanes, blocks, WIDTH // columns, multiprocessors)
    if segments > 1:
        return replace(plain, segments=segments)
    if beside and run == chunks and columns == 64 and lanes * blocks < multiprocessors:
        return _side_by_side(plain, lanes * blocks, multiprocessors, tile_microseconds)
    return _overlapped(plain, fits // 2, lanes * blocks, multiprocessors, tile_microseconds)


def _side_by_side(plain: Schedule, programs: int, multiprocessors: int, tile: float) -> Schedule:
    """``plain`` with the scan's ``programs`` blocks beside the tiles it wants last.

    As many blocks leave after so many rounds that the others end before the scan needs what they prepare.
    """
    workers = multiprocessors * WORKERS[plain.gate]
    if plain.tiles < workers:
        return plain
    beside = (multiprocessors - programs) * plain.chunks * _STEP[plain.columns] / (_BESIDE * tile)
    rounds = math.ceil((plain.tiles - beside) / workers)
    return replace(plain, rounds=max(1, min(rounds, plain.tiles // workers)), early=programs)


def _segments(chunks: int, lanes: int, blocks: int, extra: int, multiprocessors: int) -> int:
    """The cheapest number of segments; ``extra``: blocks of the first pass beyond those of V."""

    def waves(programs: int) -> int:
        return -(-programs // multiprocessors)

    def cost(count: int) -> float:
        if count == 1:
            return chunks * waves(lanes * blocks) * _STEP[64]
        first = lanes * (blocks + (count - 2) * (blocks + extra))
        steps = -(-chunks // count) * (waves(first) + waves(lanes * blocks * count))
        return steps * _STEP[64] + _COMBINE * count + _SEGMENTS

    most = min(MAX_SEGMENTS, chunks)
    return min((count for count in range(1, most + 1) if -(-chunks // -(-chunks // count)) == count), key=cost)


def _overlapped(plain: Schedule, fits: int, programs: int, multiprocessors: int, tile: float) -> Schedule:
    """``plain`` cut into runs so that a run's scan (of ``programs`` blocks) and the next one's tiles share the machine.

    ``fits``: chunks of a run at most.
    """
    spare = multiprocessors - programs

    def beside(run: int) -> int:
        """Tiles on each idle multiprocessor while a run is scanned."""
        return int(run * _STEP[plain.columns] / tile)

    def cost(run: int) -> float:
        scan, tiles = run * _STEP[plain.columns], run * plain.tiles_per_chunk
        after = -(-max(0, tiles - spare * beside(run)) // multiprocessors) * tile
        steady = scan + after + _RUN
        return _alone(replace(plain, run=run), multiprocessors, tile) + (-(-plain.chunks // run) - 1) * steady

    least = -(-plain.chunks // fits)
    runs = {-(-plain.chunks // count) for count in range(max(2, least), 2 * least + 8)}
    wanted = [run for run in runs if run <= fits and 0 < spare * beside(run) < run * plain.tiles_per_chunk]
    best = min(wanted, key=cost, default=None)
    if best is None or (plain.run == plain.chunks and cost(best) >= _alone(plain, multiprocessors, tile)):
        return plain
    return replace(plain, run=best, spare=spare, beside=beside(best))


def _alone(plain: Schedule, multiprocessors: int, tile: float) -> float:
    """Microseconds of a schedule of one run: its tiles, then its scan."""
    return -(-plain.tiles // multiprocessors) * tile + plain.run * _STEP[plain.columns]
