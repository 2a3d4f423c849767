"""MLA in one graph: find it in the functional graph, prove it, check it at other sizes, rewrite it, say why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import fx

from kdacompile import compat
from kdacompile.graph.instances import NO_TIES, Instances, Sizes, Ties
from kdacompile.graph.ir import Graph, Value
from kdacompile.patterns.engine.obstacle import Obstacle
from kdacompile.patterns.mla.definition import MASKS, NAME, Claim, FusedMla, MlaCandidate, MlaPlacement
from kdacompile.patterns.mla.lengths import lengths_instead
from kdacompile.patterns.mla.pages import pages_instead
from kdacompile.patterns.mla.proof import MlaVerdicts
from kdacompile.patterns.mla.roles import find_mla
from kdacompile.report import trace
from kdacompile.report.findings import Match, Rejection
from kdacompile.report.source import describe, source_of
from kdacompile.rewrite.attention import MlaSplice
from kdacompile.rewrite.splice import CannotSplice
from kdacompile.settings import Settings

log = logging.getLogger(__name__)

verdicts = MlaVerdicts()

NEAR = 64
"""Operators above a mask among which the one that chooses tokens is looked for."""

Failure = tuple[str, fx.Node | None, str]
"""Why a region was left alone: the reason, where, and its code."""

Timed = Callable[[str], AbstractContextManager[None]]


class MlaWork:
    """One graph's MLA regions; ``matches`` and ``rejections`` are the outcome."""

    def __init__(self, gm: fx.GraphModule, settings: Settings, instances: Instances, timed: Timed) -> None:
        self.gm, self.settings, self.instances, self.timed = gm, settings, instances, timed
        self.matches: list[Match] = []
        self.rejections: list[Rejection] = []

    def run(self, functional: Graph) -> None:
        with self.timed("match"):
            found = list(find_mla(functional))
        for item in found:
            if isinstance(item, Obstacle):
                self.reject(item.reason, item.op.node if item.op else None, item.code)
            else:
                self.visit(functional, item)

    def reject(self, reason: str, node: fx.Node | None, code: str) -> None:
        self.rejections.append(Rejection(NAME, reason, source_of(node), code))

    def visit(self, functional: Graph, candidate: MlaCandidate) -> None:
        node = candidate.anchor.node
        if NAME in self.settings.disable:
            self.reject("switched off by kda.disable", node, "disabled")
            return
        failure = self.try_forms(functional, candidate)
        if failure is not None and failure[2] == "dynamic" and self.narrow(candidate):
            failure = self.try_forms(functional, candidate)
        if failure is not None:
            self.reject(*failure)

    def try_forms(self, functional: Graph, candidate: MlaCandidate) -> Failure | None:
        """Rewrite the region in the best form that holds, or say why none does."""
        forms = self.judge(candidate)
        if isinstance(forms, str):
            return forms, candidate.anchor.node, "proof"
        failure: Failure | None = None
        for fused in forms:
            failure = self.attempt(functional, fused)
            if failure is None:
                break
        return failure

    def attempt(self, functional: Graph, fused: FusedMla) -> Failure | None:
        """Put the op into the graph, or say why not."""
        node = fused.candidate.anchor.node
        with self.timed("sizes"):
            reason = self.disagreement(fused)
            if reason is not None and self.as_many_queries(fused):
                reason = None
        if reason is not None:
            return reason, node, "dynamic"
        source = source_of(node)
        roles = {role: describe(placement) for role, placement in fused.inputs.items()}
        for role in (role for role in MASKS if role in roles):
            roles[role] += _chosen_by(fused.inputs[role].value)
        with self.timed("rewrite"):
            try:
                splice = MlaSplice(self.gm, functional, fused)
                op = splice.apply(splice.check())
            except CannotSplice as error:
                return error.reason, node, error.code
        absorbed = ("causal mask",) if fused.claim.causal else ("length mask",) if "lengths" in fused.inputs else ()
        self.matches.append(Match(NAME, fused.mode, source, roles, fused.max_error, op, absorbed))
        return None

    def judge(self, candidate: MlaCandidate) -> list[FusedMla] | str:
        """The proven region in every form the op could take it, best first, or why it is not proven."""
        with self.timed("proof"):
            verdict = verdicts(candidate, wide=self.settings.verify == "wide")
        trace.match(candidate, verdict.reason or "proven")
        if verdict.claim is None:
            return verdict.reason
        limited = lengths_instead(verdict.claim)
        forms = (pages_instead(limited), limited, pages_instead(verdict.claim), verdict.claim)
        return [FusedMla(candidate, claim, verdict.max_error) for claim in _distinct(forms)]

    # ---- other sizes

    def narrow(self, candidate: MlaCandidate) -> bool:
        """Leave the candidate the claims that are made at other sizes too; True if that is some of them.

        Where there happen to be as many queries as heads, little tells one from the other.
        """
        claims = candidate.claims

        def look(sizes: Sizes) -> None:
            keys = [claim.key() for other in self.counterparts(candidate, sizes) for claim in other.claims]
            candidate.claims = [claim for claim in candidate.claims if claim.key() in keys]

        self.instances.anywhere(_nodes(candidate, candidate.cut), look)
        return 0 < len(candidate.claims) < len(claims)

    def disagreement(self, fused: FusedMla, tied: Ties = NO_TIES) -> str | None:
        """Why the match does not hold at all sizes the graph allows, as far as other instances can tell."""
        inputs = [placement.value for placement in fused.inputs.values()]
        return self.instances.anywhere(_nodes(fused.candidate, inputs), lambda sizes: self.compare(fused, sizes), tied)

    def as_many_queries(self, fused: FusedMla) -> bool:
        """Whether the match holds at all sizes with as many queries as tokens, as there are now; then that is guarded.

        A prompt's queries and its latent may come as inputs, with lengths that nothing in the graph compares, and
        PyTorch's own ``is_causal`` is MLA's only where they are equal.
        """
        cache = fused.inputs.get("latent") or fused.inputs["cache"]
        queries, tokens = _size(fused.inputs["q"], "T"), _size(cache, "C")
        one, other = compat.free_symbols(queries), compat.free_symbols(tokens)
        if fused.sizes["T"] != fused.sizes["C"] or len(one) != 1 or len(other) != 1 or one == other:
            return False
        if self.disagreement(fused, {other.pop(): one.pop()}) is not None:
            return False
        compat.tie(queries, tokens)
        return True

    def compare(self, fused: FusedMla, sizes: Sizes) -> str | None:
        for other in self.counterparts(fused.candidate, sizes):
            alike = [claim for claim in other.claims if claim.laid_out_as(fused.claim)]
            again = self.judge(replace(other, claims=alike))
            if isinstance(again, str) or not any(form.claim.key() == fused.claim.key() for form in again):
                return "the region computes something else at other sizes"
            return None
        return "there is no such region at other sizes"

    def counterparts(self, candidate: MlaCandidate, sizes: Sizes) -> Iterator[MlaCandidate]:
        """What yields the same result at other sizes."""
        for item in find_mla(self.instances.at(sizes)[0]):
            if isinstance(item, MlaCandidate) and _same_node(item.output, candidate.output):
                yield item


