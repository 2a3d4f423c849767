"""What a match of the canonical graph puts into the model's graph beside the op: the calls that canonical rules made.

A rule defines values of the model anew, by calls that the model's graph does not have. Where the op reads such a call,
it is made in front of the op. Where the op's result is one, no node of the model stands for it: the values that follow
from it are computed after the op, and their readers read them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from kdacompile import compat
from kdacompile.graph.edit import NewCalls
from kdacompile.graph.ir import Value, reach
from kdacompile.rewrite.site import Site


class Derived:
    """The results of one match, and what follows from each of them."""

    def __init__(self, site: Site[Any], results: list[Value]) -> None:
        self.site = site
        self.calls: NewCalls = site.functional.calls or NewCalls()
        self.copies: dict[fx.Node, fx.Node] = {}
        """Nodes of ``calls`` -> what stands for them in the model's graph."""
        self.made = {
            node: value for value, names in site.functional.names.items() for node, _ in names if self.calls.owns(node)
        }
        self.of = {result: self._follows(result) for result in results}
        self.values = [value for values in self.of.values() for value in values]
        """All values whose readers will read something else."""

    def _follows(self, result: Value) -> list[Value]:
        """The result itself, if the model's graph has it; else what it has in its place, first things first."""
        if not self.calls.owns(result.node):
            return [result]
        inside = self.site.match.candidate.ops

        def onward(value: Value) -> Iterator[Value]:
            return (out for op in value.users if op not in inside and self.calls.owns(op.node) for out in op.outs)

        # The result itself may have a name too: an earlier splice has made it.
        return sorted(filter(self.site.names, reach([result], onward)), key=lambda value: value.index)

    def node(self, node: fx.Node) -> fx.Node:
        """A node that the op reads, made at the graph's insertion point if only the canonical graph has it.

        Later splices know the copies as names of their values.
        """
        if not self.calls.owns(node):
            return node
        before = set(self.copies)
        made = self.calls.copy_into(self.site.graph, node, self.copies)
        for each in self.copies.keys() - before:
            if each in self.made:
                self.site.functional.names[self.made[each]].append((self.copies[each], -1))
        return made

    def replaced(self) -> set[fx.Node]:
        """Nodes that compute what is defined otherwise now, and that nothing else reads; writes to such a buffer."""
        site, names = self.site, self.names()
        values = [value for value in self.values if self.definition(value) is not None]
        if not values:
            return set()
        read = [placement.value.node for placement in site.match.inputs.values()]
        kept = {source for node in read for source in self.calls.sources(node)}
        kept |= {source for value in values for source in self.sources(value)}
        dying = {node for node in names if names[node] in values}
        last = {
            site.storages[node]: since for value in values for node, since in site.names(value) if node in site.storages
        }
        writes = site.mutations
        dying |= {m.node for m in writes if m.position <= last.get(m.storage, -1) and m.node in site.place}
        for node in reversed(site.graph.nodes):
            pure = node.users and not compat.writes_first_argument(node)
            if pure and node not in kept and all(user in dying or user in site.dying for user in node.users):
                dying.add(node)
        return {node for node in dying if node.op in ("call_function", "call_method")}

    def definition(self, value: Value) -> fx.Node | None:
        """The new call that yields a value of the model; None if the model's own does."""
        return value.op.node if value.op is not None and self.calls.owns(value.op.node) else None

    def names(self) -> dict[fx.Node, Value]:
        """Nodes of the model's graph that stand for one of the values."""
        return {node: value for value in self.values for node, _ in self.site.names(value)}

    def sources(self, value: Value) -> set[fx.Node]:
        """Nodes of the model's graph that a value is computed from after the op, less those that are redefined."""
        node, names = self.definition(value), self.names()
        known = {result.node for result in self.of}
        return set() if node is None else {each for each in self.calls.sources(node, known) if each not in names}

    def first_uses(self, values: list[Value]) -> dict[Value, int]:
        """Where each value is read first, be it for another of them; the end of the graph for those that are not."""
        names = self.names()
        first: dict[Value, int] = {}
        for value in reversed(values):
            uses = [self.site.place[user] for _, user in self.site.later_users(value)]
            first[value] = min([*uses, first.get(value, len(self.site.place))])
            node = self.definition(value)
            for source in self.calls.sources(node, {result.node for result in self.of}) if node else ():
                if source in names and names[source] is not value:
                    other = names[source]
                    first[other] = min(first[value], first.get(other, len(self.site.place)))
        return first

    def overwritten(self) -> bool:
        """True if one of several values is written to later: what the others are computed from may share its memory."""
        defined = [value for value in self.values if self.definition(value) is not None]
        storages = {self.site.storages.get(node) for value in defined for node, _ in self.site.names(value)}
        writes = [m for m in self.site.mutations if m.node not in self.site.dying]
        return len(defined) > 1 and any(m.storage in storages for m in writes)

    def too_late(self) -> bool:
        """True if something that a value is computed from is not there when the value is read."""
        end = len(self.site.place)
        first = self.first_uses(self.values)
        return any(
            self.site.place.get(source, end) >= first[value] for value in self.values for source in self.sources(value)
        )

    def define(self, result: Value, node: fx.Node) -> None:
        """Compute what follows from a result of the op, ``node``, and let its readers read that."""
        site, order, end = self.site, list(self.site.place), len(self.site.place)
        self.copies[result.node] = node
        first = self.first_uses(self.of[result])
        for value in sorted(self.of[result], key=lambda value: (first[value], value.index)):
            definition = self.definition(value)
            if first[value] == end or definition is None:
                continue
            if value is result:
                for name, user in site.later_users(value):
                    user.replace_input_with(name, node)
                continue
            with site.graph.inserting_before(order[first[value]]):
                new = site.as_it_was(self.node(definition), value.node)
            if value.node in self.calls.stand_ins:
                self.copies[self.calls.stand_ins[value.node]] = new
            for name, user in site.later_users(value):
                user.replace_input_with(name, new)
