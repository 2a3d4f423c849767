"""Distributed tensors: batch and heads are independent, so the ops run on the local shards of either.

What may be sharded is read off the operand table, by the names of dimensions that are of the batch or of the heads. On
each dimension of the mesh every operand that has the one, or every one that has the other, is sharded there, evenly, so
that each value head finds its key head beside it; all others are replicated, and their gradients are partial sums.
torch's ``register_sharding`` cannot hold this rule: it caches a decision by the specs of the tensors and leaves out
which optional argument each of them is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kdacompile.lowering.operands import Kind, Operand, dimensions
from kdacompile.ops.errors import DistributedTensorError
from kdacompile.ops.signature import Signature

_MODULE = "torch.distributed.tensor"


def holds_dtensors(tensors: Sequence[Any]) -> bool:
    """Whether an operand is a DTensor. Does not import torch.distributed.tensor, which takes a second."""
    module = sys.modules.get(_MODULE)
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def on_shards(op: Any, signature: Signature, tensors: Sequence[Any], options: dict[str, Any]) -> Any:
    """The op on this rank's shards of DTensors; its results are DTensors, and gradients flow through."""
    return _Sharded(op, signature, tensors, options).run()


class _Sharded:
    """One call: what each dimension of the mesh cuts, "batch", "heads" or nothing."""

    def __init__(self, op: Any, signature: Signature, tensors: Sequence[Any], options: dict[str, Any]) -> None:
        self.op, self.signature, self.tensors, self.options = op, signature, tensors, options
        self.module = sys.modules[_MODULE]
        self.mesh = next(x.device_mesh for x in tensors if isinstance(x, self.module.DTensor))
        call = signature.call(*tensors, **{k: v for k, v in options.items() if k != "o_layout"})
        self.layouts = [
            dimensions(x.layout if isinstance(x.layout, str) else x.layout(call)) for x in signature.operands
        ]
        self.cut: list[str] = [self._cut(place) for place in range(self.mesh.ndim)]

    def run(self) -> Any:
        inputs = zip(self.signature.operands, self.layouts, self.tensors, strict=True)
        results = self.op(*(self._local(*one) for one in inputs), **self.options)
        if not isinstance(results, tuple):
            return self._distributed(results, self.signature.result_layouts[0])
        return tuple(map(self._distributed, results, self.signature.result_layouts))

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
                if name not in self.signature.axes:
                    raise self.refuse(f"{operand.name} is sharded along {name}")
                return self.signature.axes[name]
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
            wanted = self.module.Replicate() if dim is None else self.module.Shard(dim)
            if placement != wanted:
                raise self.refuse(
                    f"{operand.name} is {placement!r} on a dimension of the mesh that cuts the {cut or 'op'}"
                )
            if dim is not None and x.shape[dim] % self.mesh.size(place):
                raise self.refuse(f"{layout[dim]} = {x.shape[dim]} of {operand.name} cannot be cut evenly")
            grads.append(self.module.Partial() if cut and dim is None else wanted)
        return x.to_local(grad_placements=grads)

    def _dim(self, operand: Operand, layout: tuple[str, ...], x: Any, cut: str) -> int | None:
        """The dimension of an operand that is cut, unless it only broadcasts there."""
        found = [i for i, name in enumerate(layout) if cut and self.signature.axes.get(name) == cut]
        return found[0] if found and not (operand.broadcast and x.shape[found[0]] == 1) else None

    def _distributed(self, x: Any, layout: str) -> Any:
        names = [self.signature.axes.get(name) for name in dimensions(layout)]
        placements = [self.module.Shard(names.index(cut)) if cut else self.module.Replicate() for cut in self.cut]
        return self.module.DTensor.from_local(x, self.mesh, placements, run_check=False)
