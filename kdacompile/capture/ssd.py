"""What replaces functions of mamba_ssm and causal_conv1d: Mamba-2's layer in PyTorch around the op.

Per head, with x_t in R^P, B_t and C_t in R^N (SSD, arXiv 2405.21060, eq. 16; the rest as mamba_ssm documents it)::

    d_t = clamp(softplus(dt_t + dt_bias), dt_limit)
    S_t = exp(d_t A) S_{t-1} + d_t B_t x_t^T
    y_t = (S_t^T C_t + D x_t) silu(z_t)

which is simple GLA with q = C, k = B, v = x, g = d A <= 0 and beta = d. Arithmetic is at least float32, as in the
libraries' kernels, and every result is rounded once, to the dtype of its operand.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile import ops


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """``y[b, c, t] = act(bias[c] + sum_w weight[c, w] x[b, c, t - W + 1 + w])``, zeros in front of the first token.

    x ``[B, C, T]``, weight ``[C, W]``, bias ``[C]``; activation "silu" (also called "swish") or None. The result has
    x's dtype and the order of its dimensions in memory. Products and sums, no convolution: they fuse with what is
    around them.
    """
    rows = _wide(x.transpose(1, 2))
    width = weight.shape[1]
    padded, taps = F.pad(rows, (0, 0, width - 1, 0)), _wide(weight)
    out = padded[:, : rows.shape[1]] * taps[:, 0]
    for tap in range(1, width):
        out = out + padded[:, tap : tap + rows.shape[1]] * taps[:, tap]
    if bias is not None:
        out = out + bias
    out = (F.silu(out) if activation else out).to(x.dtype).transpose(1, 2)
    return out if x.stride(1) == 1 != x.stride(2) else out.contiguous()


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """The recurrence above. x, z ``[B, T, H, P]``, dt ``[B, T, H]``, A, dt_bias ``[H]``, B, C ``[B, T, G, N]``,
    D ``[H]`` or ``[H, P]``, states ``[B, H, P, N]``.
    """
    step = _wide(dt)
    step = step if dt_bias is None else step + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    out, final_states = ops.linear_attention(
        C,
        B,
        x,
        step * A,
        step,
        scale=1.0,
        initial_state=initial_states,
        output_final_state=return_final_states,
        delta=False,
        state_layout="VK",
        out_dtype=torch.promote_types(x.dtype, torch.float32),
    )
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        out = out * F.silu(_wide(z))
    return (out.to(x.dtype), final_states) if return_final_states else out.to(x.dtype)


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    initial_states: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """The layer from its input projection ``[B, T, z | x | B | C | dt]`` on: convolution, recurrence, gated norm and
    output projection. conv1d_weight ``[x | B | C, W]``; without rmsnorm_weight z gates the recurrence's output.
    """
    heads, size = D.shape[0], (headdim if D.dim() == 1 else D.shape[1])
    assert size is not None  # the library's own assertion, met when it was compared
    inner, state = heads * size, (conv1d_weight.shape[0] - heads * size) // 2
    z, xBC, dt = zxbcdt.split([inner, conv1d_weight.shape[0], heads], dim=-1)
    xBC = causal_conv1d(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation).transpose(1, 2)
    x, B, C = xBC.split([inner, state, state], dim=-1)
    gate = z.unflatten(-1, (heads, size)) if rmsnorm_weight is None else None
    operands = x.unflatten(-1, (heads, size)), dt, A, B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))
    result = chunk_scan(*operands, D, gate, dt_bias, initial_states, True, dt_limit, return_final_states)
    scanned, final_states = result if isinstance(result, tuple) else (result, None)
    out = scanned.flatten(2)
    if rmsnorm_weight is not None:
        out = _gated_norm(out, z, rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, final_states) if return_final_states else out


def _gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, norm_before_gate: bool) -> Tensor:
    """``norm(x) silu(z)``, or ``norm(x silu(z))``; the norm takes the root mean square of each group of columns."""
    gate, out = F.silu(_wide(z)), _wide(x)
    rows = (out if norm_before_gate else out * gate).unflatten(-1, (groups, -1))
    out = (rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2) * weight
    return (out * gate if norm_before_gate else out).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
