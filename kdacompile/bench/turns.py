"""Inductor alone and ``backend="kda"`` in one process, in turns: what the cost models of the rewrite are fitted to.

Times are of the processor, which other programs do not lengthen, and the ratio is the median of the turns' own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from kdacompile.lowering.cpu.costs import Constants, Priced

SHORTEST = 2e-3
"""Seconds of a turn: of faster calls there are several in one."""

C = TypeVar("C")
Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Times:
    """Seconds of a call by contender, and quartiles of their ratio, kda over Inductor."""

    inductor: float
    kda: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        both = f"inductor {1e3 * self.inductor:.3f} ms, kda {1e3 * self.kda:.3f} ms"
        return f"{both}, ratio {self.ratio:.2f} ({self.low:.2f} to {self.high:.2f})"


def compare(calls: Calls, seconds: float) -> Times:
    """``calls``: "inductor" and "kda", compiled and called before."""
    times = _alternating(calls, seconds)
    ratios = [ours / theirs for ours, theirs in zip(times["kda"], times["inductor"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return Times(statistics.median(times["inductor"]), statistics.median(times["kda"]), ratio, low, high)


def _alternating(calls: Calls, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, in turns that begin with the one and with the other."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    many = max(1, int(SHORTEST / max(1e-6, min(_seconds(calls[name], 1) for name in order))))
    end = time.process_time() + seconds
    while len(times[order[0]]) < 8 or time.process_time() < end:
        order.reverse()
        for name in order:
            times[name].append(_seconds(calls[name], many))
    return times


def _seconds(call: Callable[[], object], many: int) -> float:
    start = time.process_time()
    for _ in range(many):
        call()
    return (time.process_time() - start) / many


def fitted(measured: Iterable[tuple[Priced, float, float]]) -> Constants:
    """The constants that estimate these seconds of Inductor and of the op best, relative to each (least squares); none
    is negative.
    """
    pairs = [(call.terms(op=op), times[op]) for call, *times in measured for op in (False, True)]
    relative = torch.tensor([[x / time for x in terms] for terms, time in pairs], dtype=torch.float64)
    scale = relative.amax(0).clamp_min(1e-300)
    kept = list(range(relative.shape[1]))
    while True:
        found = torch.linalg.lstsq(relative[:, kept] / scale[kept], relative.new_ones(len(pairs))).solution
        if bool((found >= 0).all()):
            break
        kept.pop(int(found.argmin()))
    constants = torch.zeros_like(scale)
    constants[kept] = found / scale[kept]
    return tuple(float(f"{x:.3g}") for x in constants)


def measure_all(
    argv: Sequence[str] | None,
    doc: str | None,
    cases: Callable[[bool], Iterable[C]],
    measure: Callable[[C, float], tuple[Priced, Times]],
) -> int:
    """The command line of a grid of cases; ``cases`` of which there are a few where its argument is true."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to keep the rows; those of other cases that it has stay")
    parser.add_argument("--seconds", type=float, default=1.0, help="processor time for each case")
    parser.add_argument("--small", action="store_true", help="some cases only")
    parser.add_argument("--part", default="0/1", help="every n-th case, from the i-th on: i/n")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    first, step = map(int, args.part.split("/"))
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text(encoding="utf-8"))["rows"]
    calls: list[tuple[Priced, float, float]] = []
    for case in list(cases(args.small))[first::step]:
        call, times = measure(case, args.seconds)
        print(f"{case}: {times!s}", flush=True)
        row: dict[str, Any] = {"case": asdict(case), "call": asdict(call), **asdict(times)}  # pyright: ignore[reportArgumentType]
        rows = [each for each in rows if each["case"] != row["case"]] + [row]
        calls.append((call, times.inductor, times.kda))
        if args.json:
            setting = {"torch": torch.__version__, "threads": 1, "rows": rows}
            args.json.write_text(json.dumps(setting, indent=1) + "\n", encoding="utf-8")
    for kind in sorted({call.kind for call, *_ in calls}):
        print(kind, fitted([each for each in calls if each[0].kind == kind]))
    return 0
