"""What a model computes of its inputs in front of the recurrence: norms of q and k, the gate function, sigmoid of beta.

The kernel of a step does it as it loads them (:class:`Fused`); in front of the kernels over whole sequences and of
torch_npu's operators it is a few element-wise operators in fp32 (:func:`prepare`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..gates import GATE_FUNCTIONS, log_decay
from ..run import l2norm


@dataclass(frozen=True)
class Fused:
    """What of it a kernel does itself; ``rate`` and ``bias``: whether the gate function is given A_log and dt_bias."""

    norm: bool = False
    gate_fn: str = "log"
    rate: bool = False
    bias: bool = False
    sigmoid_beta: bool = False

    @staticmethod
    def of(call: Call) -> Fused:
        parametric = call.g is not None and GATE_FUNCTIONS[call.gate_fn].parametric
        return Fused(
            call.qk_l2norm_eps > 0.0,
            "log" if call.g is None else call.gate_fn,
            parametric and call.A_log is not None,
            parametric and call.dt_bias is not None,
            call.sigmoid_beta and call.beta is not None,
        )

    @property
    def name(self) -> str:
        words = ["norm" * self.norm, "" if self.gate_fn == "log" else self.gate_fn]
        words += ["rate" * self.rate, "bias" * self.bias, "sigmoid" * self.sigmoid_beta]
        return "_".join(word for word in words if word)


def prepare(call: Call) -> Call:
    """The call with log gates and beta as they are used, normalised q and k, and q, k and v of one dtype."""
    dtype, eps = call.compute_dtype, call.qk_l2norm_eps
    q, k = (l2norm(x.float(), eps) if eps > 0.0 else x for x in (call.q, call.k))
    beta = call.beta
    if beta is not None and call.sigmoid_beta:
        beta = torch.sigmoid(beta.float())
    operands = {"q": q.to(dtype), "k": k.to(dtype), "v": call.v.to(dtype), "g": _log_gate(call), "beta": beta}
    applied: dict[str, Any] = {"A_log": None, "dt_bias": None, "gate_fn": "log", "sigmoid_beta": False}
    return replace(call, **operands, **applied, qk_l2norm_eps=0.0)


def single(call: Call) -> Call:
    """The call with q, k and v of one dtype, and everything else in fp32."""
    names = ("g", "beta", "initial_state", "A_log", "dt_bias")
    given = {name: None if (x := getattr(call, name)) is None else x.float() for name in names}
    return replace(call, **given, **{name: getattr(call, name).to(call.compute_dtype) for name in ("q", "k", "v")})


def _log_gate(call: Call) -> Tensor | None:
    if call.g is None:
        return None
    x = call.g.float() if call.dt_bias is None else call.g.float() + call.dt_bias.float()
    rate: Tensor | float = 1.0
    if call.A_log is not None:
        rate = call.A_log.float().exp()
        rate = rate.unsqueeze(-1) if call.gate == "channel" else rate
    return log_decay(x, rate, call.gate_fn, call.gate_scale)
