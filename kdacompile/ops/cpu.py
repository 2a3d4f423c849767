"""MLA on the CPU: torch's FlashAttention for what it takes, the device-independent kernels for the rest."""

from __future__ import annotations

from kdacompile.lowering.cpu.attention import choose_attention
from kdacompile.ops.mla_fused import FusedAttention

FusedAttention(choose_attention, choose_attention).serve("CPU")
