"""``python -m kdacompile.bench.charts FILE.json ...``: draws what a bench measured, as SVG, for light and dark pages.

A file is what ``kdacompile bench --json`` wrote; each is drawn alone, or with ``--merge`` all together: parts of a
suite that were measured one after the other, or forward and training of two suites under a ``--title``.
Where cases of one kind differ in their length, time is drawn against it, forward and training side by side; other
suites get a bar a contender. ``--out FOLDER`` says where; the names are those of the files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdacompile.errors import BenchError, KdaError, MissingDependencyError

Case = Mapping[str, Any]
Record = Mapping[str, Any]

_INK = {"light": ("#1c2430", "#c9d0d9"), "dark": ("#e4e8ee", "#3b4552")}  # text, lines
_COLOURS = {
    "kda": ("kdacompile", "#1a9850"),
    "ours": ("kdacompile, the op alone", "#1a9850"),
    "op": ("kdacompile, the op alone", "#74add1"),
    "portable": ("kdacompile, emitted Triton", "#74add1"),
    "inductor": ("Inductor", "#e08214"),
    "fla": ("flash-linear-attention", "#8073ac"),
    "cudnn": ("NVIDIA's cudnn-frontend", "#d73027"),
    "one": ("one GPU", "#969696"),
    "ranks": ("tokens on two GPUs", "#1a9850"),
    "eager": ("eager", "#969696"),
}


def _shown(contender: str) -> tuple[str, str]:
    """Its label and its colour."""
    return _COLOURS.get(contender, (contender, "#969696"))


def seconds_of(figures: Mapping[str, Any]) -> float | None:
    """The time of a call, in whatever the suite measured it."""
    for key, unit in (("run_seconds", 1.0), ("device_us", 1e-6), ("decode_ms", 1e-3), ("ms", 1e-3)):
        if figures.get(key):
            return float(figures[key]) * unit
    return None


def times(case: Case) -> dict[str, float]:
    """Seconds by contender, of those that have any."""
    found = {name: seconds_of(figures) for name, figures in case["results"].items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def panels(cases: Sequence[Case]) -> dict[str, list[Case]]:
    """Forward and training, the cases of each by their length; neither where lengths do not differ."""
    kinds = {
        "forward": [case for case in cases if not case.get("train")],
        "training": [c for c in cases if c.get("train")],
    }
    return {
        kind: sorted(found, key=lambda case: case["length"])
        for kind, found in kinds.items()
        if found and len({case.get("length") for case in found}) == len(found) > 1 and None not in map(_length, found)
    }


def _length(case: Case) -> int | None:
    return case.get("length")


def draw(cases: Sequence[Case], out: Path, title: str) -> list[Path]:
    """``out``-light.svg and ``out``-dark.svg; returns their paths.

    Raises :class:`~kdacompile.errors.MissingDependencyError` without matplotlib, and
    :class:`~kdacompile.errors.BenchError` where no case has a time.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingDependencyError(what="a chart", package="matplotlib", install="'kdacompile[plot]'") from error
    if not any(times(case) for case in cases):
        raise BenchError(detail=f"{title}: no case has a time")
    out.parent.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for theme, (ink, line) in _INK.items():
        colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
        style = {
            **colours, "axes.edgecolor": line, "grid.color": line, "axes.grid": True, "axes.axisbelow": True,
            "axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "legend.frameon": False,
            "svg.hashsalt": "kdacompile", "svg.fonttype": "path",
        }  # fmt: skip
        with matplotlib.rc_context(style):
            figure = _lines(panels(cases), title) if panels(cases) else _bars(cases, title)
            path = out.with_name(f"{out.name}-{theme}.svg")
            figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
        written.append(path)
    return written


def _lines(found: Mapping[str, Sequence[Case]], title: str) -> Any:
    ticker = importlib.import_module("matplotlib.ticker")
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(max(6.5, 4.6 * len(found)), 3.6), layout="constrained"
    )
    figure.suptitle(title, fontsize=10)
    every = dict.fromkeys(name for cases in found.values() for case in cases for name in times(case))
    for axes, (kind, cases) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for name in every:
            points = [(case["length"], 1e3 * times(case)[name]) for case in cases if name in times(case)]
            label, colour = _shown(name)
            axes.plot(
                *zip(*points, strict=True), "o-", label=label, color=colour, linewidth=2, markersize=4
            ) if points else None
        axes.set(xscale="log", yscale="log", title=kind, xlabel="tokens (T)", ylabel="ms a call")
        axes.set_xticks([case["length"] for case in cases], [str(case["length"]) for case in cases], minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    return figure


def _bars(cases: Sequence[Case], title: str) -> Any:
    rows = [(f"{case['name']}, {name}", name, seconds) for case in cases for name, seconds in times(case).items()]
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 0.24 * len(rows) + 1), layout="constrained"
    )
    axes = figure.subplots()
    axes.barh(
        [label for label, _, _ in rows],
        [1e3 * seconds for _, _, seconds in rows],
        color=[_shown(name)[1] for _, name, _ in rows],
    )
    axes.set(xscale="log", xlabel="ms a call (logarithmic)", title=title)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return figure


