"""What tokens read of a state that enters, without the delta rule: it only decays, channel by channel.

S_t = diag(exp g_t) S_{t-1} + ..        G_t = g_1 + .. + g_t        P_t = scale exp(G_t) q_t        A = diag(exp G_T)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.distributed.fragments import Sequences
from kdacompile.lowering.calls import Call
from kdacompile.lowering.run import l2norm
from kdacompile.ops.semantics import prepared_gate


def decays(call: Call, sequences: Sequences, fragments: int) -> tuple[Tensor, Tensor]:
    """P ``[B, T, HV, K]`` and the diagonal of A ``[fragments, B | 1, HV, K, 1]``, of what enters each fragment.

    Both are 0 where nothing enters, and P behind the end of a packed sequence that did.
    """
    batch, tokens, heads, keys = *call.q.shape[:2], call.v.shape[2], call.q.shape[3]
    dtype, length, device = call.state_dtype, tokens // fragments, call.q.device
    entering = sequences.enters.any(1)  # [fragments]
    if sequences.bounds is None:  # known on the host, and all but a first fragment; a copy would have to be waited for
        entering = torch.arange(fragments, device=device) >= int(not entering[0])
    last = entering.new_full((fragments,), length, dtype=torch.int64)
    if sequences.bounds is not None:
        lengths = sequences.bounds.diff().unflatten(0, (fragments, -1))
        last = torch.where(sequences.enters, lengths, 0).sum(1)
    total = _log_decays(call, dtype).unflatten(1, (fragments, length)).cumsum(2)  # [B, fragments, T, HV, K | 1]
    q = l2norm(call.q.to(dtype), call.qk_l2norm_eps).repeat_interleave(heads // call.q.shape[2], 2)
    here = torch.arange(length, device=device) < torch.where(entering, last, 0).unsqueeze(1)  # [fragments, T]
    read = call.scale * total.exp() * q.unflatten(1, (fragments, length))
    readers = torch.where(here[..., None, None], read, 0).flatten(1, 2)
    ends = total.new_zeros(batch, fragments, *total.shape[3:])
    if length:
        at = total[:, torch.arange(fragments, device=device), (last - 1).clamp(min=0)]
        ends = torch.where((last > 0)[:, None, None], at, ends)
    own = torch.where(entering[:, None, None], ends.exp(), 0).expand(batch, fragments, heads, keys)
    return readers, own.transpose(0, 1).unsqueeze(-1)


def _log_decays(call: Call, dtype: torch.dtype) -> Tensor:
    """g of each token, ``[B, T, HV, K | 1]``."""
    g, shape = prepared_gate(call, dtype), call.v.shape[:3]
    if g is None:
        return torch.zeros((), dtype=dtype, device=call.q.device).expand(*shape, 1)
    g = g.log() if call.gate_fn == "factor" else g
    return g if call.gate == "channel" else g.unsqueeze(-1).expand(*shape, 1)
