"""How a call on Hopper is cut: blocks of V, runs of chunks that share a buffer, segments that are scanned at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter

CHUNK = 64
WIDTHS = 64, 128  # K is padded to one of these
WORKERS = {"channel": 1, "token": 3}  # tiles a block prepares at once, by the gate's kind
SCRATCH_LIMIT = 2**30  # bytes between the kernels, unless one chunk of all heads takes more
MAX_SEGMENTS = 64
JOINED = (1,)  # segments that a block of the first pass may take: two were slower but with 1 head (docs/cuda.md)
FEW_BLOCKS = 32  # with more of them beside tiles another order of a chunk's products is faster

# Chunks that a block of the scan holds or loads, by width and columns.
_STAGES = {(128, 64): 3, (128, 128): 2, (64, 64): 4, (64, 128): 3}

# The same of few blocks, in two rings, by what they leave.
CHANNEL_STAGES = {"outputs": (4, 3), "maps": (5, 5)}

LINEAR_STAGES = {128: 4, 64: 6}  # the same of rows without the delta rule, by width

# Microseconds on an H200.
_STEP = {(128, 64): 0.96, (128, 128): 2.3, (64, 64): 0.70, (64, 128): 1.6}  # of the scan, by width and columns
_FIRST, _CROWDED = 0.65, 1.2  # of a scan in segments: a step of its first pass, and of its second, in steps
_FEW_FIRST, _FEW_CROWDED = 0.8, 0.97  # the same of few blocks
_START, _COMBINE = 5.0, 0.9  # a kernel of the scan starts and ends; the state is carried over a segment
_FEW_CARRY = 1.3  # the same by few blocks
_FEW_BESIDE, _LED = 0.92, 5.0  # a step of few blocks beside tiles, in steps; what segments lose behind such a scan
_SUPPLY = 1.05  # tiles beside few blocks, over those they take
_TOGETHER = 10.0  # what a scan loses beside the tiles it waits for
_BESIDE = 0.95  # a tile beside a scan, in tiles, over a step of that scan, in steps: both take longer
_RUN = 45.0  # another run: kernels that start and end, and share the memory's bandwidth
_BYTES = 3.3e6  # what a scan reads in one
# Of rows without the delta rule: a chunk in a block of the scan by width, of the first pass over segments in parts of
# that, and the state that one of the segments before leaves to a block of the second.
_LINEAR_STEP, _LINEAR_FIRST, _LOOK_BACK = {128: 1.05, 64: 0.75}, 0.5, 0.6


@dataclass(frozen=True)
class Schedule:
    """``chunks`` of a sequence (packed: the most there can be of all), ``run`` of them share one buffer.

    A block of the scan has ``columns`` of V's ``padded_values``; ``segments`` of a run are scanned at once, ``joined``
    of them in a block of the first pass. With
    ``spare`` multiprocessors that a scan leaves idle the next run is prepared beside it, ``beside`` tiles on each.
    With ``early`` blocks that leave after ``rounds`` tiles the scan starts while the others still prepare tiles, where
    there are segments with ``leading`` chunks before them; as many as the scan has blocks, or more.
    ``tiles_per_chunk``: value heads, times batch entries unless these are packed. ``sequence_heads``: heads of all
    sequences. ``width``: K, padded. ``folded``: tiles may be what ``fold.py`` makes of them.
    """

    chunks: int
    run: int
    columns: int
    segments: int
    padded_values: int
    tiles_per_chunk: int
    sequence_heads: int
    width: int = 128
    gate: str = "channel"
    delta: bool = True
    spare: int = 0
    beside: int = 0
    rounds: int = 0
    early: int = 0
    leading: int = 0
    joined: int = 1
    folded: bool = False

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First chunk and number of chunks of every run."""
        return [(first, min(self.run, self.chunks - first)) for first in range(0, self.chunks, self.run)]

    @property
    def tiles(self) -> int:
        return self.tiles_per_chunk * self.run

    @property
    def few(self) -> bool:
        """Whether a scan with a gate per channel has so few blocks that a chunk's chain is what it waits for."""
        narrow = self.gate == "channel" and self.delta and (self.width, self.columns) == (128, 64)
        return self.folded and narrow and self.sequence_heads * (self.padded_values // self.columns) <= FEW_BLOCKS

    @property
    def segment_buffers(self) -> tuple[tuple[int, int, int, int], ...]:
        """What the first pass over segments leaves, and the states between them if a kernel makes these; fp32."""
        lines = (self.sequence_heads, self.width)
        values = self.padded_values
        if not self.delta:
            return (self.segments - 1, self.sequence_heads, values, self.width), (
                self.segments - 1,
                self.sequence_heads,
                1,
                self.width,
            )
        ends = (self.segments - 1, *lines, values + self.width)
        return (ends,) if self.few else (ends, (self.segments, *lines, values))

    @property
    def scratch_bytes(self) -> int:
        """What a call allocates between its kernels."""
        segmented = sum(4 * a * b * c * d for a, b, c, d in self.segment_buffers) if self.segments > 1 else 0
        announced = 4 * self.tiles if self.early else 0
        return self.buffers * self.tiles * self.tile_bytes + segmented + announced

    @property
    def step(self) -> float:
        """Microseconds of a chunk in a block of the scan."""
        return _STEP[self.width, self.columns] if self.delta else _LINEAR_STEP[self.width]

    @property
    def stages(self) -> int:
        """Chunks that a block of the scan holds or loads."""
        return _STAGES[self.width, self.columns] if self.delta else LINEAR_STAGES[self.width]

    @property
    def tile_bytes(self) -> int:
        """What a chunk of one head leaves between the kernels."""
        return tile_bytes(self.gate, self.width, self.delta)

    @property
    def buffers(self) -> int:
        """Runs that are in memory at once."""
        return 2 if self.spare else 1


def padded(keys: int) -> int:
    """The width that the kernels give K."""
    return next(width for width in WIDTHS if keys <= width)


def tile_rows(gate: str, width: int, delta: bool = True) -> int:
    """Rows of ``width`` bf16 that a chunk of one head leaves between the kernels; the last are its square matrices."""
    if not delta:
        return 2 * CHUNK + CHUNK * CHUNK // width if gate == "channel" else 0
    return (3 * CHUNK if gate == "channel" else 0) + 2 * CHUNK * CHUNK // width


def tile_factors(gate: str, width: int, delta: bool = True) -> int:
    """fp32 numbers beside them."""
    if gate == "channel":
        return width
    return 4 * CHUNK if delta else 0


def tile_bytes(gate: str, width: int, delta: bool = True) -> int:
    return tile_rows(gate, width, delta) * width * 2 + tile_factors(gate, width, delta) * 4


@cache
def schedule(
    batch: int,
    length: int,
    heads: int,
    values: int,
    multiprocessors: int,
    *,
    packed: int | None = None,
    width: int = 128,
    gate: str = "channel",
    delta: bool = True,
    folded: bool = True,
    tile_microseconds: float = 6.0,
) -> Schedule:
    """The schedule of ``batch`` entries, or of ``packed`` sequences in one, on a GPU with so many multiprocessors.

    The scan's steps depend on each other, and a block fills a multiprocessor: half the columns a block while that
    still lets every block run at once. What the scan leaves idle takes the fastest of segments, tiles that the scan
    wants last, and the next run's tiles, ``tile_microseconds`` each. Without the ``delta`` rule a block always has half
    the columns, and with a gate per token it prepares its chunks itself.
    """
    chunks = -(-length // CHUNK) if packed is None else length // CHUNK + packed
    sequence_heads = heads * (batch if packed is None else packed)
    tiles = heads * batch
    columns = 64 if not delta or values <= 64 or sequence_heads * -(-values // 64) <= multiprocessors else 128
    blocks = -(-values // columns)
    fits = max(1, SCRATCH_LIMIT // max(1, tiles * tile_bytes(gate, width, delta)))
    run = min(chunks, fits)
    plain = Schedule(chunks, run, columns, 1, blocks * columns, tiles, sequence_heads, width, gate, delta)
    if packed is not None:
        return plain
    plain = replace(plain, folded=folded)
    programs, tile = sequence_heads * blocks, tile_microseconds
    if not delta and gate == "token":
        return _linear(plain, programs, multiprocessors, 0.0)[0]
    options = [
        (_alone if delta else _linear)(plain, programs, multiprocessors, tile),
        _overlapped(plain, fits // 2, programs, multiprocessors, tile),
        *_led(plain, programs, multiprocessors, tile),
    ]
    if run == chunks and columns == 64 and programs < multiprocessors:
        options.append(_side_by_side(plain, programs, multiprocessors, tile))
    return min(filter(None, options), key=lambda option: option[1])[0]


Option = tuple[Schedule, float]  # and its microseconds, by the rules above


def _linear(plain: Schedule, programs: int, multiprocessors: int, tile: float) -> Option:
    """Without the delta rule: all tiles, then the scan in segments, which need not run at once."""
    prepared = _prepared(plain.tiles, plain, multiprocessors, tile) if tile else 0.0
    best = plain, -(-programs // multiprocessors) * plain.run * plain.step
    for count in range(2, min(MAX_SEGMENTS, plain.run) + 1) if plain.run == plain.chunks else ():
        chunks = -(-plain.run // count)
        if -(-plain.run // chunks) == count:
            first = -(-programs * (count - 1) // multiprocessors) * chunks * plain.step * _LINEAR_FIRST
            second = -(-programs * count // multiprocessors) * (chunks * plain.step + (count - 1) * _LOOK_BACK)
            best = min(best, (replace(plain, segments=count), _START + first + second), key=lambda option: option[1])
    return best[0], len(plain.spans) * (prepared + _START + best[1])


def _prepared(tiles: int, plain: Schedule, multiprocessors: int, tile: float) -> float:
    """Microseconds of so many tiles on the whole machine."""
    workers = WORKERS[plain.gate]
    return -(-tiles // (multiprocessors * workers)) * tile * workers


def _read(plain: Schedule) -> float:
    """Microseconds in which a scan can read what a run of chunks has left."""
    return plain.tiles * plain.tile_bytes / _BYTES


def _alone(plain: Schedule, programs: int, multiprocessors: int, tile: float) -> Option:
    """Of every run all tiles, then the scan: in segments where these run at once and take less."""
    best, microseconds = _segmented(plain, plain.run, programs, multiprocessors)
    return best, (microseconds + _prepared(plain.tiles, plain, multiprocessors, tile)) * len(plain.spans)


def _segmented(plain: Schedule, run: int, programs: int, multiprocessors: int) -> tuple[Schedule, float]:
    """So many chunks whose tiles are there, in segments where these run at once, and the microseconds of the scan."""
    step = plain.step
    first, second, carried = (_FEW_FIRST, _FEW_CROWDED, _FEW_CARRY) if plain.few else (_FIRST, _CROWDED, _COMBINE)
    extra = programs + plain.sequence_heads * plain.width // plain.columns  # blocks of a segment in the first pass
    read = run * plain.tiles_per_chunk * plain.tile_bytes / _BYTES
    best = plain, _START + run * step
    for count in range(2, min(MAX_SEGMENTS, run, multiprocessors // programs) + 1):
        chunks = -(-run // count)
        for joined in JOINED if plain.few else (1,):
            blocks = -(-(count - 1) // joined)
            if -(-run // chunks) == count and programs + (blocks - 1) * extra <= multiprocessors:
                passes = max(chunks * joined * step * first, read) + max(chunks * step * second, read)
                microseconds = 2 * _START + passes + carried * (blocks + 1)
                best = min(best, (replace(plain, segments=count, joined=joined), microseconds), key=itemgetter(1))
    return best


def _led(plain: Schedule, programs: int, multiprocessors: int, tile: float) -> Iterator[Option]:
    """The scan of the first chunks beside the tiles, for as long as these take, then the others in segments."""
    if not plain.few or plain.run < plain.chunks or programs >= FEW_BLOCKS:
        return
    for rounds in (1, 2):
        late = -(-(plain.tiles - rounds * multiprocessors) // (multiprocessors - programs))
        leading = int((late * tile - _START) / (plain.step * _FEW_BESIDE))
        if 0 < leading < plain.run:
            best, after = _segmented(plain, plain.run - leading, programs, multiprocessors)
            if best.segments > 1:
                led = replace(best, rounds=rounds, early=programs, leading=leading)
                yield led, (rounds + late) * tile + _LED + after


def _side_by_side(plain: Schedule, programs: int, multiprocessors: int, tile: float) -> Option | None:
    """The scan's blocks beside the tiles it wants last, if there are tiles enough.

    As many blocks leave after so many rounds that the others end before the scan needs what they prepare.
    """
    workers = multiprocessors * WORKERS[plain.gate]
    # A scan that waits for memory gains nothing by company.
    if plain.tiles < workers or _read(plain) > plain.chunks * plain.step:
        return None
    scan = plain.chunks * plain.step + _TOGETHER
    beside = (multiprocessors - programs) * scan / (_BESIDE * tile)
    rounds = max(1, min(math.ceil((plain.tiles - beside) / workers), plain.tiles // workers))
    scan *= _FEW_BESIDE if plain.few else 1.0
    microseconds = rounds * tile * WORKERS[plain.gate] + _START + scan
    return replace(plain, rounds=rounds, early=programs + _idle(plain, programs, multiprocessors, tile)), microseconds


def _idle(plain: Schedule, programs: int, multiprocessors: int, tile: float) -> int:
    """Multiprocessors left idle beside few blocks: more tiles than these take would only make their steps longer."""
    if not plain.few:
        return 0
    taken = plain.tiles_per_chunk / (plain.step * _FEW_BESIDE)  # tiles in a microsecond
    return max(0, multiprocessors - programs - math.ceil(_SUPPLY * taken * tile))


def _overlapped(plain: Schedule, fits: int, programs: int, multiprocessors: int, tile: float) -> Option | None:
    """Runs so that the scan of one and the tiles of the next share the machine; ``fits``: chunks of a run at most."""
    spare = multiprocessors - programs

    def beside(run: int) -> int:
        """Tiles on each idle multiprocessor while a run is scanned."""
        return int(run * plain.step / tile)

    def cost(run: int) -> float:
        scan, tiles = run * plain.step, run * plain.tiles_per_chunk
        after = _prepared(max(0, tiles - spare * beside(run)), plain, multiprocessors, tile)
        first = _prepared(tiles, plain, multiprocessors, tile) + _START + scan
        return first + (-(-plain.chunks // run) - 1) * (scan + after + _RUN)

    least = -(-plain.chunks // fits)
    runs = {-(-plain.chunks // count) for count in range(max(2, least), 2 * least + 8)}
    wanted = [run for run in runs if run <= fits and 0 < spare * beside(run) < run * plain.tiles_per_chunk]
    best = min(wanted, key=cost, default=None)
    return None if best is None else (replace(plain, run=best, spare=spare, beside=beside(best)), cost(best))
