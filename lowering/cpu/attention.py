"""Prompts of MLA on the CPU: keys and values of every head once, then whole rows of a block of queries.

torch's FlashAttention, whose products are smaller and whose values have to be padded to the keys' width, takes 1.1 to
1.6 times as long for 256 to 1024 tokens, as long for 2048 and for 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.lowering.attention_calls import AttentionImplementation, not_expanded
from kdacompile.lowering.attention_rows import Rows
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch

from .small_attention import SMALL


class BlockedAttention:
    """Masks too; without sinks, lengths or pages, and not in fp64, where the torch executor is the oracle."""

    name = "blocked"

    def declines(self, call: Attention) -> str | None:
        if torch.float64 in {call.q.dtype, call.latent.dtype}:
            return "the torch executor is the oracle in fp64"
        if 0 in (call.q.numel(), call.latent.numel()):
            return "there is nothing to attend to"
        return not_expanded(call, self.name, without=("sinks", "lengths", "block_table"))

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` in the call's ``out_dtype`` and lse ``[B, H, T]`` in fp32."""
        x = Rows.of(call)
        parts, blocks = list(x.parts()), list(x.blocks())
        if len(parts) == len(blocks) == 1:  # a step or a short prompt: what it waits for is the host
            p, lse = x.weights(parts[0], blocks[0])
            return (p @ x.v).transpose(1, 2).to(call.out_dtype).contiguous(), lse
        o = x.q.new_empty(*x.q.shape[:3], x.v.shape[-1])
        lse = x.q.new_empty(x.q.shape[:3])
        for part in parts:
            for rows in blocks:
                p, own = x.weights(part, rows)
                o[part][:, :, rows] = p @ x.v[part][:, :, : p.shape[-1]]
                lse[part][:, :, rows] = own
        return o.transpose(1, 2).to(call.out_dtype).contiguous(), lse


BLOCKED = BlockedAttention()


def choose_attention(call: Attention) -> AttentionImplementation | None:
    """What takes a call of MLA; the torch executor does the rest."""
    offered: tuple[AttentionImplementation, ...] = (SMALL, BLOCKED)
    return next((one for one in offered if one.declines(call) is None), None)
