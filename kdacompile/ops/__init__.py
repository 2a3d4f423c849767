"""Linear attention as torch ops: the public functions, and the semantic ops that captured graphs are rewritten to.

``linear_attention`` and ``linear_attention_step`` are for people: they reach what no captured graph can express
(``cu_seqlens``, both state layouts). The ops themselves, ``torch.ops.kdacompile.*``, are for the rewrite; importing
this package registers them.
"""

from __future__ import annotations

from kdacompile.ops import errors
from kdacompile.ops.functional import linear_attention, linear_attention_step

__all__ = ["errors", "linear_attention", "linear_attention_step"]
