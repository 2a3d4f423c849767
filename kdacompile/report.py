"""What kdacompile did to a model: matches, near misses with their reasons, graphs, breaks. Data first, text second.

One :class:`GraphReport` comes out of each run of the pass; a :class:`Report` gathers those of one call (see
:mod:`kdacompile.collect` and :func:`kdacompile.explain`). Everything but ``Report.result`` survives a round trip
through JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from kdacompile.errors import ReportFormatError, StrictError
from kdacompile.settings import Settings

_FORMAT = 1


@dataclass(frozen=True)
class Match:
    """A region that was proven and rewritten."""

    pattern: str  # a row of the family: kda, gated_delta_rule, retention, ...
    mode: str  # "sequence" or "step"
    source: str  # "file:line" of the user's code
    roles: Mapping[str, str]  # q, k, v, g, beta, ... -> what plays the role
    max_error: float  # largest relative error of the proof, against the fp64 recurrence
    op: str  # the semantic op that replaced the region
    absorbed: tuple[str, ...] = ()  # what upstream was fused into it: l2norm, gate activation, casts, ...
    from_cache: bool = False  # the verdict was remembered, not proven anew
    holds: tuple[str, ...] = ()  # tensors of the model whose values are part of the proof; compared at every call
    lifted: str = ""  # the function that was replaced before it was captured, if one was
    loop: str = ""  # "file:line" of the loop it was unrolled from, if it was
    not_lifted: str = ""  # why that loop's function was not replaced before it was captured

    @property
    def plan_command(self) -> str:
        """What shows how the match is cut into stages and buffers; ``kdacompile.plan`` is the same from Python."""
        form = " --form token" if self.mode == "step" else ""
        return f"python -m kdacompile plan {self.pattern}{form}"

    def __str__(self) -> str:
        lines = [f"{self.pattern} ({self.mode}) at {self.source}"]
        lines.append(f"    runs as {self.op}, max error {self.max_error:.1e}" + _cached(self.from_cache))
        if self.lifted:
            lines.append(f"    lifted: {self.lifted} is replaced before capture, so one graph serves every length")
        if self.loop:
            lines.append(f"    unrolled from the loop at {self.loop}, so other lengths may take other graphs")
            lines.append(f"    not lifted: {self.not_lifted}")
        if self.roles:
            lines.append("    " + ", ".join(f"{role} = {value}" for role, value in self.roles.items()))
        if self.absorbed:
            lines.append("    absorbed: " + ", ".join(self.absorbed))
        lines.append(f"    plan: {self.plan_command}")
        if self.holds:
            lines.append("    holds while these keep their values: " + ", ".join(self.holds))
        return "\n".join(lines)


@dataclass(frozen=True)
class Rejection:
    """A region that came near a pattern and was left to Inductor, with the reason."""

    pattern: str
    reason: str
    source: str
    code: str  # the machine-readable kind of reason
    count: int = 1  # how many regions were rejected in just these words

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.pattern} at {self.source}: {self.reason} [{self.code}]{times}"


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo cut the model in two; no pattern reaches across it."""

    reason: str
    source: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}" if self.source else self.reason


@dataclass(frozen=True)
class GraphReport:
    """One graph through the pass."""

    matches: tuple[Match, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    nodes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])  # our own time, by phase
    from_cache: bool = False  # compiled code came from a cache: the pass did not run, this is its remembered report


