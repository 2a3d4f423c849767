"""What the pass finds in one graph and over one call: matches, near misses with their reasons, graphs, breaks.

Data only: :mod:`kdacompile.report.report` makes text of it, :mod:`kdacompile.report.page` a page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kdacompile.patterns.engine.match import Code


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
    checked: str = ""  # how it was shown to be the pattern: "exactly", or "by probes" and what stood in the way
    not_lifted: str = ""  # why that loop's function was not replaced before it was captured

    def plan_command(self, device: str) -> str:
        """What shows how the match is cut into stages and buffers; ``kdacompile.plan`` is the same from Python."""
        form = " --form token" if self.mode == "step" else ""
        target = f" --target {PLAN_TARGETS[device]}" if device in PLAN_TARGETS else ""
        return f"kdacompile plan {self.pattern}{target}{form}"

    def text(self, device: str = "") -> str:
        """Some lines; ``device`` is that of the plan it names."""
        lines = [f"{self.pattern} ({self.mode}) at {self.source}"]
        checked = f", checked {self.checked}" if self.checked else ""
        cached = " (verdict from cache)" if self.from_cache else ""
        lines.append(f"    runs as {self.op}, max error {self.max_error:.1e}{checked}{cached}")
        if self.lifted:
            lines.append(f"    lifted: {self.lifted} is replaced before capture, so one graph serves every length")
        if self.loop:
            lines.append(f"    unrolled from the loop at {self.loop}, so other lengths may take other graphs")
            lines.append(f"    not lifted: {self.not_lifted}")
        if self.roles:
            lines.append("    " + ", ".join(f"{role} = {value}" for role, value in self.roles.items()))
        if self.absorbed:
            lines.append("    absorbed: " + ", ".join(self.absorbed))
        lines.append(f"    plan: {self.plan_command(device)}")
        if self.holds:
            lines.append("    holds while these keep their values: " + ", ".join(self.holds))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


PLAN_TARGETS = {"cpu": "cpu", "cuda": "cuda_sm90", "npu": "ascend910b"}
"""The plan's target for a device."""


@dataclass(frozen=True)
class Layers:
    """Matches that differ in their tensors alone: layers of a model, or turns of a loop."""

    first: Match
    count: int
    max_error: float

    @classmethod
    def of(cls, matches: Iterable[Match]) -> list[Layers]:
        """Alike matches together, in order of first appearance."""
        alike: dict[tuple[object, ...], list[Match]] = {}
        for match in matches:
            kind = tuple(value for name, value in vars(match).items() if name not in ("roles", "max_error", "holds"))
            alike.setdefault(kind, []).append(match)
        return [cls(found[0], len(found), max(match.max_error for match in found)) for found in alike.values()]

    def text(self, device: str = "") -> str:
        if self.count == 1:
            return self.first.text(device)
        roles = {role: f"{value} (in the first)" for role, value in self.first.roles.items()}
        shown = replace(self.first, max_error=self.max_error, roles=roles)
        return f"{self.count} layers: {shown.text(device)}"


@dataclass(frozen=True)
class Saved:
    """Seconds a call takes without the rewrite and with it, everything else run eagerly in both: an estimate of what
    the matches gain. Medians; ``text`` has the spread.
    """

    before: float
    after: float
    text: str


@dataclass(frozen=True)
class Rejection:
    """A region that came near a pattern and was left to Inductor, with the reason."""

    pattern: str
    reason: str
    source: str
    code: Code  # the machine-readable kind of reason
    count: int = 1  # how many regions were rejected in just these words

    @property
    def declined(self) -> bool:
        """Whether it is the pattern, and an op would only take longer."""
        return self.code == "cost"

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.pattern} at {self.source}: {self.reason} [{self.code}]{times}"


def internal(reason: str, source: str) -> Rejection:
    """What an error of ours is told as (see ``containment``)."""
    return Rejection("kdacompile", reason, source, "internal")


@dataclass(frozen=True)
class GraphBreak:
    """A place where Dynamo cut the model in two; no pattern reaches across it."""

    reason: str
    source: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}" if self.source else self.reason


@dataclass(frozen=True)
class Stage:
    """A graph on its way through the pass: ``dynamo``, ``functional``, ``canonical``, ``match``, ``rewritten``."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}:\n{self.text}"


@dataclass(frozen=True)
class GraphReport:
    """One graph through the pass."""

    matches: tuple[Match, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    nodes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])  # our own time, by phase
    from_cache: bool = False  # compiled code came from a cache: the pass did not run, this is its remembered report


@dataclass
class Findings:
    """Everything found in one call. Grows by :meth:`add` while the call compiles."""

    graphs: list[GraphReport] = field(default_factory=list[GraphReport])
    graph_breaks: list[GraphBreak] = field(default_factory=list[GraphBreak])
    captured: int | None = None  # graphs Dynamo captured, where known; nested regions make more GraphReports
    title: str = ""
    device: str = ""  # the type of device it ran on, where known
    saved: Saved | None = None  # where the call was timed
    stages: list[Stage] = field(default_factory=list[Stage])  # every graph as text, where it was asked for
    result: Any = None  # what the explained call returned; not part of the JSON

    def add(self, graph: GraphReport) -> None:
        self.graphs.append(graph)

    @property
    def matches(self) -> list[Match]:
        return [match for graph in self.graphs for match in graph.matches]

    @property
    def layers(self) -> list[Layers]:
        """The matches, those that are alike counted."""
        return Layers.of(self.matches)

    @property
    def rejections(self) -> list[Rejection]:
        """Near misses."""
        return [rejection for rejection in self._left if not rejection.declined]

    @property
    def declined(self) -> list[Rejection]:
        """What was shown to be a pattern, and is left to Inductor because that is estimated to be faster."""
        return [rejection for rejection in self._left if rejection.declined]

    @property
    def _left(self) -> list[Rejection]:
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


def merge(rejections: Iterable[Rejection]) -> list[Rejection]:
    """Identical rejections become one with their counts added, in order of first appearance."""
    merged: dict[Rejection, int] = {}
    for rejection in rejections:
        key = replace(rejection, count=1)
        merged[key] = merged.get(key, 0) + rejection.count
    return [replace(key, count=count) for key, count in merged.items()]
