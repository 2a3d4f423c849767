"""Splice a semantic op into the Dynamo graph where a proven region stood.

The Dynamo graph is rewritten, not the functional one. In-place code is erased by hand (it is impure, so dead-code
elimination would keep it), only later uses are redirected, and before anything is touched it is checked that no alias
of what disappears is still read. ``linear_attention.py`` and ``attention.py`` say which nodes take the region's place.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph import gradient
from kdacompile.graph.ir import Graph, ancestors
from kdacompile.ops import definitions
from kdacompile.ops.signature import Signature
from kdacompile.patterns.engine.match import B, Code, Match
from kdacompile.patterns.engine.placement import Placement
from kdacompile.rewrite.derived import Derived
from kdacompile.rewrite.site import Site


class CannotSplice(Exception):
    """The region is proven but the graph around it does not allow the rewrite; nothing was changed."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code: Code = code
        self.reason = reason


class Splice(Site[B]):
    """One rewrite: ``check`` everything, then (in a subclass) insert the op, ``redirect`` its results and ``erase``."""

    def __init__(
        self,
        graph: fx.Graph,
        functional: Graph,
        match: Match[B],
        *,
        keep_strides: bool = True,
        writes_views: bool = True,
    ) -> None:
        """``writes_views``: whether ops may write to a view of an input. Where nothing but AOTAutograd compiles the
        graph, such a view is made again at the offset that the first call's input had in its storage.
        """
        self.graph, self.functional, self.match = graph, functional, match
        self.keep_strides, self.writes_views = keep_strides, writes_views
        self.storages, self.mutations = functional.storages, functional.mutations
        self.place = {node: index for index, node in enumerate(self.graph.nodes)}
        self.timeline = self.times()
        self.dying = self.region_nodes()
        self.zones = _zones(graph)
        self.detached = False
        """No result of the region wants a gradient although an input does: the op gets its inputs detached."""
        self.final = match.final_state
        buffer = (
            functional.written[self.final.value][0] if self.final and self.final.value in functional.written else None
        )
        self.state_in_place = self.final is not None and self.final.value.node is buffer
        results = [match.output] if self.state_in_place else match.binding.ends
        self.derived = Derived(self, [placement.value for placement in results])
        self.redirected = self.derived.values
        self.dying |= self.derived.replaced()
        self.staying = self.writes_that_stay()
        self.dying -= self.staying
        self.called: list[fx.Node] = []
        """The ops that were inserted."""
        self.stores: list[tuple[fx.Node, fx.Node]] = []
        """Copies of the final state into a buffer that are made again after the op: (copy, buffer)."""

    def writes_that_stay(self) -> set[fx.Node]:
        """Writes to what is read once more by nodes of the region that live on, since something outside it follows from
        them: a decay mask, filled in place; the buffers of a state between two tokens that is returned.
        """
        writes: dict[int, list[fx.Node]] = {}
        for mutation in self.mutations:
            if mutation.node in self.dying:
                writes.setdefault(mutation.storage, []).append(mutation.node)
        redirected = {use for value in self.redirected for use in self.later_users(value)} if writes else set()
        redirected.update(self.reads_through_writes())
        stack = [node for node in self.place if node not in self.dying] if writes else []
        alive, kept = set(stack), set[fx.Node]()
        while stack:
            user = stack.pop()
            for read in user.all_input_nodes:
                if (read, user) in redirected or not {read, user} & self.dying:
                    continue
                written = writes.get(self.storages.get(read, -1), [])
                found = {read} if read in self.dying else set[fx.Node]()
                if any(self.place[write] < self.place[user] for write in written):
                    kept.update(written)
                    found.update(written)
                stack += found - alive
                alive |= found
        return kept

    # -- checks ---------------------------------------------------------------------------------------------------
    def apply(self, before: fx.Node) -> str:
        """Insert the op before ``before``, redirect its results, erase the region. Returns the op's name."""
        raise NotImplementedError

    def check(self) -> fx.Node:
        """The node to insert before; raises ``CannotSplice``."""
        self.check_grad()
        read = [placement.value.node for placement in self.match.inputs.values()]
        inputs = [source for node in read for source in self.derived.calls.sources(node)]
        if any(node not in self.place for node in inputs):
            raise CannotSplice("overlap", "an input was rewritten by an earlier match")
        cut_before, cut_after = self.cuts_in_place(set(inputs))
        ready = max([*(self.place[node] for node in inputs), *cut_before], default=-1)
        self.collect_stores(ready)
        uses = [self.place[user] for value in self.redirected for _, user in self.later_users(value)]
        first_use = min([*uses, *self.state_reads(), *cut_after], default=len(self.place) - 1)
        if ready >= first_use:
            raise CannotSplice("order", "a result is used before all inputs exist")
        first_use = self.insertion_point(ready, first_use)
        target = list(self.place)[first_use]
        self.check_stores(first_use)
        self.check_inputs(first_use)
        self.check_aliases(first_use)
        self.check_derived()
        return target

    def check_derived(self) -> None:
        """What follows from a result in the canonical graph must be there in time."""
        if self.derived.overwritten():
            raise CannotSplice("mutation", "what is computed from the results is overwritten")
        if self.derived.too_late():
            raise CannotSplice("order", "what is computed from the results comes too late")

    def collect_stores(self, ready: int) -> None:
        """Take over ``cache.copy_(final_state)`` where a model stores the state before all inputs exist."""
        if self.final is None or self.state_in_place:
            return
        for name, user in self.later_users(self.final.value):
            stores = user.op == "call_method" and user.target == "copy_" and user.args[1] is name and not user.users
            if stores and self.place[user] <= ready:
                buffer = user.args[0]
                if isinstance(buffer, fx.Node) and buffer is not name:
                    self.stores.append((user, buffer))
        self.dying.update(copy for copy, _ in self.stores)

    def state_reads(self) -> list[int]:
        """Where the buffer that the region keeps its state in is read once the region is done with it."""
        if self.final is None or not self.state_in_place:
            return []
        storage = self.storages.get(self.final.value.node)
        outside = [op for op in self.final.value.users if op not in self.match.candidate.ops]
        if any(self.derived.calls.owns(op.node) for op in outside):
            raise CannotSplice("alias", "what is computed from the state reads its buffer")
        if any(m.storage == storage for m in self.mutations if m.node in self.staying):
            raise CannotSplice("alias", "the state is read between the region's writes to it")
        writes = [self.place[m.node] for m in self.mutations if m.storage == storage and m.node in self.dying]
        views = [node for node, own in self.storages.items() if own == storage and node in self.place]
        reads = {self.place[user] for view in views for user in view.users if user not in self.dying}
        if any(min(writes) < read < max(writes) for read in reads):
            raise CannotSplice("alias", "the state is read between the region's writes to it")
        return [read for read in reads if read > max(writes)]

    def reads_through_writes(self) -> list[tuple[fx.Node, fx.Node]]:
        """Uses of what a write to the state in place yields, which is the buffer itself: ``S += kv; return o, S``."""
        if self.final is None or not self.state_in_place:
            return []
        writes = {mutation.node for mutation in self.mutations}
        return [(name, user) for name, user in self.later_users(self.final.value) if name in writes]

    def check_stores(self, before: int) -> None:
        """Between a copy's old place and its new one nothing may touch the buffer."""
        for copy, buffer in self.stores:
            storage = self.storages.get(buffer)
            for node, own in self.storages.items():
                if own != storage or node not in self.place:
                    continue
                if any(user not in self.dying and self.place[copy] < self.place[user] < before for user in node.users):
                    raise CannotSplice("order", "the stored state is read before all inputs of the region exist")

    def check_cost(self, *, inductor: bool) -> None:
        """Refuse where the op would take longer than what Inductor makes of the region, by a measured model.

        ``inductor``: whether it compiles the rest. What a small call costs is measured beside its code alone.
        """

    def check_grad(self) -> None:
        """Gradients must get through the region everywhere or nowhere; then ``detached`` says which."""
        if not any(gradient.wants_gradient(placement.value.node) for placement in self.match.inputs.values()):
            return
        results = self.match.binding.ends
        self.detached = not any(gradient.wants_gradient(placement.value.node) for placement in results)
        if self.detached:
            values = {node for value in self.redirected for node, _ in self.names(value)}
            if any(False in late for _, late in self.detached_in_place(values)):
                raise CannotSplice("grad", "gradients are cut in part of the region")
            return
        writes = [m.node for m in self.mutations if m.node in self.dying]
        inputs = {placement.value for placement in self.match.inputs.values()}
        ops = self.match.candidate.ops | ancestors(self.match.candidate.cut, inputs.__contains__)
        cut = gradient.is_cut(ops, inputs, self.functional.names)
        if cut or not all(self.zones[node][0] for node in writes):
            raise CannotSplice("grad", "gradients are cut in part of the region")

    def cuts_in_place(self, inputs: set[fx.Node]) -> tuple[list[int], list[int]]:
        """Where inputs are detached in place: before they are read, and after that. The op reads them all at once, so
        no cut may come in between.
        """
        cuts = [] if self.detached else list(self.detached_in_place(inputs))
        if any(len(late) > 1 for _, late in cuts):
            raise CannotSplice("grad", "gradients are cut in part of the region")
        return [cut for cut, late in cuts if True in late], [cut for cut, late in cuts if False in late]

    def detached_in_place(self, nodes: set[fx.Node]) -> Iterator[tuple[int, set[bool]]]:
        """Where one of these is detached in place, and whether its readers come later."""
        for cut in filter(compat.detaches_in_place, self.place if torch.is_grad_enabled() else ()):
            names = next(
                (set(each) for each in map(dict, self.functional.names.values()) if cut in each), set[fx.Node]()
            )
            users = {user for name in names & nodes for user in name.users} - {cut, self.graph.output_node()}
            yield self.place[cut], {self.place[user] > self.place[cut] for user in users}

    def insertion_point(self, ready: int, first_use: int) -> int:
        """The last place up to the first use of a result where the op lets gradients through as the region did."""
        names = [node for value in self.redirected for node, _ in self.names(value)]
        zone = self.zones[names[0]] if names else self.zones[list(self.place)[first_use]]
        for node in reversed(list(self.place)[ready + 1 : first_use + 1]):
            grad, inference = self.zones[node]
            if inference <= zone[1] and (grad or self.detached or not zone[0]):
                return self.place[node]
        raise CannotSplice("grad", "gradients are switched off where all inputs of the region exist")

    def check_inputs(self, before: int) -> None:
        """Every input must still hold, where the op is inserted, what it held when the region read it."""
        for placement in self.match.inputs.values():
            node = placement.value.node
            made = self.place[node] if placement.value.op is None else self.now(placement.value.op.position)
            for mutation in self.mutations:
                same = mutation.storage == self.storages.get(node)
                if same and mutation.node not in self.dying and made < self.now(mutation.position) < before:
                    raise CannotSplice(
                        "mutation", f"{placement.role} is overwritten before the region's results are used"
                    )

    def check_aliases(self, before: int) -> None:
        """Buffers the region fills in place must not be read elsewhere, except as its outputs. Neither may what shares
        memory with a result, where somebody writes to that memory later, or is returned beside it.
        """
        stores = {copy for copy, _ in self.stores}
        dying_writes = {m.storage for m in self.mutations if m.node in self.dying and m.node not in stores}
        outside_writes = {
            m.storage for m in self.mutations if m.node not in self.dying and self.now(m.position) < before
        }
        if dying_writes & outside_writes:
            raise CannotSplice("mutation", "a buffer of the region is also written outside it")
        lost = {self.storages.get(source) for source, _ in self.functional.written.values()} & dying_writes
        redirected = {use for value in self.redirected for use in self.later_users(value)}
        state_storage = self.storages.get(self.final.value.node) if self.final and self.state_in_place else None
        if lost - {state_storage}:
            raise CannotSplice("mutation", "the region overwrites an input that is not its state")
        rebased = self.rebased(redirected)
        results = {self.storages.get(value.node) for value in self.redirected}
        shown = Counter(self.storages.get(node) for node in self.graph.output_node().all_input_nodes)
        together = {storage for storage, times in shown.items() if times > 1}
        watched = dying_writes | results & (together | {m.storage for m in self.mutations if m.node not in self.dying})
        for node, storage in self.storages.items():
            if storage not in watched or storage == state_storage or node in rebased:
                continue
            if any(user not in self.dying and (node, user) not in redirected for user in node.users):
                raise CannotSplice("alias", "a view of a buffer that the region fills is read outside it")

    def rebased(self, redirected: set[tuple[fx.Node, fx.Node]]) -> set[fx.Node]:
        """Views of a buffer that are taken of an output alone: they will be views of the op's result."""
        storages = self.storages
        found: set[fx.Node] = set()
        for node in self.place:
            reader = node
            if node.target is operator.getitem and node.args[0] not in storages:  # one of split's, of unbind's
                reader = next(iter(node.all_input_nodes), node)
            sources = [arg for arg in reader.all_input_nodes if arg in storages and storages[arg] == storages.get(node)]
            if sources and all((source, reader) in redirected or source in found for source in sources):
                found.add(node)
        return found

    # -- the new nodes --------------------------------------------------------------------------------------------
    def canonical(self, placement: Placement) -> fx.Node:
        node = self.derived.node(placement.value.node)
        if self.detached and gradient.wants_gradient(node):
            node = self.method(node, "detach")
        elif self.records_gradient() and self.is_overwritten(node):
            node = self.method(node, "clone")  # autograd keeps what the op reads
        for name, args in placement.steps(self.match.sizes):
            node = self.method(node, name, *args)
        return node

    def is_overwritten(self, node: fx.Node) -> bool:
        storage = self.storages.get(node)
        return any(mutation.storage == storage for mutation in self.mutations)

    def records_gradient(self) -> bool:
        """True if autograd sees the op. Parameters want a gradient in inference too, where nothing is recorded."""
        inputs = self.match.inputs.values()
        return not self.detached and any(gradient.wants_gradient(placement.value.node) for placement in inputs)

    def call(
        self,
        signature: Signature,
        tensors: Mapping[str, fx.Node | None],
        typed: fx.Node,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> fx.Node:
        """The op on these tensors, by role; its options are the binding's. The result has the dtype of ``typed`` by
        default; ``dtype`` is the one that is wanted, if it is not the model's.
        """
        like = self.match.output.value.node
        binding, own = self.match.binding, signature.options.keys() - options - {"out_dtype"}
        found = {name: getattr(binding, name) for name in signature.options if name in own} | options
        # Left out where it is the default: AOTInductor of torch 2.11 hands dtypes to Python ops under the wrong number.
        dtype = dtype or compat.example_value(like).dtype
        found["out_dtype"] = None if dtype == compat.example_value(typed).dtype else dtype
        args = tuple(tensors.get(operand.name) for operand in signature.operands)
        call = self.graph.call_function(getattr(definitions, signature.name), args, found)
        call.meta[compat.ABSORBED] = self.match.absorbed
        self.called.append(call)
        return self.with_meta(call, like)

    def memory_order(self, placement: Placement, want: torch.Tensor) -> str:
        """The op's own dimensions in the order in which ``want`` has them in memory."""
        steps = dict(zip(placement.axes, map(_hint, want.stride()), strict=True))
        long = [axis for axis, size in zip(placement.axes, want.shape, strict=True) if _hint(size) > 1]
        order = placement.order
        kept = [axis for axis in order if axis in long]
        moved = iter(sorted(kept, key=lambda axis: -steps[axis]))
        return "".join(next(moved) if axis in kept else axis for axis in order)

    def laid_out(self, placement: Placement, node: fx.Node, like: fx.Node) -> fx.Node:
        """The op's result in the layout, dtype and strides of the value it stands for."""
        for name, args in placement.back_steps():
            node = self.method(node, name, *args)
        return self.as_it_was(node, like)

    def redirect(self, placement: Placement, node: fx.Node, like: fx.Node) -> None:
        if self.derived.of[placement.value] != [placement.value]:
            self.derived.define(placement.value, self.laid_out(placement, node, like))
            return
        users = self.later_users(placement.value)
        made: dict[fx.Node, fx.Node] = {}
        for name, user in users:
            if name not in made:  # a copy in a buffer may lie otherwise
                made[name] = self.laid_out(placement, node, name)
            user.replace_input_with(name, made[name])

    def absorbed_nodes(self) -> set[fx.Node]:
        """Nodes between the op's inputs and the region."""
        inputs = {placement.value for placement in self.match.inputs.values()}
        ops = ancestors(self.match.candidate.cut, inputs.__contains__)
        nodes = {op.node for op in ops}
        return {node for node in nodes if node in self.place and node.op in ("call_function", "call_method")}

    def erase(self) -> None:
        """Erase what only the region and what was absorbed above it needed, the region's in-place writes included."""
        for name, user in self.reads_through_writes():
            assert self.final is not None
            user.replace_input_with(name, self.final.value.node)
        writes = {m.node for m in self.mutations}
        absorbed = self.absorbed_nodes()
        for node in reversed(list(self.graph.nodes)):
            if node in absorbed and not node.users and node not in writes and not compat.writes_first_argument(node):
                self.graph.erase_node(node)
            elif node in self.dying and node.op in ("call_function", "call_method"):
                removable = not node.users and (node in writes or not compat.writes_first_argument(node))
                if removable:
                    self.graph.erase_node(node)


def _zones(graph: fx.Graph) -> dict[fx.Node, tuple[bool, int]]:
    """Grad mode, and how many inference modes are open, where each node runs. Dynamo compiles in the grad mode the
    graph will be called in.
    """
    grad, depth = torch.is_grad_enabled(), 0
    found: dict[fx.Node, tuple[bool, int]] = {}
    for node in graph.nodes:
        found[node] = grad, depth
        grad = compat.grad_mode_after(node, grad)
        depth += compat.inference_mode_change(node)
    return found


def _hint(size: Any) -> int:
    return int(compat.size_hint(size))
