"""The semantic ops on an Ascend NPU: an operator of torch_npu or the emitted kernels, else the device-independent ones.

What is fused into the loads elsewhere (l2norm, the gate's activation, sigmoid of beta) is a few elementwise operations
on the device here, in fp32, before the kernels. Nothing of torch_npu is imported: it registers its operators with torch
when it loads, and until it has there is no device of this type.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kdacompile.lowering.ascend.npu import choose, choose_attention
from kdacompile.lowering.calls import Call
from kdacompile.lowering.run import l2norm
from kdacompile.ops.fused import FusedKernels
from kdacompile.ops.mla_fused import FusedAttention
from kdacompile.ops.semantics import log_gate


def prepare(call: Call) -> Call:
    """The call with log gates and beta as they are used, normalised q and k, and q, k and v of one dtype."""
    dtype = call.compute_dtype

    def operand(x: Tensor, eps: float = 0.0) -> Tensor:
        return (l2norm(x.float(), eps) if eps > 0.0 else x).to(dtype)

    g, beta = call.g, call.beta
    if g is not None:
        A_log, dt_bias = (None if x is None else x.float() for x in (call.A_log, call.dt_bias))
        g = log_gate(
            g.float(), A_log, dt_bias, gate=call.gate, gate_fn=call.gate_fn, gate_scale=call.gate_scale
        )  # fmt: skip
        g = torch.log(g) if call.gate_fn == "factor" else g
    if beta is not None and call.sigmoid_beta:
        beta = torch.sigmoid(beta.float())
    return replace(
        call,
        q=operand(call.q, call.qk_l2norm_eps),
        k=operand(call.k, call.qk_l2norm_eps),
        v=operand(call.v),
        g=g,
        beta=beta,
        A_log=None,
        dt_bias=None,
        gate_fn="log",
        sigmoid_beta=False,
        qk_l2norm_eps=0.0,
    )


FusedKernels(choose, prepare).serve("PrivateUse1")
FusedAttention(choose_attention).serve("PrivateUse1")
