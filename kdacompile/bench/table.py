"""The figures of a suite as text: one table, then ours against Inductor alone with the marks to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdacompile.bench.record import aligned
from kdacompile.bench.suites import Case, Suite

Figures = Mapping[str, Any]
_HEADER = ("case", "contender", "first call", "run", "tensors peak", "process peak", "error o", "error state")
# ratio -> the figure it divides, Inductor's over ours
_RATIOS = {"first_call": "first_call_seconds", "run": "run_seconds", "memory": "peak_tensor_bytes"}
_WORDS = {"first_call": "first call", "run": "run", "memory": "tensor memory"}


def render(cases: Sequence[Case], suite: Suite, results: Mapping[str, Mapping[str, Figures]]) -> str:
    rows: list[tuple[str, ...]] = [_HEADER]
    for case in cases:
        for contender in suite.contenders_of(case):
            rows.append((f"{case.name} T={case.length}", contender, *_cells(results[case.name][contender])))
    lines = [aligned(rows), "", "ours (kda) against Inductor alone:"]
    lines += [_verdict(case, results[case.name]) for case in cases]
    failures = [
        f"{case.name}, {contender}: {figures['failure']}\n    " + "\n    ".join(figures.get("stderr", ()))
        for case in cases
        for contender, figures in results[case.name].items()
        if "failure" in figures
    ]
    return "\n".join(lines + (["", "failed:", *failures] if failures else []))


def ratios(by_contender: Mapping[str, Figures]) -> dict[str, float]:
    """How many times less than Inductor alone ours takes; empty where one of the two failed."""
    ours, theirs = by_contender.get("kda", {}), by_contender.get("inductor", {})
    comparable = {name: key for name, key in _RATIOS.items() if ours.get(key) and theirs.get(key)}
    return {name: theirs[key] / ours[key] for name, key in comparable.items()}


def one_line(figures: Figures) -> str:
    if "failure" in figures:
        return f"FAILED ({figures['failure']})"
    return f"first call {figures['first_call_seconds']:.2f} s, run {_run(figures)}"


def _verdict(case: Case, by_contender: Mapping[str, Figures]) -> str:
    found = ratios(by_contender)
    if not found:
        asked = "a contender failed" if "inductor" in by_contender else "Inductor is not asked at this length"
        return f"  {case.name}: cannot be compared, {asked}"
    parts: list[str] = []
    for name, ratio in found.items():
        goal: float | None = getattr(case.goal, name)
        mark = "" if goal is None else f" (goal {goal:g}x: {'reached' if ratio >= goal else 'MISSED'})"
        parts.append(f"{_WORDS[name]} {ratio:.1f}x better{mark}")
    unmatched = "" if by_contender["kda"]["matches"] else "; NOTHING MATCHED, this is Inductor itself"
    return f"  {case.name}: " + ", ".join(parts) + unmatched


def _cells(figures: Figures) -> tuple[str, ...]:
    if "failure" in figures:
        return ("failed", *([""] * (len(_HEADER) - 3)))
    return (
        f"{figures['first_call_seconds']:.2f} s",
        _run(figures),
        _mebibytes(figures["peak_tensor_bytes"]),
        _mebibytes(figures["first_call_resident_bytes"]),
        f"{figures['error_output']:.1e}",
        f"{figures['error_state']:.1e}",
    )


def _run(figures: Figures) -> str:
    """The median, and half of the interquartile range."""
    half = 0.5 * (figures.get("run_high_seconds", 0.0) - figures.get("run_low_seconds", 0.0))
    return f"{1e3 * figures['run_seconds']:.2f} ±{1e3 * half:.2f} ms"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f} MiB"
