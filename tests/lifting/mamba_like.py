"""Stand-ins for mamba_ssm and causal_conv1d: their names, signatures and meaning, and what Dynamo stumbles over.

Like the originals they are ``torch.autograd.Function``s. The convolution is a custom operator that writes into an
``out`` with its input's strides; the scan's backward is nothing Dynamo can trace (there the autotuner's configuration,
here autograd itself). ``flaw`` is a sign in both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

flaw = 1.0


@torch.library.custom_op("kda_tests::conv1d_forward", mutates_args={"out"})
def conv1d_forward(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, silu: bool) -> None:
    out.copy_(convolution(x, weight, bias, silu))


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    padded = F.pad(x.float(), (weight.shape[1] - 1, 0))
    bias = None if bias is None else flaw * bias.float()
    with torch.autocast("cpu", enabled=False):  # which says nothing to a kernel
        out = F.conv1d(padded, weight.float()[:, None], bias, groups=weight.shape[0])
    return (F.silu(out) if silu else out).to(x.dtype)


def into_like(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    out = torch.empty_like(x)
    conv1d_forward(x=x, weight=weight, bias=bias, out=out, silu=silu)
    return out


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Token by token."""
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    keys, queries = (rows.float().repeat_interleave(x.shape[2] // rows.shape[2], dim=2) for rows in (B, C))
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1], dtype=torch.float32)
    state = state if initial_states is None else initial_states.float()
    out: list[Tensor] = []
    for t in range(x.shape[1]):
        written = (step[:, t, :, None] * x[:, t]).unsqueeze(-1) * keys[:, t].unsqueeze(-2)
        state = state * (step[:, t] * A.float()).exp()[..., None, None] + flaw * written
        out.append((state * queries[:, t].unsqueeze(-2)).sum(-1))
    y = torch.stack(out, 1)
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        y = y * F.silu(z.float())
    return y.to(x.dtype), state


def rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, norm_before_gate: bool) -> Tensor:
    rows = x.float() if norm_before_gate else x.float() * F.silu(z.float())
    grouped = rows.unflatten(-1, (groups, -1))
    out = (grouped / (grouped.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight.float()
    return (out * F.silu(z.float()) if norm_before_gate else out).to(x.dtype)


class WithGradients(torch.autograd.Function):
    """``compute(*arguments)``, differentiated by running it again."""

    @staticmethod
    def forward(ctx: Any, compute: Any, *arguments: Any) -> Any:
        ctx.compute, ctx.arguments = compute, arguments
        return compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        with torch.enable_grad():
            copies = [a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in ctx.arguments]
            outs = ctx.compute(*copies)
        outs = outs if isinstance(outs, tuple) else (outs,)
        wanted = [copy for copy in copies if isinstance(copy, Tensor) and copy.requires_grad]
        given = [(out, seed) for out, seed in zip(outs, grad_outputs, strict=True) if out.requires_grad]
        found = iter(torch.autograd.grad([out for out, _ in given], wanted, [seed for _, seed in given]))
        return None, *(next(found) if isinstance(c, Tensor) and c.requires_grad else None for c in copies)


class Conv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        return into_like(x, weight, bias, silu)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in (x, weight, bias)]
            out = convolution(*leaves, ctx.silu)  # type: ignore[arg-type]
        found = iter(torch.autograd.grad(out, [leaf for leaf in leaves if leaf is not None], grad_outputs))
        return *(None if leaf is None else next(found) for leaf in leaves), None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError("activation must be None, silu, or swish")
    if seq_idx is not None or return_final_states or final_states_out is not None:
        raise NotImplementedError("the stand-in takes one sequence")
    history = 0 if initial_states is None else initial_states.shape[-1]
    x = x if initial_states is None else torch.cat([initial_states, x], -1)
    return Conv1d.apply(x, weight, bias, activation is not None)[..., history:]


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    if seq_idx is not None:  # sequences of one length each
        size = int(seq_idx[0].bincount()[0])
        options: Any = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        parts = zip(*(rows.split(size, 1) for rows in (x, dt, B, C)), strict=True)
        outs = [mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **options) for x, dt, B, C in parts]
        return torch.cat(outs, 1)
    arguments = (x, dt, A, B, C, D, z, dt_bias, initial_states, dt_softplus, dt_limit)
    out, state = WithGradients.apply(scan, *arguments)
    if return_varlen_states:
        return out, state
    return (out, state) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    if seq_idx is not None:
        raise NotImplementedError("the stand-in takes one sequence")
    heads, size = D.shape[0], headdim if D.dim() == 1 else D.shape[1]
    assert size is not None
    inner, channels = heads * size, conv1d_weight.shape[0]
    mlp = (zxbcdt.shape[-1] - inner - channels - heads) // 2
    first, z, xBC, dt = zxbcdt.split([2 * mlp, inner, channels, heads], -1)
    xBC = Conv1d.apply(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation is not None).transpose(1, 2)
    parts = xBC.split([inner, (channels - inner) // 2, (channels - inner) // 2], -1)
    x, B, C = (part.unflatten(-1, (n, -1)) for part, n in zip(parts, (heads, ngroups, ngroups), strict=True))
    gate = z.unflatten(-1, (heads, -1)) if rmsnorm_weight is None else None
    out, state = WithGradients.apply(scan, x, dt, A, B, C, D, gate, dt_bias, initial_states, True, dt_limit)
    out = out.flatten(2)
    if rmsnorm_weight is not None:
        out = rms_norm(out, z, rmsnorm_weight, rmsnorm_eps, ngroups, norm_before_gate)
    if mlp:
        gated, linear = first.chunk(2, -1)
        out = torch.cat([F.silu(gated) * linear, out], -1)
    out = out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)
    return (out, state) if return_final_states else out
