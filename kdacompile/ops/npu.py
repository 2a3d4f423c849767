"""The semantic ops on an Ascend NPU: an operator of torch_npu or the emitted kernels, else the device-independent ones.

What is fused into the loads elsewhere (l2norm, the gate's activation, sigmoid of beta) is a few elementwise operations
on the device here, in fp32, before the kernels. Nothing of torch_npu is imported: it registers its operators with torch
when it loads, and until it has there is no device of this type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kdacompile.lowering.ascend.npu import choose, choose_attention
from kdacompile.lowering.calls import Call
from kdacompile.lowering.run import l2norm
from kdacompile.ops import semantics
from kdacompile.ops.fused import FusedKernels
from kdacompile.ops.mla_fused import FusedAttention


def prepare(call: Call) -> Call:
    """The call with log gates and beta as they are used, normalised q and k, and q, k and v of one dtype."""
    dtype, eps = call.compute_dtype, call.qk_l2norm_eps
    q, k = (l2norm(x.float(), eps) if eps > 0.0 else x for x in (call.q, call.k))
    g, beta = semantics.prepared_gate(call, torch.float32), call.beta
    if g is not None and call.gate_fn == "factor":
        g = torch.log(g)
    if beta is not None and call.sigmoid_beta:
        beta = torch.sigmoid(beta.float())
    operands = {"q": q.to(dtype), "k": k.to(dtype), "v": call.v.to(dtype), "g": g, "beta": beta}
    applied: dict[str, Any] = {"A_log": None, "dt_bias": None, "gate_fn": "log", "sigmoid_beta": False}
    return replace(call, **operands, **applied, qk_l2norm_eps=0.0)


FusedKernels(choose, prepare).serve("PrivateUse1")
FusedAttention(choose_attention).serve("PrivateUse1")
