"""The rows of the family over norms, gates, heads and lengths, a part of the CUDA suite: ``--case grid`` is it alone.

Every cell is one prompt in bf16, 128 channels a head, measured by replays of a CUDA graph: ours in all of them; FLA and
cudnn-frontend, where they are importable and have an operator for it, at 16 and 32 heads and T = 8192. The table gives
microseconds and how many times the floor that is, the bytes a call cannot avoid at the rate of a copy, and what peers
take over ours; the heat map (SVG) has the ratios to the floor.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kdacompile.bench import cudnn_kda, device_clock, record, rows
from kdacompile.bench.relay import LONGEST, Job, Outcome, Relay, Steps
from kdacompile.store.disk import write_whole

ROWS = {"kda": ("channel", True), "gdn": ("token", True), "gla": ("channel", False), "ssd": ("token", False)}
"""The kind of gate, and whether the row has the delta rule."""
GATES = ("sigmoid", "softplus", "log", "none")
HEADS = (4, 8, 16, 32, 96)
LENGTHS = (512, 2048, 8192, 65536)
PEERS_AT = (16, 32), 8192
MOST_AT_ONCE = 32 * 65536
"""Heads times tokens of a prompt that all processes may have in the device's memory at once."""


@dataclass(frozen=True)
class Cell:
    """``norm``: "inside" the op, "outside" of it, or "none"; ``gate``: its function, a log gate is in fp32."""

    row: str
    norm: str
    gate: str
    heads: int
    length: int


@dataclass(frozen=True)
class Timing:
    """Microseconds of device time; a peer's are None where it was not asked or has no such operator."""

    cell: Cell
    ours: float
    floor: float
    fla: float | None = None
    cudnn: float | None = None


def cells(heads: Sequence[int] = HEADS, lengths: Sequence[int] = LENGTHS) -> list[Cell]:
    """A gate per channel that is none is a gate per token that is none; keys are normalised for the delta rule only."""
    made: list[Cell] = []
    for row, (kind, delta) in ROWS.items():
        norms = ("inside", "outside") if delta else ("none",)
        gates = [gate for gate in GATES if gate != "none" or kind == "token"]
        made += [Cell(row, *rest) for rest in itertools.product(norms, gates, heads, lengths)]
    return made


def arguments(cell: Cell, device: str = "cuda") -> rows.Given:
    """Those of ``ops.linear_attention``, random."""
    kind, delta = ROWS[cell.row]
    given = rows.random_arguments(
        "none" if cell.gate == "none" else kind, cell.gate, cell.length, delta=delta, norm=cell.norm, heads=cell.heads,
        value_heads=cell.heads, device=device,
    )  # fmt: skip
    return given | {"output_final_state": True}


def peers_of(cell: Cell, given: rows.Given) -> dict[str, Callable[[], object]]:
    """Others' operators where they are asked for, and are there."""
    if cell.heads not in PEERS_AT[0] or cell.length != PEERS_AT[1]:
        return {}
    fla = rows.fla(given) if importlib.util.find_spec("fla") is not None else None
    return {name: call for name, call in (("fla", fla), ("cudnn", cudnn_kda.forward(given))) if call is not None}


def timing(cell: Cell) -> Timing:
    given = arguments(cell)
    floor = rows.unavoidable_bytes(given) / device_clock.rates()[0]
    peers = peers_of(cell, given)
    often = {"launches": 10, "repeats": 9} if cell.length <= PEERS_AT[1] else {"launches": 3, "repeats": 5}
    with torch.no_grad():
        ours = device_clock.device_microseconds(rows.ours(given), **often)
        others = {name: device_clock.device_microseconds(call) for name, call in peers.items()}
    return Timing(cell, ours, floor, **others)


def markdown(timings: Sequence[Timing]) -> str:
    """A line for each row, norm, gate and number of heads: microseconds by length, and the parts of the floor."""
    lengths = sorted({timing.cell.length for timing in timings})
    header = ["row", "norm", "gate", "heads", *(f"T = {length}" for length in lengths), "FLA / ours", "cudnn / ours"]
    lines = [header]
    for key, group in _lines(timings).items():
        found = {timing.cell.length: timing for timing in group}
        times = [_cell_text(found.get(length)) for length in lengths]
        lines.append([*map(str, key), *times, _ratio(group, "fla"), _ratio(group, "cudnn")])
    return record.markdown(lines)