@dataclass
class Report:
    """Everything about one call. Grows by :meth:`add` while the call compiles."""

    graphs: list[GraphReport] = field(default_factory=list[GraphReport])
    graph_breaks: list[GraphBreak] = field(default_factory=list[GraphBreak])
    captured: int | None = None  # graphs Dynamo captured, where known; nested regions make more GraphReports
    title: str = ""
    result: Any = None  # what the explained call returned; not part of the JSON

    def add(self, graph: GraphReport) -> None:
        self.graphs.append(graph)

    @property
    def matches(self) -> list[Match]:
        return [match for graph in self.graphs for match in graph.matches]

    @property
    def rejections(self) -> list[Rejection]:
        return merge(rejection for graph in self.graphs for rejection in graph.rejections)

    @property
    def graph_count(self) -> int:
        return len(self.graphs) if self.captured is None else self.captured

    @property
    def seconds(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(graph.seconds)
        return dict(total)

    @property
    def counts(self) -> dict[str, int]:
        """Matches per pattern."""
        return dict(Counter(match.pattern for match in self.matches))

    def __str__(self) -> str:
        title = "kdacompile report" + (f" for {self.title}" if self.title else "")
        summary = ", ".join(f"{count} x {name}" for name, count in self.counts.items()) or "no matches"
        lines = [title, f"{_plural(self.graph_count, 'graph')}, {summary}"]
        lines += _section("matches", self.matches)
        lines += _section("near misses, left to Inductor", self.rejections)
        lines += _section("graph breaks", self.graph_breaks)
        if self.seconds:
            spent = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in self.seconds.items())
            lines += ["", f"kdacompile's own time in seconds: {spent}"]
        return "\n".join(lines)

    def to_json(self) -> str:
        payload = {
            "format": _FORMAT,
            "title": self.title,
            "captured": self.captured,
            "graphs": [asdict(graph) for graph in self.graphs],
            "graph_breaks": [asdict(graph_break) for graph_break in self.graph_breaks],
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
            )
        except (KeyError, TypeError) as error:
            raise ReportFormatError(detail=f"{type(error).__name__}: {error}") from error

    def to_html(self) -> str:
        """A page of its own, nothing loaded from elsewhere."""
        from kdacompile.html import render

        return render(self)


def graph_from_dict(graph: Mapping[str, Any]) -> GraphReport:
    """The inverse of ``dataclasses.asdict``, also after JSON has made lists of the tuples."""
    return GraphReport(
        matches=tuple(_match_from_dict(**match) for match in graph["matches"]),
        rejections=tuple(Rejection(**rejection) for rejection in graph["rejections"]),
        nodes=graph["nodes"],
        seconds=dict(graph["seconds"]),
        from_cache=graph["from_cache"],
    )


def _match_from_dict(absorbed: Iterable[str], holds: Iterable[str] = (), **fields: Any) -> Match:
    return Match(absorbed=tuple(absorbed), holds=tuple(holds), **fields)


def merge(rejections: Iterable[Rejection]) -> list[Rejection]:
    """Identical rejections become one with their counts added, in order of first appearance."""
    merged: dict[Rejection, int] = {}
    for rejection in rejections:
        key = replace(rejection, count=1)
        merged[key] = merged.get(key, 0) + rejection.count
    return [replace(key, count=count) for key, count in merged.items()]


def enforce(graph: GraphReport, settings: Settings) -> None:
    """Raise :class:`StrictError` where one graph misses what ``kda.strict`` or ``kda.expect`` demand of it."""
    reasons = [str(rejection) for rejection in merge(graph.rejections)]
    found = Counter(match.pattern for match in graph.matches)
    short = [f"{name}: {found[name]} of {count}" for name, count in settings.expect if found[name] < count]
    if short:
        raise StrictError(problem="kda.expect: fewer matches than expected (" + ", ".join(short) + ")", reasons=reasons)
    if settings.strict and graph.rejections:
        raise StrictError(problem="kda.strict: near misses were left to Inductor", reasons=reasons)
    if settings.strict and not graph.matches:
        raise StrictError(problem=f"kda.strict: nothing matched in a graph of {graph.nodes} nodes", reasons=reasons)


def _cached(from_cache: bool) -> str:
    return " (verdict from cache)" if from_cache else ""


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _section(title: str, entries: Iterable[object]) -> list[str]:
    lines = [f"  {entry}" for entry in entries]
    return ["", f"{title}:", *lines] if lines else []
