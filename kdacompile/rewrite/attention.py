"""Splice ``kdacompile::mla`` into the Dynamo graph where a proven region stood; the checks are those of ``rewrite``."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.lowering.attention import choose_form
from kdacompile.lowering.cpu import costs
from kdacompile.lowering.cpu.attention_cost import Prompt, is_too_small
from kdacompile.ops import definitions
from kdacompile.ops.dtensor import holds_dtensors
from kdacompile.ops.signature import MLA
from kdacompile.patterns.engine.field import unreached
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.mla.definition import Hiding, LatentAttention
from kdacompile.rewrite.measured import is_as_measured, is_half, takes_longer
from kdacompile.rewrite.splice import CannotSplice, Splice


class MlaSplice(Splice[LatentAttention]):
    """One rewrite: ``check`` everything, then ``apply``."""

    before: fx.Node

    def check_grad(self) -> None:
        super().check_grad()
        if "block_table" in self.match.binding.inputs and self.records_gradient():
            raise CannotSplice("grad", "a paged cache has no gradients")
        added = [mask for mask in self.match.binding.masks if not self.is_selection(mask) and mask.fill == 0.0]
        if self.stops_gradients and added:
            raise CannotSplice("grad", "rows may be hidden by several masks, some of which stop a gradient")

    def check_cost(self, *, inductor: bool) -> None:
        """Calls in fp32 and bf16 on a CPU are what was measured."""
        binding = self.match.binding
        alike = binding.weights and not {"sinks", "lengths", "block_table"} & binding.inputs.keys()
        if not (alike and is_as_measured(binding.inputs, free="BT")):
            return
        b, t, s, h, n, d, r, v = (binding.sizes[axis] for axis in "BTSHNDRV")
        train, half = self.records_gradient(), is_half(binding.inputs)
        prompt = Prompt(b, t, s, h, n, d, v, r, causal=binding.causal, train=train, half=half)
        expanded = choose_form(b, t, s, h, n, d, r, v, causal=binding.causal) == "expanded"
        if (inductor or train) and expanded:
            reason = takes_longer(binding.inputs, partial(_ratio, prompt), train=train)
            if reason:
                raise CannotSplice("cost", reason)
        if inductor and is_as_measured(binding.inputs, free="") and is_too_small(prompt):
            what = f"{t} tokens over {s}, {prompt.operations / 1e6:.2g} million operations"
            raise CannotSplice("cost", f"{what} on a CPU: less than the call of an op takes")

    def collect_stores(self, ready: int) -> None:
        """lse is no state: whoever stores it early uses it."""

    def is_selection(self, mask: Hiding) -> bool:
        return self.match.binding.inputs[mask.role].value.dtype is torch.bool

    @property
    def stops_gradients(self) -> bool:
        """Whether a mask replaces scores by a finite number: a row hidden as a whole averages, and its scores, which
        are gone, get no gradient. A number added lets it through.
        """
        finite = any(self.is_selection(mask) and math.isfinite(mask.fill) for mask in self.match.binding.masks)
        return finite and self.records_gradient()

    def region_nodes(self) -> set[fx.Node]:
        """Also what fills a buffer of the region's own without being an operator of it: a value put in place as it is,
        through a view that is the whole buffer. Without what makes keys and values that are kept.
        """
        nodes, functional = super().region_nodes(), self.functional
        given = {functional.storages.get(value.node) for value in functional.inputs}
        filled = {write.storage for write in functional.mutations if write.node in nodes} - given
        writes = {write.node for write in functional.mutations if write.storage in filled}
        views = {node for node, storage in functional.storages.items() if storage in filled}
        nodes |= {node for node in writes | views if node in self.place}
        left = self.match.candidate.kept
        kept = {op.node for op in left}
        kept |= {node for op in left for value in op.outs for node, _ in functional.names.get(value, [])}
        kept |= self.shared_constants(nodes)
        buffers = {functional.storages[node] for node in kept if node in functional.storages} - {None}
        return {node for node in nodes if node not in kept and functional.storages.get(node) not in buffers}

    def shared_constants(self, nodes: set[fx.Node]) -> set[fx.Node]:
        """What fills a mask that is read outside the region too: all layers share one, ``full(...).triu_(1)``."""
        written = {mutation.storage for mutation in self.mutations}
        masks = {op.node for op in self.match.candidate.ops if all(value.const for value in op.outs)}
        filled = {self.storages.get(node) for node in masks} & written
        views = [node for node, storage in self.storages.items() if storage in filled and node in self.place]
        read = {self.storages[node] for node in views if any(user not in nodes for user in node.users)}
        return {node for node in views if self.storages[node] in read}

    def apply(self, before: fx.Node) -> str:
        """Insert the op before ``before``, redirect the output, erase the region. Returns the op's name."""
        binding, like = self.match.binding, self.match.output.value.node
        self.before = before
        with self.graph.inserting_before(before):
            given = {role: self.operand(placement) for role, placement in binding.inputs.items()}
            if binding.prefix:
                tokens = self.size(given["q"], 1)
                given |= {n: self.part(given[n], 1, None, tokens) for n in ("latent", "k_rope", "cache") if n in given}
            q, q_rope, latent, k_rope, w_uk, w_uv = binding.operands(given, self.part, self.per_head)
            if "factor" in given:
                q = self.scaled(q, given["factor"])
                q_rope = None if q_rope is None else self.scaled(q_rope, given["factor"])
            mask = self.mask(given, compat.example_value(q).dtype)
            if self.stops_gradients and mask is not None:
                q = self.seeing(q, mask)
                q_rope = None if q_rope is None else self.seeing(q_rope, mask)
            table = self.block_table(given["block_table"], q, latent) if "block_table" in given else None
            lengths = self.lengths(given["lengths"], q, latent, table) if "lengths" in given else None
            tensors = {"q": q, "q_rope": q_rope, "latent": latent, "k_rope": k_rope, "w_uk": w_uk, "w_uv": w_uv}
            tensors |= {"mask": mask, "sinks": given.get("sinks"), "lengths": lengths, "block_table": table}
            tensors |= {"schedule": None if lengths is None else self.schedule(lengths, q, latent, table)}
            call = self.call(MLA, tensors, q, form="auto")
            self.redirect(self.match.output, self.getitem(call, 0, like), like)
            if self.final is not None:
                self.redirect(self.final, self.lse(call), self.final.value.node)
        self.erase()
        return "kdacompile::mla"

    def lse(self, call: fx.Node) -> fx.Node:
        """The op's lse, which has +inf where nothing is seen, as torch.logsumexp has it."""
        node = self.getitem(call, 1, call)
        unseen = self.method(node, "eq", math.inf)
        return self.method(node, "masked_fill", unseen, -math.inf) if self.match.binding.masks else node

    def part(self, node: fx.Node, dim: int, start: int | None, stop: int | fx.Node | None) -> fx.Node:
        """``node[..., start:stop]``, or the same of dimension 0 or 1."""
        before: tuple[Any, ...] = (Ellipsis,) if dim < 0 else (slice(None),) * dim
        index: Any = (*before, slice(start, stop))
        return self.with_meta(self.graph.call_function(operator.getitem, (node, index)), node)

    def scaled(self, q: fx.Node, factor: fx.Node) -> fx.Node:
        """The queries times a number that a tensor holds, or divided by it."""
        by = operator.truediv if self.match.binding.divides else operator.mul
        node = self.with_meta(self.graph.call_function(by, (q, factor)), q)
        want = compat.example_value(q).dtype
        return node if compat.example_value(node).dtype is want else self.method(node, "to", want)

    def seeing(self, q: fx.Node, mask: fx.Node) -> fx.Node:
        """The queries, zero where the mask hides everything: neither they nor the keys have a gradient there."""
        lowest = unreached(compat.example_value(mask).dtype)
        rows = self.method(self.method(self.method(mask, "le", lowest), "all", -1), "transpose", 1, 2)
        return self.method(q, "masked_fill", self.method(rows, "unsqueeze", -1), 0.0)

    def per_head(self, weight: fx.Node) -> fx.Node:
        """A weight with a dimension for its heads."""
        heads = self.match.sizes["H"]
        return weight if compat.example_value(weight).dim() == 3 else self.method(weight, "unflatten", 0, (heads, -1))

    def operand(self, placement: Placement) -> fx.Node:
        """The tensor of a role in the role's own order."""
        if placement.role == "block_table":
            return placement.value.node
        if placement.role == "lengths":
            return self.of_requests(placement)
        node = self.canonical(placement)
        if placement.columns is None or placement.columns == (0, placement.value.shape[-1]):
            return node
        return self.part(node, -1, *placement.columns)

    def of_requests(self, placement: Placement) -> fx.Node:
        """The lengths, one a request, by nodes that all layers have in common."""
        node = self.first_view(placement.value.node)
        if "T" in placement.axes:  # one a query: the last one's counts
            node = self.shared(node, "narrow", placement.axes.index("T"), -1, 1)
            placement = replace(placement, axes=placement.axes.replace("T", "."))
        elif self.is_overwritten(node):
            return self.canonical(placement)
        elif node is placement.value.node:
            node = self.derived.node(node)
        for name, args in placement.steps(self.match.sizes):
            node = self.shared(node, name, *args)
        return node

    def block_table(self, node: fx.Node, q: fx.Node, latent: fx.Node) -> fx.Node:
        """``[B, pages]``, all entries counted from the pool's front."""
        if self.match.binding.inputs["block_table"].axes != "BM":
            node = self.method(node, "reshape", self.size(q, 0), -1)
        if not self.match.binding.wraps:
            return node
        below = self.method(node, "lt", 0)
        counted = self.method(node, "add", self.size(latent, 0))
        return self.with_meta(self.graph.call_function(torch.where, (below, counted, node)), node)

    def lengths(self, node: fx.Node, q: fx.Node, latent: fx.Node, table: fx.Node | None) -> fx.Node:
        """``[B]``, in the bounds that the op asks for: what lies beyond the cache compares as the whole of it does.

        Written out where one number counts for all: the compiler does that beside the clamp, the op at every call.
        """
        if self.match.binding.lengths_plus:
            node = self.shared(node, "add", self.match.binding.lengths_plus)
        node = self.shared(node, "clamp", 0, self.held(latent, table))
        return self.shared(self.shared(node, "expand", self.size(q, 0)), "contiguous")

    def held(self, latent: fx.Node, table: fx.Node | None) -> Any:
        """How many tokens a request may have."""
        tokens = self.size(latent, 1)
        if table is None:
            return tokens
        pages = compat.example_value(table).shape[1]
        return self.product(pages if isinstance(pages, int) else self.shared(table, "size", 1), tokens)

    def schedule(self, lengths: fx.Node, q: fx.Node, latent: fx.Node, table: fx.Node | None) -> fx.Node | None:
        """How requests of these lengths are shared out, which all layers have in common; None where nothing reads it:
        off CUDA devices, and for shards, each of which has its own.
        """
        example = compat.example_value(q)
        one = isinstance(example.shape[0], int) and example.shape[0] == 1
        if not example.is_cuda or one or holds_dtensors([example, compat.example_value(lengths)]):
            return None
        rows = self.product(self.size(q, 1), self.size(q, 2))
        options = {"rows": rows, "width": self.held(latent, table)}
        return self.shared_call(definitions.mla_schedule, (lengths,), options)

    def first_view(self, node: fx.Node) -> fx.Node:
        """A view, or the same one that another layer took before."""
        source, storages = next(iter(node.all_input_nodes), None), self.storages
        if source is None or node.op not in ("call_function", "call_method") or storages.get(source) is None:
            return node
        first = self.first_view(source)
        if storages.get(node) != storages[source] or node.args[:1] != (source,):
            return node
        return self.made_before(node.op, node.target, (first, *node.args[1:]), node.kwargs) or node

    def shared(self, node: fx.Node, name: str, *args: Any) -> fx.Node:
        """``method``, or what an earlier layer made by it."""
        found = self.made_before("call_method", name, (node, *args), {})
        return self.method(node, name, *args) if found is None else found

    def shared_call(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> fx.Node:
        found = self.made_before("call_function", function, args, options)
        like = next(arg for arg in args if isinstance(arg, fx.Node))
        return found or self.with_meta(self.graph.call_function(function, args, options), like)

    def made_before(self, kind: str, target: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> fx.Node | None:
        """A node of the same value that stands before this place: nobody writes to what it reads."""
        source = next(arg for arg in args if isinstance(arg, fx.Node))
        if self.is_overwritten(source):
            return None
        alike = (x for x in source.users if (x.op, x.target, x.args, x.kwargs) == (kind, target, args, options))
        earlier = self.place[self.before]
        return next((x for x in alike if self.place.get(x, earlier) < earlier and x not in self.dying), None)

    def product(self, one: Any, other: Any) -> Any:
        """Of two sizes: a number, or a node where only the graph knows one."""
        both = isinstance(one, int) and isinstance(other, int)
        return one * other if both else self.shared_call(operator.mul, (one, other), {})

    def mask(self, given: dict[str, fx.Node], dtype: torch.dtype) -> fx.Node | None:
        """The masks as the op takes them: True for what may be seen, or numbers to add.

        Where the model gives hidden scores a finite number, a row hidden as a whole averages over those of the highest
        number; so it does with that number added, if it is so low that the scores are lost beside it.
        """
        masks = self.match.binding.masks
        if not masks:
            return None
        first, wide = given[masks[0].role], torch.float64 if dtype is torch.float64 else torch.float32
        if len(masks) == 1 and not self.is_selection(masks[0]):  # one counted in integers has a dtype the op lacks
            return first if compat.example_value(first).is_floating_point() else self.method(first, "to", wide)
        if len(masks) == 1 and masks[0].fill == -math.inf:
            return first if masks[0].keeps else self.method(first, "logical_not")
        total = self.with_meta(self.graph.call_function(torch.zeros_like, (first,), {"dtype": wide}), first)
        for mask in masks:
            node = given[mask.role]
            if self.is_selection(mask):
                hidden = self.method(node, "logical_not") if mask.keeps else node
                total = self.method(total, "masked_fill", hidden, _fill(mask, wide, alone=len(masks) == 1))
            else:
                total = self.method(total, "add", self.method(node, "to", wide))
        return total


def _ratio(prompt: Prompt, requests: int, tokens: int) -> float | None:
    """How many times as long as Inductor's code the op takes for a prompt of this kind; None where it takes less."""
    cached = prompt.cached + tokens - prompt.tokens
    return costs.loses(replace(prompt, batch=requests, tokens=tokens, cached=cached))


def _fill(mask: Hiding, dtype: torch.dtype, *, alone: bool) -> float:
    """The number for what a mask hides, in the dtype the masks are added in."""
    lowest = torch.finfo(dtype).min
    return mask.fill if mask.fill == -math.inf else lowest if alone else max(mask.fill, lowest)
