"""Splice ``kdacompile::mla`` into the Dynamo graph where a proven region stood; the checks are those of ``rewrite``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.ops.mla_definitions import mla
from kdacompile.patterns.ir import Graph
from kdacompile.patterns.mla import Claim, FusedMla
from kdacompile.rewrite.splice import Splice


class MlaSplice(Splice):
    """One rewrite: ``check`` everything, then ``apply``."""

    def __init__(self, gm: fx.GraphModule, shadow: Graph, fused: FusedMla) -> None:
        super().__init__(gm, shadow, fused)
        self.claim: Claim = fused.claim

    def region_nodes(self) -> set[fx.Node]:
        """Also what fills a buffer of the region's own without being an operator of it: a value put in place as it is,
        through a view that is the whole buffer.
        """
        nodes, shadow = super().region_nodes(), self.shadow
        given = {shadow.storages.get(value.node) for value in shadow.inputs}
        filled = {write.storage for write in shadow.mutations if write.node in nodes} - given
        writes = {write.node for write in shadow.mutations if write.storage in filled}
        views = {node for node, storage in shadow.storages.items() if storage in filled}
        return nodes | {node for node in writes | views if node in self.place}

    def apply(self, before: fx.Node) -> str:
        """Insert the op before ``before``, redirect the output, erase the region. Returns the op's name."""
        claim, like = self.claim, self.fused.output.value.node
        with self.graph.inserting_before(before):
            given = {role: self.canonical(placement) for role, placement in claim.inputs.items()}
            q, q_rope = self.queries(given)
            if claim.prefix:
                tokens = self.size(q, 1)
                given |= {n: self.part(given[n], 1, None, tokens) for n in ("latent", "k_rope", "cache") if n in given}
            latent, k_rope = self.cache(given)
            w_uk, w_uv = self.weights(given)
            mask = self.mask(given["mask"]) if "mask" in given else None
            lengths = self.lengths(given["lengths"], q, latent) if "lengths" in given else None
            tensors = (q, q_rope, latent, None if q_rope is None else k_rope, w_uk, w_uv, mask, given.get("sinks"))
            dtype = compat.example_value(like).dtype
            options: dict[str, Any] = {"scale": claim.scale, "causal": claim.causal, "form": "auto"}
            # Left out where it is q's own, as for linear attention.
            options["out_dtype"] = None if dtype == compat.example_value(q).dtype else dtype
            call = self.with_meta(self.graph.call_function(mla, (*tensors, lengths, None), options), like)
            self.redirect(self.fused.output, self.getitem(call, 0, like), like)
        self.erase()
        return "kdacompile::mla"

    def part(self, node: fx.Node, dim: int, start: int | None, stop: int | fx.Node | None) -> fx.Node:
        """``node[..., start:stop]``, or the same of dimension 1."""
        index: Any = (Ellipsis, slice(start, stop)) if dim < 0 else (slice(None), slice(start, stop))
        return self.with_meta(self.graph.call_function(operator.getitem, (node, index)), node)

    def queries(self, given: dict[str, fx.Node]) -> tuple[fx.Node, fx.Node | None]:
        """The plain and the rotated part of the queries."""
        q, rope = given["q"], self.claim.sizes["D"]
        if "q_rope" in given or not rope:
            return q, given.get("q_rope")
        if self.claim.rope_first:
            return self.part(q, -1, rope, None), self.part(q, -1, None, rope)
        return self.part(q, -1, None, -rope), self.part(q, -1, -rope, None)

    def cache(self, given: dict[str, fx.Node]) -> tuple[fx.Node, fx.Node | None]:
        """The latent and the rotated key, which may be columns of one tensor."""
        if "cache" not in given:
            return given["latent"], given.get("k_rope")
        cache, rope = given["cache"], self.claim.sizes["D"]
        if self.claim.rope_first:
            return self.part(cache, -1, rope, None), self.part(cache, -1, None, rope)
        return self.part(cache, -1, None, -rope), self.part(cache, -1, -rope, None)

    def weights(self, given: dict[str, fx.Node]) -> tuple[fx.Node | None, fx.Node | None]:
        """Views of the projection's weight: ``[H, N, R]`` and ``[H, V, R]``; none where the model absorbed them."""
        if not self.claim.weights:
            return None, None
        heads, nope, value = (self.claim.sizes[letter] for letter in "HNV")
        if "w" not in given:
            shapes = ((heads, nope), (heads, value))
            w_k, w_v = (self.method(given[n], "unflatten", 0, s) for n, s in zip(("w_k", "w_v"), shapes, strict=True))
            return w_k, w_v
        rows = self.method(given["w"], "unflatten", 0, (heads, nope + value))
        if self.claim.values_first:
            return self.part(rows, 1, value, None), self.part(rows, 1, None, value)
        return self.part(rows, 1, None, nope), self.part(rows, 1, nope, None)

    def lengths(self, node: fx.Node, q: fx.Node, latent: fx.Node) -> fx.Node:
        """``[B]``, in the bounds that the op asks for: what lies beyond the cache compares as the whole of it does."""
        if self.claim.lengths_plus:
            node = self.method(node, "add", self.claim.lengths_plus)
        node = self.method(node, "clamp", 0, self.size(latent, 1))
        return self.method(node, "expand", self.size(q, 0))

    def mask(self, node: fx.Node) -> fx.Node:
        """The mask as the op takes it: True for what may be seen, or numbers to add.

        Where the model gives hidden scores a finite number, a row hidden as a whole averages; so it does with the
        lowest number added.
        """
        value = compat.example_value(node)
        if value.dtype is not torch.bool:
            return node
        if self.claim.mask_fill != float("-inf"):
            hidden = self.method(node, "logical_not") if self.claim.mask_keeps else node
            zeros = self.with_meta(self.graph.call_function(torch.zeros_like, (node,), {"dtype": torch.float32}), node)
            return self.method(zeros, "masked_fill", hidden, torch.finfo(torch.float32).min)
        return node if self.claim.mask_keeps else self.method(node, "logical_not")
