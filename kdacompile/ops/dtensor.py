"""Distributed tensors: batch and heads are independent, so the ops run on the local shards of either. Linear attention
also takes tokens that are sharded, as context parallelism over that dimension of the mesh.

What may be sharded is read off the operand table, by the names of dimensions that are of the batch or of the heads. On
each dimension of the mesh every operand that has the one, or every one that has the other, is sharded there, evenly, so
that each value head finds its key head beside it; all others are replicated, and their gradients are partial sums.
torch's ``register_sharding`` cannot hold this rule: it caches a decision by the specs of the tensors and leaves out
which optional argument each of them is.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from kdacompile.lowering.operands import Kind, Operand, dimensions
from kdacompile.ops.errors import DistributedTensorError
from kdacompile.ops.signature import LINEAR_ATTENTION, O_DIMENSIONS, Signature

TOKENS = "tokens"
_MODULE = "torch.distributed.tensor"


def holds_dtensors(tensors: Sequence[Any]) -> bool:
    """Whether an operand is a DTensor. Does not import torch.distributed.tensor, which takes a second."""
    module = sys.modules.get(_MODULE)
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def on_shards(op: Any, signature: Signature, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    """The op on this rank's shards of DTensors; its results are DTensors, and gradients flow through."""
    return _Sharded(op, signature, tensors, options).run()


class _Sharded:
    """One call: what each dimension of the mesh cuts, "batch", "heads", "tokens" or nothing."""

    def __init__(self, op: Any, signature: Signature, tensors: Sequence[Any], options: dict[str, Any]) -> None:
        self.op, self.signature, self.tensors, self.options = op, signature, tensors, options
        self.module = sys.modules[_MODULE]
        self.mesh = next(x.device_mesh for x in tensors if isinstance(x, self.module.DTensor))
        self.call = signature.call_of(tensors, {k: v for k, v in options.items() if k != "o_layout"})
        self.layouts = [dimensions(operand.text(self.call)) for operand in signature.operands]
        self.axes = dict(signature.axes)
        if signature is LINEAR_ATTENTION:
            self.axes["T"] = TOKENS
        self.cut: list[str] = [self._cut(place) for place in range(self.mesh.ndim)]
        if self.cut.count(TOKENS) > 1:
            raise self.refuse("tokens are sharded along two dimensions of the mesh")

    def run(self) -> Any:
        inputs = zip(self.signature.operands, self.layouts, self.tensors, strict=True)
        operands = [self._local(*one) for one in inputs]
        results = self._over_ranks(operands) if TOKENS in self.cut else self.op(*operands, **self.options)
        if not isinstance(results, tuple):
            return self._distributed(results, 0)
        return tuple(self._distributed(x, place) for place, x in enumerate(results))

    def _over_ranks(self, operands: Sequence[Any]) -> Any:
        """o of this rank's tokens, and its part of the final state."""
        from kdacompile.distributed.fragments import ContextParallel  # imported late: torch.distributed is slow
        from kdacompile.distributed.linear_attention import op

        context, options = ContextParallel(self.mesh.get_group(self.cut.index(TOKENS))), dict(self.options)
        if options.pop("o_layout", O_DIMENSIONS) != O_DIMENSIONS:
            raise self.refuse("tokens are sharded, and o is wanted in another order of dimensions")
        return op(*operands, **options, **context.options | {"total": self.tensors[0].shape[1]})[:2]

    def refuse(self, problem: str) -> DistributedTensorError:
        return DistributedTensorError(op=self.op.name(), problem=problem)

    def _cut(self, place: int) -> str:
        """What the mesh's dimension ``place`` cuts, by the first operand that is sharded there."""
        for operand, layout, x in zip(self.signature.operands, self.layouts, self.tensors, strict=True):
            if not isinstance(x, self.module.DTensor):
                continue
            placement = x.placements[place]
            if type(placement) is self.module.Shard:
                name = layout[placement.dim] if placement.dim < len(layout) else "?"
                if name not in self.axes:
                    raise self.refuse(f"{operand.name} is sharded along {name}")
                return self.axes[name]
        return ""

    def _local(self, operand: Operand, layout: tuple[str, ...], x: Any) -> Any:
        """The operand's shard, checked; the gradient of what all ranks of a cut dimension read is a sum over them."""
        if x is None:
            return None
        if not isinstance(x, self.module.DTensor):
            if operand.kind is Kind.INDEX and not any(
                self._dim(operand, layout, x, cut) is not None for cut in self.cut
            ):
                return x  # bounds that every rank has
            raise self.refuse(f"{operand.name} is no DTensor and others are")
        if x.device_mesh != self.mesh:
            raise self.refuse(f"{operand.name} is on another mesh than the first operand")
        grads: list[Any] = []
        for place, (cut, placement) in enumerate(zip(self.cut, x.placements, strict=True)):
            dim = self._dim(operand, layout, x, cut)
            if cut and dim is None and self.signature.written and operand.name == self.signature.written[0]:
                raise self.refuse(f"every rank of a cut of the {cut} would write a pool of its own")
            wanted = self.module.Replicate() if dim is None else self.module.Shard(dim)
            if placement != wanted:
                raise self.refuse(
                    f"{operand.name} is {placement!r} on a dimension of the mesh that cuts the {cut or 'op'}"
                )
            if dim is not None and cut != TOKENS and x.shape[dim] % self.mesh.size(place):
                raise self.refuse(f"{layout[dim]} = {x.shape[dim]} of {operand.name} cannot be cut evenly")
            grads.append(self.module.Partial() if cut and dim is None else wanted)
        return x.to_local(grad_placements=grads)

    def _dim(self, operand: Operand, layout: tuple[str, ...], x: Any, cut: str) -> int | None:
        """The dimension of an operand that is cut, unless it only broadcasts there."""
        found = [i for i, name in enumerate(layout) if cut and self.axes.get(name) == cut]
        return found[0] if found and not (operand.broadcast and x.shape[found[0]] == 1) else None

    def _distributed(self, x: Any, place: int) -> Any:
        """Result number ``place``. Its sizes follow from those of the operands: from the shard's they would be symbols
        where only the shards' sizes have changed from call to call.
        """
        layout, (shape, _) = dimensions(self.signature.result_layouts[place]), self.call.results[place]
        if TOKENS in self.cut:
            # Their number is an option of the op: one that is known must be no symbol to AOTAutograd.
            shape = [int(n) if self.axes.get(name) == TOKENS else n for n, name in zip(shape, layout, strict=True)]
        placements = [self._placement(cut, [self.axes.get(name) for name in layout]) for cut in self.cut]
        order = self.options.get("o_layout", O_DIMENSIONS) if place == 0 else ""
        inward = [O_DIMENSIONS.index(letter) for letter in order] or range(len(shape))
        strides = [1] * len(shape)
        for outer, inner in reversed(list(itertools.pairwise(inward))):
            strides[outer] = strides[inner] * shape[inner]
        more = {"shape": torch.Size(shape), "stride": tuple(strides)}
        return self.module.DTensor.from_local(x, self.mesh, placements, run_check=False, **more)

    def _placement(self, cut: str, names: Sequence[str | None]) -> Any:
        """Of a result, on a dimension of the mesh: a state that ends on one of several ranks is a sum over them."""
        if cut in names:
            return self.module.Shard(names.index(cut))
        return self.module.Partial() if cut else self.module.Replicate()