def title_of(record: Record) -> str:
    """What was measured, on what."""
    machine = record.get("device") or record.get("machine", {}).get("processor", "")
    torch = record.get("versions", {}).get("torch", "")
    return f"{record.get('title') or 'suite ' + str(record.get('suite'))}\n{machine}, torch {torch}"


def source_of(record: Record) -> str:
    """The command that measured it, and when."""
    command = record.get("source") or f"`kdacompile bench --suite {record['suite']}`"
    at = [record[key] for key in ("date", "commit") if record.get(key)]
    return f"{command} ({', '.join(at)})" if at else command


def load(path: Path) -> dict[str, Any]:
    """A file's record; of what matched and failed, no more than the counts."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "cases" not in record:
        raise BenchError(detail=f"{path} is not what `kdacompile bench --json` wrote")
    for figures in (figures for case in record["cases"] for figures in case["results"].values()):
        figures.pop("stderr", None)
        figures |= {key: len(figures[key]) for key in ("matches", "rejections") if isinstance(figures.get(key), list)}
    return record


def merged(records: Sequence[Record], title: str | None) -> dict[str, Any]:
    """All cases as one record, measured on one device with one torch."""
    if len({title_of({**record, "title": "", "suite": ""}) for record in records}) != 1:
        raise BenchError(detail="these files were measured on different devices or with different versions of torch")
    if title is None and len({record.get("suite") for record in records}) != 1:
        raise BenchError(detail="these files are of different suites: give what they have in common as --title")
    sources = "; ".join(dict.fromkeys(map(source_of, records)))
    about = {key: value for key, value in records[0].items() if key not in ("date", "commit")}
    common = {**about, "title": title or records[0].get("title"), "source": sources}
    return {**common, "cases": [case for record in records for case in record["cases"]]}


def page(records: Mapping[str, Record], charts: str) -> str:
    """A Markdown page of the records by name: where they come from, the chart, the times as a table."""
    parts = ["# Charts\n\nGenerated by `make charts` from the figures in `docs/results/`."]
    for name, record in records.items():
        what, _, machine = title_of(record).partition("\n")
        by_length = panels(record["cases"])
        drawn = "time against length" if by_length else "bars, time a call"
        named = {case["name"]: case for case in record["cases"]}
        if by_length:
            named = {f"{kind}, {c['length']} tokens": c for kind, cases in by_length.items() for c in cases}
        load = f" Load when it began: {record['load']}." if record.get("load") else ""
        parts += [
            f"## {what}",
            f"{machine}. Source: {source_of(record)}. Medians.{load}",
            _picture(f"{charts}/{name}", f"{what}: {drawn}"),
            _table(named),
            *_missing(named),
        ]
    return "\n\n".join(parts) + "\n"


def _table(cases: Mapping[str, Case]) -> str:
    contenders = list(dict.fromkeys(contender for case in cases.values() for contender in times(case)))
    labels = [_shown(contender)[0] for contender in contenders]
    rows = [["case", *labels], ["---"] * (len(labels) + 1)]
    for label, case in cases.items():
        found = times(case)
        rows.append([label, *(f"{1e3 * found[key]:.3g} ms" if key in found else "" for key in contenders)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _missing(cases: Mapping[str, Case]) -> list[str]:
    """A sentence of who was asked and has no time, with the reason."""
    failed = [
        f"{_shown(who)[0]}, {label} ({figures['failure'].strip()})"
        for label, case in cases.items()
        for who, figures in case["results"].items()
        if figures.get("failure") and seconds_of(figures) is None
    ]
    return [f"Without a time: {'; '.join(failed)}."] if failed else []


def _picture(path: str, text: str) -> str:
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{path}-dark.svg">'
        f'<img src="{path}-light.svg" alt="{text}"></picture>'
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the drawings (default: where the first file lies)")
    parser.add_argument("--merge", type=Path, help="write the files' cases there as one file, and draw that")
    parser.add_argument("--title", help="with --merge: what the files have in common")
    parser.add_argument("--page", type=Path, help="write a Markdown page with the drawings and tables there")
    arguments = parser.parse_args(argv)
    out = arguments.out or (arguments.merge or arguments.files[0]).parent
    try:
        records = {path.stem: load(path) for path in arguments.files}
        if arguments.merge:
            records = {arguments.merge.stem: merged(list(records.values()), arguments.title)}
            arguments.merge.write_text(json.dumps(records[arguments.merge.stem], indent=1) + "\n", encoding="utf-8")
        for name, record in records.items():
            for path in draw(record["cases"], out / name, title_of(record)):
                print(path)
        if arguments.page:
            folder = Path(os.path.relpath(out, arguments.page.parent)).as_posix()
            arguments.page.write_text(page(records, folder), encoding="utf-8")
    except (KdaError, OSError, json.JSONDecodeError) as error:
        print(f"charts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
