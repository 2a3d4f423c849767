"""What a model computes of its inputs in front of the recurrence: norms of q and k, the gate function, sigmoid of beta.

The kernels of a step and of whole sequences do it as they load them (:class:`Fused`); in front of those of gradients
and of torch_npu's operators it is a few element-wise operators in fp32 (:func:`prepare`).
"""

from __future__ import annotations

import re
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

    @property
    def formula(self) -> str:
        """The log gate in Triton, by the gate function's formula in ``x``, ``rate`` and ``gate_scale``."""
        text = GATE_FUNCTIONS[self.gate_fn].formula
        text = text if self.rate else re.sub(r"\brate\b", "1.0", text)
        text = re.sub(r"\blog\(", "tl.log(", text)
        return f"floor_gate({text})"

    def functions(self, *, tile: bool, channels: bool) -> str:
        """The two functions that a kernel over whole sequences has of a gate function, see ``macros_channel.py``; ""
        for log gates. ``tile``: for tiles of tokens by channels, or for a vector of tokens; ``channels``: whether the
        bias has one number a channel."""
        if self.gate_fn == "log":
            return ""
        rate = "tl.exp(load_number(A_log_ptr, head, HV, K))" if self.rate else "0.0"
        bias = "tl.load(vector_at(dt_bias_ptr, head, K))" if channels else "load_number(dt_bias_ptr, head, HV, K)"
        row, column = ("[None, :]", "[:, None]") if tile else ("", "")
        return "\n".join([
            "@triton.jit",
            "def gate_parameters(A_log_ptr, dt_bias_ptr, head, HV: tl.constexpr, K: tl.constexpr):",
            f"    return {rate}, {bias if self.bias else '0.0'}",
            "\n\n@triton.jit",
            "def log_gate(x, rate, bias, gate_scale, rows, N: tl.constexpr):",
            *[f"    x = x + bias{row}"] * self.bias,
            *[f"    rate = rate{row}"] * (self.rate and tile),
            f"    d = {self.formula}",
            "    if N > 1:",
            f"        d = tl.where(exists(rows, N){column}, d, 0.0)",
            "    return d",
            "\n\n",
        ])  # fmt: skip


PLAIN = Fused()


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
