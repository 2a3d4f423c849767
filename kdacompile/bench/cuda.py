"""The CUDA suite: our op beside the emitted kernels alone, the compiled PyTorch function, FLA and the floor.

Every contender of every case runs in a process of its own with empty compiler caches (with FLA imported, transformers
binds its functions). The table gives device time (replays of a CUDA graph), the time of eager launches, the first call,
peak memory and the error against the fp64 recurrence; a JSON file has everything, an SVG the device times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdacompile.doctor import version_of
from kdacompile.errors import BenchError, MissingDependencyError

CONTENDERS = ("ours", "portable", "kda", "inductor", "fla")
_STDERR_TAIL = 15


@dataclass(frozen=True)
class Case:
    """One call in bf16. ``kind``: "kda" (raw gate, bounded; l2norm and sigmoid of beta fused), "gdn" (log gate), or
    "step" (one token of kda, the state overwritten). ``goal``: microseconds of device time to reach."""

    name: str
    kind: str
    batch: int
    length: int
    heads: int = 32
    value_heads: int = 32
    width: int = 128
    goal: float | None = None


CASES = (
    Case("kda-t8192", "kda", 1, 8192, goal=330),
    Case("kda-h96", "kda", 1, 8192, 96, 96, goal=920),
    Case("kda-b4", "kda", 4, 4096, goal=620),
    Case("kda-t2048", "kda", 1, 2048, goal=105),
    Case("kda-t65536", "kda", 1, 65536, goal=2500),
    Case("kda-odd", "kda", 1, 5001, 5, 5, width=96),
    Case("gdn-t8192", "gdn", 1, 8192, 16, 32, goal=240),
    Case("step-b1", "step", 1, 1, goal=12),
    Case("step-b64", "step", 64, 1),
    Case("step-b256", "step", 256, 1, goal=280),
)

Figures = dict[str, Any]
Results = dict[str, dict[str, Figures]]


def main(only: Sequence[str] | None, json_path: Path, timeout: float) -> int:
    """Run, print the table, write the JSON and the plot. Exit status 1 where one of ours failed."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(what="bench suite 'cuda'", package="torch", install="torch") from error
    if not torch.cuda.is_available():
        raise BenchError(detail="the cuda suite needs a CUDA device")
    cases = [case for case in CASES if not only or any(part in case.name for part in only)]
    if not cases:
        raise BenchError(
            detail=f"no case matches {', '.join(only or ())}; there are {', '.join(c.name for c in CASES)}"
        )
    results: Results = {}
    for case in cases:
        results[case.name] = {}
        for contender in CONTENDERS:
            figures = _run(case, contender, timeout)
            results[case.name][contender] = figures
            print(f"{case.name}, {contender}: {_summary(figures)}", file=sys.stderr, flush=True)
    print(table(cases, results))
    record: dict[str, Any] = {"suite": "cuda", "device": torch.cuda.get_device_name(0), "versions": _versions()}
    record["cases"] = [{**asdict(case), "results": results[case.name]} for case in cases]
    json_path.write_text(json.dumps(record, indent=2) + "\n")
    plot_path = json_path.with_suffix(".svg")
    plot_path.write_text(plot(cases, results))
    print(f"\nwritten to {json_path} and {plot_path}")
    ours = [
        figures for by_name in results.values() for name, figures in by_name.items() if name in ("ours", "portable")
    ]
    return 1 if any("failure" in figures for figures in ours) else 0


def _run(case: Case, contender: str, timeout: float) -> Figures:
    with tempfile.TemporaryDirectory(prefix="kdacompile-bench-") as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "KDACOMPILE_CACHE_DIR": "kda"}
        environment = {**os.environ, **{name: str(Path(folder, place)) for name, place in caches.items()}}
        out = Path(folder, "result.json")
        command = [sys.executable, "-m", "kdacompile.bench.cuda_worker", json.dumps(asdict(case)), contender, str(out)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"not finished after {timeout:.0f} s"}
        if done.returncode != 0 or not out.exists():
            tail = done.stderr.splitlines()[-_STDERR_TAIL:]
            return {"failure": tail[-1] if tail else f"exit status {done.returncode}", "stderr": tail}
        return json.loads(out.read_text())


def table(cases: Sequence[Case], results: Mapping[str, Mapping[str, Figures]]) -> str:
    """One row a contender; ratios are of device times, floor over contender and contender over ours."""
    header = ("case", "contender", "device", "of floor", "/ ours", "eager", "first call", "peak", "error o", "error S")
    rows: list[tuple[str, ...]] = [header]
    for case in cases:
        found = results[case.name]
        ours = found.get("ours", {}).get("device_us")
        for contender, figures in found.items():
            rows.append((case.name, contender, *_cells(figures, ours)))
        floors = [figures["floor_us"] for figures in found.values() if "floor_us" in figures]
        if floors:
            goal = "" if case.goal is None else f"goal {case.goal:g} us"
            rows.append((case.name, "floor", f"{floors[0]:.0f} us", "", "", goal, "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cells(figures: Figures, ours: float | None) -> tuple[str, ...]:
    if "failure" in figures:
        return (f"- {figures['failure'][:60]}", "", "", "", "", "", "", "")
    device = figures["device_us"]
    return (
        f"{device:.1f} us",
        f"{figures['floor_us'] / device:.0%}",
        "" if ours is None else f"{device / ours:.2f}x",
        f"{figures['eager_us']:.1f} us",
        f"{figures['first_call_seconds']:.2f} s",
        f"{figures['peak_bytes'] / 2**20:.0f} MiB",
        f"{figures['error_output']:.1e}",
        f"{figures['error_state']:.1e}",
    )


def _summary(figures: Figures) -> str:
    return figures["failure"] if "failure" in figures else f"{figures['device_us']:.1f} us on the device"


def plot(cases: Sequence[Case], results: Mapping[str, Mapping[str, Figures]]) -> str:
    """Device time over the floor, a bar a contender, as SVG; 1 is the floor."""
    bars: list[tuple[str, float]] = []
    for case in cases:
        for contender, figures in results[case.name].items():
            if "device_us" in figures:
                bars.append((f"{case.name} {contender}", figures["device_us"] / figures["floor_us"]))
    longest = max((ratio for _, ratio in bars), default=1.0)
    height = 18 * len(bars) + 30
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height}" font-family="sans-serif">']
    lines.append('<text x="8" y="16" font-size="12">device time over the floor (shorter is better)</text>')
    for row, (label, ratio) in enumerate(bars):
        y = 26 + 18 * row
        color = "#2a6" if label.endswith(" ours") else "#59c" if label.endswith(" portable") else "#aaa"
        lines.append(f'<text x="8" y="{y + 11}" font-size="11">{label}</text>')
        lines.append(f'<rect x="180" y="{y}" width="{480 * ratio / longest:.1f}" height="14" fill="{color}"/>')
        lines.append(f'<text x="{186 + 480 * ratio / longest:.1f}" y="{y + 11}" font-size="11">{ratio:.1f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _versions() -> dict[str, str | None]:
    return {name: version_of(name) for name in ("torch", "triton", "kdacompile", "transformers", "fla-core")}
