"""What kdacompile did to a model, for people and for programs: text, JSON, a page.

One :class:`~kdacompile.report.findings.GraphReport` comes out of each run of the pass; a :class:`Report` gathers those
of one call (see :mod:`kdacompile.report.collect` and :func:`kdacompile.explain`). Everything but ``Report.result``
survives a round trip through JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from kdacompile.compat import graph_breaks
from kdacompile.errors import ReportFormatError, StrictError
from kdacompile.report.findings import Findings, GraphBreak, GraphReport, Match, Rejection, Saved, Stage, merge
from kdacompile.report.page import near_miss_page, render
from kdacompile.settings import Settings

_FORMAT = 1


@dataclass
class Report(Findings):
    """Everything about one call, to read and to keep."""

    def __str__(self) -> str:
        title = "kdacompile report" + (f" for {self.title}" if self.title else "")
        counts = [f"{count} x {name}" for name, count in self.counts.items()]
        counts += [f"{rejection.count} x {rejection.pattern} declined by cost" for rejection in self.declined]
        summary = ", ".join(counts) or "no matches"
        lines = [title, f"{self.graph_count} graph{'' if self.graph_count == 1 else 's'}, {summary}"]
        if self.saved:
            lines.append(f"estimated gain: {self.saved.text}")
        lines += _section("matches", [layers.text(self.device) for layers in self.layers])
        lines += _section("near misses, left to Inductor", self.rejections)
        lines += _section("matched, and left to Inductor, which is estimated to be faster", self.declined)
        if left := [*self.rejections, *self.declined]:
            codes = dict.fromkeys(rejection.code for rejection in left)
            lines += ["  what to do: " + ", ".join(near_miss_page(code) for code in codes)]
        lines += _section("graph breaks, across which no pattern reaches", self.graph_breaks)
        if self.seconds:
            spent = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in self.seconds.items())
            lines += ["", f"kdacompile's own time in seconds: {spent}"]
        return "\n".join(lines)

    def to_json(self) -> str:
        payload = {
            "format": _FORMAT,
            "title": self.title,
            "captured": self.captured,
            "device": self.device,
            "saved": asdict(self.saved) if self.saved else None,
            "graphs": [asdict(graph) for graph in self.graphs],
            "graph_breaks": [asdict(graph_break) for graph_break in self.graph_breaks],
            "stages": [asdict(stage) for stage in self.stages],
        }
        return json.dumps(payload, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        try:
            payload = json.loads(text)
        except json.JSONDecodeError as error:
            raise ReportFormatError(detail=str(error)) from error
        if not isinstance(payload, dict):
            raise ReportFormatError(detail="the top level is not an object")
        fields = cast("dict[str, Any]", payload)
        if fields.get("format") != _FORMAT:
            raise ReportFormatError(detail=f"format {fields.get('format')!r}, this version reads {_FORMAT}")
        try:
            return cls(
                graphs=[graph_from_dict(graph) for graph in fields["graphs"]],
                graph_breaks=[GraphBreak(**graph_break) for graph_break in fields["graph_breaks"]],
                captured=fields["captured"],
                title=fields["title"],
                device=fields.get("device", ""),
                saved=Saved(**fields["saved"]) if fields.get("saved") else None,
                stages=[Stage(**stage) for stage in fields.get("stages", [])],
            )
        except (KeyError, TypeError) as error:
            raise ReportFormatError(detail=f"{type(error).__name__}: {error}") from error

    def to_html(self) -> str:
        """A page of its own, nothing loaded from elsewhere."""
        return render(self)


def graph_from_dict(graph: Mapping[str, Any]) -> GraphReport:
    """The inverse of ``dataclasses.asdict``, also after JSON has made lists of the tuples."""
    return GraphReport(
        matches=tuple(match_from_dict(**match) for match in graph["matches"]),
        rejections=tuple(Rejection(**rejection) for rejection in graph["rejections"]),
        nodes=graph["nodes"],
        seconds=dict(graph["seconds"]),
        from_cache=graph["from_cache"],
    )


def match_from_dict(absorbed: Iterable[str], holds: Iterable[str] = (), **fields: Any) -> Match:
    """The inverse of ``dataclasses.asdict``, as ``graph_from_dict``."""
    return Match(absorbed=tuple(absorbed), holds=tuple(holds), **fields)


def enforce(graph: GraphReport, settings: Settings) -> None:
    """Raise :class:`StrictError` where one graph misses what ``kda.strict`` or ``kda.expect`` demand of it."""
    declined = [rejection for rejection in graph.rejections if rejection.declined]
    near = [rejection for rejection in graph.rejections if not rejection.declined]
    reasons = [str(rejection) for rejection in merge(near)]
    found = Counter(match.pattern for match in graph.matches)
    for rejection in declined:
        found[rejection.pattern] += rejection.count
    more = [f"found: {match.pattern} at {match.source}" for match in graph.matches]
    more += [f"found: {rejection}" for rejection in merge(declined)]
    more += [f"graph break in this process, across which no pattern reaches: {first_line(b)}" for b in graph_breaks()]
    short = [f"{name}: {found[name]} of {count}" for name, count in settings.expect if found[name] < count]
    if short:
        problem = "kda.expect: fewer matches than expected (" + ", ".join(short) + ")"
        raise StrictError(problem=problem, reasons=reasons, more=more)
    if settings.strict and near:
        raise StrictError(problem="kda.strict: near misses were left to Inductor", reasons=reasons, more=more)
    if settings.strict and not found:
        problem = f"kda.strict: nothing matched in a graph of {graph.nodes} nodes"
        raise StrictError(problem=problem, reasons=reasons, more=more)


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _section(title: str, entries: Iterable[object]) -> list[str]:
    lines = [f"  {entry}" for entry in entries]
    return ["", f"{title}:", *lines] if lines else []