def heat_map(timings: Sequence[Timing]) -> str:
    """Device time over the floor as SVG: green at the floor, red at ten times the floor and beyond."""
    lengths = sorted({timing.cell.length for timing in timings})
    lines = _lines(timings)
    width, height = 210 + 64 * len(lengths), 22 + 16 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' style="background:white">'
    ]
    parts += [
        f'<text x="{214 + 64 * n}" y="14" font-size="11">{length}</text>' for n, length in enumerate(lengths)
    ]  # fmt: skip
    for n, (key, group) in enumerate(lines.items()):
        y = 20 + 16 * n
        parts.append(f'<text x="4" y="{y + 12}" font-size="11">{" ".join(map(str, key))} heads</text>')
        for timing in group:
            x, ratio = 210 + 64 * lengths.index(timing.cell.length), timing.ours / timing.floor
            hue = 120 * (1 - (min(ratio, 10.0) - 1) / 9)
            parts.append(f'<rect x="{x}" y="{y}" width="62" height="15" fill="hsl({hue:.0f},65%,60%)"/>')
            parts.append(f'<text x="{x + 18}" y="{y + 12}" font-size="11">{ratio:.1f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell_text(timing: Timing | None) -> str:
    return "" if timing is None else f"{timing.ours:.0f} us, {timing.ours / timing.floor:.1f}x"


def _ratio(timings: Sequence[Timing], peer: str) -> str:
    found = ((getattr(timing, peer), timing.ours) for timing in timings)
    return " ".join(f"{theirs / ours:.2f}x" for theirs, ours in found if theirs is not None)


def _lines(timings: Sequence[Timing]) -> dict[tuple[str, str, str, int], list[Timing]]:
    lines: dict[tuple[str, str, str, int], list[Timing]] = {}
    for timing in timings:
        cell = timing.cell
        lines.setdefault((cell.row, cell.norm, cell.gate, cell.heads), []).append(timing)
    return lines


def run(json_path: Path, timeout: float | None) -> int:
    """The whole grid, a process for each row, norm and gate; tables and heat map are written as these end.

    They are ``-grid.json``, ``-grid.md`` and ``-grid.svg`` beside ``json_path``. Returns how many processes failed.
    """
    timings: list[Timing] = []
    failures: list[str] = []
    writing = threading.Lock()
    lines = dict.fromkeys(f"{cell.row} {cell.norm} {cell.gate}" for cell in cells())
    order = {cell: number for number, cell in enumerate(cells())}

    def done(job: Job, outcome: Outcome) -> None:
        print(f"grid, {job.name}: {outcome.reason if outcome.failure else 'done'}", file=sys.stderr, flush=True)
        with writing:
            failures.extend([] if outcome.failure is None else [job.name])
            timings.extend(Timing(Cell(**one.pop("cell")), **one) for one in outcome.found.values())
            timings.sort(key=lambda timing: order[timing.cell])
            stem = json_path.with_name(f"{json_path.stem}-grid.json")
            write_whole(stem, json.dumps([asdict(timing) for timing in timings]) + "\n")
            write_whole(stem.with_suffix(".md"), markdown(timings))
            write_whole(stem.with_suffix(".svg"), heat_map(timings))

    Relay(timeout or LONGEST, timeout or LONGEST).run(
        [[Job(line, __name__, line, "ours+fla", "fla") for line in lines]], done
    )
    print(markdown(timings))
    return len(failures)


def measured(line: str, contender: str) -> Steps:
    """One process: get ready, then measure.

    The largest prompt is left for its turn: those of all processes at once do not fit the device's memory.
    """
    own = [cell for cell in cells() if f"{cell.row} {cell.norm} {cell.gate}" == line]
    for cell in (cell for cell in own if cell.heads * cell.length <= MOST_AT_ONCE):
        given = arguments(cell)
        with torch.no_grad():
            for call in (rows.ours(given), *peers_of(cell, given).values()):
                call()
        del given
        torch.cuda.empty_cache()
    yield None
    for cell in own:
        yield f"{cell.heads} {cell.length}", asdict(timing(cell))
