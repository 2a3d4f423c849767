"""Reports kept beside Inductor's caches: on a warm cache the pass does not run, and there is still something to report.

A report is filed under the graph's text, its inputs and the pass's identity. Losing one is harmless: compiled code
never depends on it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from kdacompile import compat
from kdacompile.errors import ReportFormatError
from kdacompile.graph import prefilter
from kdacompile.report import source
from kdacompile.report.collect import emit
from kdacompile.report.findings import GraphReport, Match
from kdacompile.report.report import Report
from kdacompile.report.source import source_of
from kdacompile.store.disk import read_checked, write_checked

log = logging.getLogger(__name__)


class KeptReport:
    """Where the report of one compilation is kept. Make it before the graph is rewritten."""

    def __init__(self, gm: fx.GraphModule, identity: str, lifted: Sequence[Match] = ()) -> None:
        """``lifted``: matches of functions that were replaced in ``gm`` before it was captured."""
        modules = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
        self.nodes = sum(len(module.graph.nodes) for module in modules)
        # Almost every graph of almost every model has nothing to report: for those nothing is hashed or written.
        self.interesting = any(prefilter.prospects(module.graph).anything for module in modules)
        self.path = _file(modules, identity) if self.interesting else None
        nodes = [node for module in modules for node in module.graph.nodes] if self.interesting else []
        self.places = list(map(source_of, nodes))
        """Where each node comes from in this process: files move, and are edited, while the graph's text stays."""
        self.lifted = {match.lifted: match.source for match in lifted}

    def keep(self, reports: Sequence[GraphReport]) -> None:
        """Write down what the pass just reported."""
        if self.path is None or not compat.disk_caches():
            return
        write_checked(self.path, self._by_node(Report(graphs=list(reports)).to_json()))

    def emit(self) -> None:
        """Report what the cached code was reported to be when it was compiled."""
        for report in self.recall() or [GraphReport(nodes=self.nodes)]:
            matches = tuple(replace(self._here(match), from_cache=True) for match in report.matches)
            emit(replace(report, matches=matches, seconds={}, from_cache=True))

    def recall(self) -> list[GraphReport]:
        text = None if self.path is None else read_checked(self.path)
        if text is None:
            return []
        try:
            return Report.from_json(_NODE.sub(self._place, text)).graphs
        except ReportFormatError as error:  # of another version
            log.info("%s is not used: %s", self.path, error)
            return []

    def _by_node(self, text: str) -> str:
        """A report with nodes for the places that they come from."""
        first: dict[str, int] = {}
        for index, place in enumerate(self.places):
            if place != "unknown":
                first.setdefault(json.dumps(place)[1:-1], index)
        if not first:
            return text
        places = "|".join(map(re.escape, sorted(first, key=len, reverse=True)))
        return re.sub(rf"({places})(?!\d)", lambda found: f"<node {first[found[1]]}>", text)

    def _place(self, found: re.Match[str]) -> str:
        """Where a node that a report names comes from, in JSON."""
        index = int(found[1])
        return json.dumps(self.places[index])[1:-1] if index < len(self.places) else "unknown"

    def _here(self, match: Match) -> Match:
        """The match with the places that are no node's: of the function that was lifted, of the loop it stood in."""
        if match.lifted:
            return replace(match, source=self.lifted.get(match.lifted, "unknown"))
        if not match.loop:
            return match
        file, _, line = match.source.rpartition(":")
        loop = source.at(file, int(line)) if line.isdecimal() else None
        return replace(match, loop=loop.place if loop else "")


_NODE = re.compile(r"<node (\d+)>")


def _file(modules: Sequence[fx.GraphModule], identity: str) -> Path:
    digest = hashlib.sha256(identity.encode())
    digest.update(f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}".encode())
    for module in modules:
        digest.update(str(module.graph).encode())
        for text in _inputs(module.graph):
            digest.update(text.encode())
    name = digest.hexdigest()
    return Path(compat.inductor_cache_dir()) / "kdacompile" / name[:2] / f"{name}.json"


def _inputs(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        value = compat.example_value(node)
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout == torch.strided else None
            yield f"{node.name} {tuple(value.shape)} {strides} {value.dtype} {value.device} {value.requires_grad}"
        elif node.op == "placeholder":
            yield f"{node.name} {value}"
