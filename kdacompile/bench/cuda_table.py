"""The CUDA suite's tables."""

from __future__ import annotations

from collections.abc import Sequence

from kdacompile.bench import record
from kdacompile.bench.cuda_cases import MODELS, Case
from kdacompile.bench.record import Figures, Results

_HEADER = ("case", "contender", "device", "of floor", "/ ours", "eager", "first call", "peak", "error o", "error S")
_MODEL_HEADER = (
    "model", "contender", "prefill", "decode", "device", "first calls", "graphs", "matches", "logits error",
)  # fmt: skip


Rows = list[tuple[str, ...]]


def table(cases: Sequence[Case], results: Results) -> str:
    """One row a contender; ratios are of device times, floor over contender and contender over ours."""
    return "\n\n".join(map(record.aligned, _parts(cases, results)))


def markdown(cases: Sequence[Case], results: Results) -> str:
    """The same as Markdown tables."""
    return "\n".join(map(record.markdown, _parts(cases, results)))


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
        f"{figures['peak_bytes'] / 2**20:.0f} MiB",
        f"{figures['error_output']:.1e}",
        f"{figures['error_state']:.1e}",
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


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
