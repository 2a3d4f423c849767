"""What is computed twice of the same values: once.

    f(x), .., f(x)    becomes    y, .., y    with y = f(x)

RWKV-7's decay is computed by whoever calls the recurrence, for the keys it erases, and again within it. A region has no
role for both, and none for what both are made of.
"""

from __future__ import annotations

from torch import fx

from kdacompile import compat
from kdacompile.graph.edit import Edit
from kdacompile.graph.ir import Graph, Op, map_values

NONLINEAR = frozenset(
    "exp exp2 sigmoid softplus log_sigmoid_forward sigmoid_backward tanh rsqrt sqrt linalg_vector_norm".split()
)
"""What a region may begin behind. Where none of these is computed twice, nothing is gained."""


def apply(edit: Edit, graph: fx.Graph) -> None:
    """Let readers of a value that was computed before read the earlier one."""
    functional = edit.functional
    twins = _twins(functional)
    if not any(op.name in NONLINEAR for op in twins):
        return
    for later, first in twins.items():
        for old, new in zip(later.outs, first.outs, strict=True):
            for user in dict.fromkeys(old.users):
                user.args, user.kwargs = (
                    map_values(tree, lambda v, old=old, new=new: new if v is old else v)
                    for tree in (user.args, user.kwargs)
                )
                user.reads = [new if value is old else value for value in user.reads]
            new.users += old.users
            old.users = []
            functional.names.setdefault(new, []).extend(functional.names.pop(old, []))
    edit.changed = True


def _twins(graph: Graph) -> dict[Op, Op]:
    """Operators that compute what an earlier one has, in order; none that write, draw, or yield what the graph does."""
    writes = {mutation.node for mutation in graph.mutations}
    numbers: dict[int, int] = {}
    known: dict[str, Op] = {}
    twins: dict[Op, Op] = {}
    for op in graph.ops:
        args, kwargs = (
            map_values(tree, lambda v: f"%{numbers.get(v.index, v.index)}") for tree in (op.args, op.kwargs)
        )
        kept = any(value.const or value in graph.outputs or value in graph.written for value in op.outs)
        if kept or op.node in writes or compat.is_random(op.target):
            continue
        first = known.setdefault(f"{op.target} {args} {kwargs} {op.grad}", op)
        if first is not op:
            twins[op] = first
            numbers.update(zip((v.index for v in op.outs), (v.index for v in first.outs), strict=True))
    return twins


__all__ = ["apply"]
