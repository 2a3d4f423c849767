"""The CUDA suite's table and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kdacompile.bench.cuda_cases import MODELS, Case

Figures = dict[str, Any]
Results = Mapping[str, Mapping[str, Figures]]

_HEADER = ("case", "contender", "device", "of floor", "/ ours", "eager", "first call", "peak", "error o", "error S")
_MODEL_HEADER = (
    "model", "contender", "prefill", "decode", "device", "first calls", "graphs", "matches", "logits error",
)  # fmt: skip


Rows = list[tuple[str, ...]]


def table(cases: Sequence[Case], results: Results) -> str:
    """One row a contender; ratios are of device times, floor over contender and contender over ours."""
    return "\n\n".join(_aligned(rows) for rows in _parts(cases, results))


def markdown(cases: Sequence[Case], results: Results) -> str:
    """The same as Markdown tables."""
    parts: list[str] = []
    for header, *body in _parts(cases, results):
        rows = [header, ("---",) * len(header), *body]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(parts) + "\n"


def _parts(cases: Sequence[Case], results: Results) -> list[Rows]:
    """The rows of the ops and of the models, with their headers."""
    rows: Rows = [_HEADER]
    models: Rows = [_MODEL_HEADER]
    for case in cases:
        found = results[case.name]
        if case.kind in MODELS:
            models += [(case.name, contender, *_model_cells(figures)) for contender, figures in found.items()]
            continue
        ours = found.get("ours", {}).get("device_us")
        rows += [(case.name, contender, *_cells(figures, ours)) for contender, figures in found.items()]
        floors = [figures["floor_us"] for figures in found.values() if "floor_us" in figures]
        if floors:
            goal = "" if case.goal is None else f"goal {case.goal:g} us"
            rows.append((case.name, "floor", f"{floors[0]:.0f} us", "", "", goal, "", "", "", ""))
    return [part for part in (rows, models) if len(part) > 1]


def _aligned(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
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
        _seconds(figures.get("first_call_seconds")),
        f"{figures['peak_bytes'] / 2**20:.0f} MiB" + _saved(figures),
        f"{figures['error_output']:.1e}",
        f"{figures['error_state']:.1e}",
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _saved(figures: Figures) -> str:
    """What training keeps between forward and backward, a token."""
    return f", {figures['saved_bytes_a_token'] / 1024:.1f} KiB/token" if "saved_bytes_a_token" in figures else ""


def _model_cells(figures: Figures) -> tuple[str, ...]:
    if "failure" in figures:
        return (f"- {figures['failure'][:60]}", "", "", "", "", "", "")
    prefill = figures.get("prefill_tokens_a_second")
    return (
        "" if prefill is None else f"{prefill:,.0f} tokens/s",
        f"{figures['decode_ms']:.2f} ms/token",
        f"{figures['decode_device_us']:.0f} us",
        _seconds(figures["first_call_seconds"]),
        str(figures.get("graphs", "")),
        str(figures.get("matches", "")),
        f"{figures['error']:.1e}" if "error" in figures else "",
    )


def plot(cases: Sequence[Case], results: Results) -> str:
    """Device time over the floor, a bar a contender, as SVG; 1 is the floor."""
    bars: list[tuple[str, float]] = []
    for case in cases:
        for contender, figures in results[case.name].items():
            if "floor_us" in figures:
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
