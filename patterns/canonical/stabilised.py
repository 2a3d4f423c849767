"""Decays divided by the largest of their row: gates of another recurrence, the largest of which is one.

    L_ts = f_(s+1) + .. + f_t + i_s  (s <= t, else -inf),    m_t = max_s L_ts
    exp(L_ts - m_t) = exp(g_(s+1) + .. + g_t) exp(i_s - m_s)    with    g_t = f_t + m_(t-1) - m_t <= 0

mLSTM keeps its exponentials in range like this. ``m_t`` is the largest of ``f_t + m_(t-1)`` and ``i_t``, so it is known
token by token, and what is left is a gate per token and a weight of each key, neither above one.
"""

from __future__ import annotations

import contextlib

import torch

from kdacompile.graph.edit import CannotEdit, Edit
from kdacompile.graph.ir import Op, Value, ancestors
from kdacompile.patterns.canonical.proof import agrees
from kdacompile.patterns.engine.values import regrouped, root
from kdacompile.patterns.engine.vocabulary import LAYOUT, ORDERED

LINEAR = LAYOUT | frozenset("add sub neg cumsum where masked_fill tril slice split cat repeat select".split())
"""What sums of log gates are made with: linear in them, where masks are constants."""

MAXIMA = frozenset({"max", "amax"})


def apply(edit: Edit) -> None:
    """Redefine every exponential of a square of sums less the largest of each row."""
    for op in tuple(edit.functional.ops):
        below = op.reads[0].op if op.name == "exp" and op.node is not None else None
        if below is not None and below.name == "sub" and len(below.reads) == 2 and not below.kwargs:
            with contextlib.suppress(CannotEdit):
                _rewrite(edit, op, *below.reads)


def _rewrite(edit: Edit, op: Op, sums: Value, largest: Value) -> None:
    if op.out.node in edit.fixed or op.out.dtype.itemsize < 4 or not _is_row_maximum(largest, sums):
        return  # half precision rounds the sums, which are not summed here
    sizes = _sizes(sums)[:-1]
    inside = ancestors([sums], lambda value: not (value.const or _is_linear(value)) or _is_laid_out(value, sizes))
    made = {out for step in inside for out in step.outs}
    read = [value for value in dict.fromkeys(v for step in inside for v in step.reads) if value not in made]
    gates = [value for value in read if not value.const]
    if len(gates) != 2 or any(_sizes(value) != sizes for value in gates):
        return
    steps = {op, *ancestors([op.reads[0]], lambda value: value is sums)}
    for f, i in (gates, gates[::-1]):
        new = _decays(edit, op, largest, f, i)
        if agrees(edit, [(new, op.out)], inside | steps, ("normal", "positive", "negative"), sums.shape[:-2]):
            edit.redefine(op.out, new)
            return


def _is_row_maximum(largest: Value, sums: Value) -> bool:
    found, shape = _kept(largest), sums.shape
    maker = found.op
    if maker is None or maker.name not in MAXIMA or maker.out is not found or maker.reads != [sums]:
        return False
    return shape[-1:] == shape[-2:-1] and largest.shape == (*shape[:-1], 1) and len(maker.args) > 1


def _kept(largest: Value) -> Value:
    """The maximum itself, where a dimension was given back to it, which it had lost, or it was taken off the tape."""
    op = largest.op
    while op is not None and op.name in ORDERED and op.reads[0].shape in (largest.shape, largest.shape[:-1]):
        op, largest = op.reads[0].op, op.reads[0]
    return largest


def _is_linear(value: Value) -> bool:
    op = value.op
    if op is not None and op.name == "where":
        return op.args[0].const and op.reads[-1].const
    return op is not None and op.name in LINEAR


def _is_laid_out(value: Value, sizes: list[int]) -> bool:
    """Whether a gate has the dimensions of rows here, and not where it is made (a projection, tokens before heads)."""
    made = root(value)
    return _sizes(value) == sizes != _sizes(made) and not (made.const or _is_linear(made))


def _sizes(value: Value) -> list[int]:
    return [size for size in value.shape if size > 1]


def _decays(edit: Edit, op: Op, largest: Value, f: Value, i: Value) -> Value:
    """The same exponentials, of gates that never exceed zero and weights of keys. Nothing is written where no token has
    been yet (``i`` and ``m`` are -inf).
    """
    like = op.node
    m = edit.call("squeeze", largest, -1, like=like)
    f, i = (edit.moved(value, regrouped(value.shape, m.shape), like) for value in (f, i))
    rises = edit.call("nan_to_num", edit.call(torch.diff, m, like=like), like=like)
    g = edit.call(torch.sub, f, edit.call(torch.nn.functional.pad, rises, (1, 0), like=like), like=like)
    total = edit.call("cumsum", g, -1, like=like)
    rows, columns = (edit.call("unsqueeze", total, dim, like=like) for dim in (-1, -2))
    apart = edit.call(torch.sub, rows, columns, like=like)
    later = edit.call("triu", edit.call(torch.ones_like, apart, dtype=torch.bool, like=like), 1, like=like)
    apart = edit.call("masked_fill", apart, later, -torch.inf, like=like)
    logs = edit.call("nan_to_num", edit.call(torch.sub, i, m, like=like), nan=-torch.inf, like=like)
    weights = edit.call("unsqueeze", edit.call("exp", logs, like=like), -2, like=like)
    return edit.call(torch.mul, edit.call("exp", apart, like=like), weights, like=like)
