"""What is computed twice of the same values: once.

    f(x), .., f(x)    becomes    y, .., y    with y = f(x)

RWKV-7's decay is computed by whoever calls the recurrence, for the keys it erases, and again within it. A region has no
role for both, and none for what both are made of. Nor has it one for the tokens of all heads, where a loop over heads
writes ``x[b][head][t]``: the pieces that its turns have in common are what enters it.
"""

from __future__ import annotations

from kdacompile import compat
from kdacompile.graph.edit import Edit
from kdacompile.graph.ir import Graph, Op, map_values
from kdacompile.patterns.engine.values import Numbering

NONLINEAR = frozenset(
    "exp exp2 sigmoid softplus log_sigmoid_forward sigmoid_backward tanh rsqrt sqrt linalg_vector_norm".split()
)
"""What a region may begin behind. Where none of these is computed twice, nothing is gained."""


def apply(edit: Edit) -> None:
    """Let readers of a value that was computed before read the earlier one."""
    functional = edit.functional
    repeated = _repeated(functional)
    if not any(op.name in NONLINEAR or _is_cut_again(op) for op in repeated):
        return
    for later, first in repeated.items():
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


def _is_cut_again(op: Op) -> bool:
    """True for a piece that is taken apart further."""
    return op.name == "select" and any(user.name == "select" for user in op.out.users)


def _repeated(graph: Graph) -> dict[Op, Op]:
    """Operators that compute what an earlier one has, in order; none that write, draw, or yield what the graph does."""
    writes = {mutation.node for mutation in graph.mutations}
    numbering, first = Numbering(everything=True), dict[int, Op]()
    again: dict[Op, Op] = {}
    for op in graph.ops:
        kept = any(value.const or value in graph.outputs or value in graph.written for value in op.outs)
        if kept or op.node in writes or compat.is_random(op.target):
            continue
        earlier = first.setdefault(numbering.of(op.out), op)
        if earlier is not op:
            again[op] = earlier
    return again
