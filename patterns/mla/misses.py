"""Weights that the model has absorbed by hand on one side only: the op takes both, or none.

s_ts = (W_UK^T q_t) . c_s    with values  W_UV c_s,      or      s_ts = q_t . W_UK c_s    with values  c_s
"""

from __future__ import annotations

from kdacompile.patterns.ir import Value
from kdacompile.patterns.mla.sources import MOVES, Projection, project, scales
from kdacompile.patterns.mla.walk import Attention
from kdacompile.patterns.obstacle import Obstacle
from kdacompile.patterns.regions import root
from kdacompile.patterns.twins import Twins

FAR = 64
"""Operators above a key or value among which its projections are looked for."""


def half_absorbed(found: Attention, twins: Twins) -> Obstacle | None:
    """Keys or values that are the latent itself, beside others that are expanded from it."""
    for order in (found, found.swapped()):
        sides = {"keys": [term.keys for term in order.terms], "values": [order.values]}
        for expanded, itself in (("keys", "values"), ("values", "keys")):
            made = {twins.of(latent) for value in sides[expanded] for latent in _latents(value)}
            if any(twins.of(root(value)) in made for value in sides[itself]):
                reason = f"only the {expanded} are expanded from the latent: weights are absorbed by hand on one side"
                return Obstacle("half_absorbed", reason, found.softmax)
    return None


def _latents(value: Value) -> list[Value]:
    """What the nearest projections above a key or value are made of, rearrangements in between."""
    stack, seen, found = [value], set[Value](), list[Projection]()
    while stack and len(seen) < FAR:
        step = stack.pop()
        op = step.op
        if op is None or step in seen or step.const:
            continue
        seen.add(step)
        projection = project(op)
        if projection is not None:
            found.append(projection)
        elif op.name in MOVES or scales(op):
            stack += [read for read in op.reads if not read.const]
    return [root(projection.activation) for projection in found]