def _distinct(claims: Iterable[Claim]) -> list[Claim]:
    found: list[Claim] = []
    for claim in claims:
        if claim not in found:
            found.append(claim)
    return found


def _chosen_by(mask: Value) -> str:
    """What a report adds of a mask that a sparse indexer has made."""
    near, stack = set[Value](), [mask]
    while stack and len(near) < NEAR:
        value = stack.pop(0)
        if value in near or value.op is None:
            continue
        near.add(value)
        if value.op.name == "topk":
            return f", chosen by topk at {source_of(value.op.node)}, which stays with Inductor"
        stack += value.op.reads
    return ""


def _size(placement: MlaPlacement, axis: str) -> Any:
    """The graph's own size of a dimension; 1 where the tensor lacks it."""
    shape = compat.example_value(placement.value.node).shape
    return shape[placement.axes.index(axis)] if axis in placement.axes else 1


def _same_node(one: Value, other: Value) -> bool:
    return one.node is not None and one.node is other.node


def _nodes(candidate: MlaCandidate, inputs: Iterable[Value]) -> set[fx.Node]:
    """The region's Dynamo nodes and what they read: tensors, sizes and other numbers."""
    own = {op.node for op in candidate.ops if op.node is not None} | {value.node for value in inputs}
    return own | {arg for node in own for arg in node.all_input_nodes if node.op != "placeholder"}
