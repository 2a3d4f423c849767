"""Masks that hide what lies past a number per request: the op takes the numbers instead.

    keep[b, s] = s < lengths[b]

A static cache is masked so, by the position it is filled up to, and so are gathered pages. Kernels then read no more of
a cache than is filled, which a mask cannot tell them. What a mask compares is read off the graph, not probed: the
tokens' numbers are a constant 0, 1, 2, .. and what they are compared with is an integer per request.
"""

from __future__ import annotations

import math

import torch

from kdacompile.patterns.evaluate import EvaluationError, constant
from kdacompile.patterns.ir import Value
from kdacompile.patterns.mla import Claim, MlaPlacement
from kdacompile.patterns.vocabulary import LAYOUT

MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}
NOT = frozenset({"logical_not", "bitwise_not"})
PLUS = {"lt": 0, "le": 1}
"""What makes a length of the number that a token's is below, or at most."""


def lengths_instead(claim: Claim) -> Claim:
    """The claim with ``lengths`` in place of its mask, where the mask says nothing else."""
    mask = claim.inputs.get("mask")
    hidden_is_gone = claim.mask_fill == -math.inf
    if mask is None or mask.value.dtype is not torch.bool or claim.causal or claim.prefix or not hidden_is_gone:
        return claim
    if "T" in mask.letters or "H" in mask.letters:
        return claim
    found = _limit(mask.value, keeps=claim.mask_keeps, tokens=claim.sizes["S"])
    if found is None:
        return claim
    limit, plus = found
    batch = claim.sizes["B"]
    if limit.node is None or math.prod(limit.shape) not in (1, batch):
        return claim
    letters = "".join("B" if size == batch != 1 else "." for size in limit.shape)
    inputs = {role: placement for role, placement in claim.inputs.items() if role != "mask"}
    return claim.with_(inputs=inputs | {"lengths": MlaPlacement("lengths", limit, letters)}, lengths_plus=plus)


def _limit(mask: Value, *, keeps: bool, tokens: int) -> tuple[Value, int] | None:
    """The number that tokens are compared with, and what to add to it."""
    op = mask.op
    while op is not None and (op.name in NOT or op.name in LAYOUT):
        keeps ^= op.name in NOT
        op = op.reads[0].op
    if op is None or op.name not in MIRRORED or len(op.reads) != 2:
        return None
    relation, (left, right) = op.name, op.reads
    if not left.const:
        relation, left, right = MIRRORED[relation], right, left
    relation = relation if keeps else NEGATED[relation]
    if relation not in PLUS or right.dtype not in (torch.int32, torch.int64) or not _counts(left, tokens):
        return None
    while right.node is None and right.op is not None and right.op.name in LAYOUT and right.op.name != "_to_copy":
        right = right.op.reads[0]
    return right, PLUS[relation]


def _counts(value: Value, tokens: int) -> bool:
    """True for the constant 0, 1, 2, .. along the last dimension, and no other."""
    if not value.const or math.prod(value.shape) != tokens or not value.shape or value.shape[-1] != tokens:
        return False
    try:
        return torch.equal(constant(value).flatten(), torch.arange(tokens))
    except EvaluationError:
        return False
