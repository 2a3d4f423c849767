"""Outer products that are added in one call, as sums.

    addr(S, k, v) = b S + a k v^T

The call does not say which dimension each vector lies along; a product of ``k[:, None]`` and ``v[None, :]`` does.
"""

from __future__ import annotations

import contextlib

import torch

from kdacompile.graph.edit import CannotEdit, Edit


def apply(edit: Edit) -> None:
    """Redefine every ``addr``, with its factors ``beta`` (b) and ``alpha`` (a)."""
    for op in tuple(edit.functional.ops):
        if op.name != "addr" or op.node is None or op.out.node in edit.fixed:
            continue
        start, rows, columns = op.reads
        alpha, beta = (op.kwargs.get(name, 1) for name in ("alpha", "beta"))
        with contextlib.suppress(CannotEdit):
            rows, columns = (edit.call("unsqueeze", x, dim, like=op.node) for x, dim in ((rows, 1), (columns, 0)))
            added = edit.call(torch.mul, rows, columns, like=op.node)
            if beta not in (0, 1):
                start = edit.call(torch.mul, start, beta, like=op.node)
            if alpha != 1:
                added = edit.call(torch.mul, added, alpha, like=op.node)
            edit.redefine(op.out, edit.call(torch.add, start, added, like=op.node) if beta else added)
