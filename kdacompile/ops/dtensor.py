"""Distributed tensors are declined, with the way out in the message.

Batch and heads are independent, so a sharding rule exists: shard B of every operand that has it, or the heads of every
operand. torch's ``register_sharding`` cannot hold it yet. It caches a decision by the specs of the tensors alone and
leaves out which optional argument each of them is, so a call with a gate per token and no beta would be served the
decision of a call with a beta and no gate; and an op that returns a list, as the backward ops do, gets one spec for all
of it. Shards are computed by the op itself, on local tensors: ``to_local``, or ``local_map`` around the call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kdacompile.ops.errors import DistributedTensorError

_MODULE = "torch.distributed.tensor"


def refuse_dtensors(op: Any, tensors: Sequence[Any]) -> None:
    """Raise if an operand is a DTensor. Does not import torch.distributed.tensor, which takes a second."""
    module = sys.modules.get(_MODULE)
    if module is not None and any(isinstance(x, module.DTensor) for x in tensors):
        raise DistributedTensorError(op=op.name())
