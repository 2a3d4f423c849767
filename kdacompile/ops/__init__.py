"""Linear attention and MLA as torch ops: the public functions, and the semantic ops that captured graphs become.

``linear_attention``, ``linear_attention_step``, ``mla``, ``mla_decode`` and ``mla_schedule`` are for people: they
reach what no captured graph can express (``cu_seqlens``, both state layouts, paged caches, lse). The ops themselves,
``torch.ops.kdacompile.*``, are for the rewrite; importing this package registers them.
"""

from __future__ import annotations

from kdacompile.ops import devices, errors
from kdacompile.ops.functional import linear_attention, linear_attention_step
from kdacompile.ops.mla_functional import mla, mla_decode, mla_schedule

__all__ = [
    "devices",
    "errors",
    "linear_attention",
    "linear_attention_step",
    "mla",
    "mla_decode",
    "mla_schedule",
]
