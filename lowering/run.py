"""The entry points of the lowering: one row of the family on real tensors."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kdacompile.compat.dispatcher import is_functorch_wrapped_tensor

from .cpu import run_recurrence, runs_recurrence
from .errors import ArgumentError
from .executor import Executable
from .layout import Layout, dense_layout, packed_layout
from .linear_attention import GATES, linear_attention_program
from .scratch import Scratch

MIN_CHUNK, MAX_CHUNK = 16, 256

# Measured on a CPU over K = 16 .. 128, 1 to 16 heads, all gates: 32 was the fastest or within a tenth of it. The
# products inside a chunk grow with its length and the number of scan steps falls with it. On an accelerator a step is
# a launch, so longer chunks win.
CPU_CHUNK, DEVICE_CHUNK = 32, 64


@cache
def executable(gate: str, delta: bool, beta: bool, gate_form: str, form: str) -> Executable:
    """The compiled program of one row, made once per process."""
    return Executable(linear_attention_program(gate, delta, beta=beta, gate_form=gate_form, form=form))


def choose_chunk(chunk_size: int, length: int, device: torch.device) -> int:
    """The chunk length to run with; always a power of two.

    A given size is a wish: chunking does not change the function, so it is rounded up to a power of two within
    [MIN_CHUNK, MAX_CHUNK]. 0 leaves the choice to the lowering. Short sequences get a chunk no longer than they are.
    """
    if chunk_size < 0:
        raise ArgumentError(f"chunk_size must be 0 or positive, got {chunk_size}")
    wish = chunk_size or (CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK)
    chunk = 1 << (min(max(wish, MIN_CHUNK), MAX_CHUNK) - 1).bit_length()
    return min(chunk, 1 << max(length - 1, 0).bit_length())


def run_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    scale: float,
    delta: bool,
    gate: str,
    chunk_size: int = 0,
    cu_seqlens: Tensor | None = None,
    gate_form: str = "log",
    norm_eps: float = 0.0,
    scratch: Scratch | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention over a sequence; see ``linear_attention.py`` for the mathematics.

    q, k ``[B, T, H, K]``, v ``[B, T, HV, V]``, g by ``gate``: None | ``[HV]`` | ``[B, T, HV]`` | ``[B, T, HV, K]``,
    the log gate or, with ``gate_form="factor"``, its exponential; beta ``[B, T, HV]``; initial_state ``[B, HV, K,
    V]``. With ``cu_seqlens`` (B = 1) the states are ``[sequences, HV, K, V]``. With ``norm_eps`` q and k are
    normalised first, see :func:`l2norm`. Everything is computed in q's dtype. Returns o ``[B, T, HV, V]`` and the
    final state.

    On a CPU and without gradients this is the C kernel of the recurrence, which knows no chunks, if the machine can
    compile it; else the torch executor. The executor it is as well where ``scratch``, the source of its buffers, is
    given.
    """
    sequences = _check(q, k, v, g, beta, initial_state, gate, gate_form, cu_seqlens)
    batch, length, _, width = q.shape
    heads = v.shape[2]
    if length == 0:
        return _nothing(v, initial_state, (sequences, heads, width, v.shape[3]), q.dtype)
    functional = _needs_functional(q, k, v, g, beta, initial_state)
    if not functional and scratch is None and runs_recurrence(q):
        choose_chunk(chunk_size, length, q.device)  # for its check: a chunk changes nothing here
        return run_recurrence(
            q, k, v, g, beta, initial_state,
            scale=scale, delta=delta, gate=gate, gate_form=gate_form, norm_eps=norm_eps, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    q, k = l2norm(q, norm_eps), l2norm(k, norm_eps)
    chunk = choose_chunk(chunk_size, length, q.device)
    if cu_seqlens is None:
        layout = dense_layout(batch, length, heads, chunk)
    else:
        layout = packed_layout(cu_seqlens, length, heads, chunk)
    if not functional and scratch is None:
        scratch = Scratch()
    return _execute(
        q, k, v, g, beta, initial_state, scale, delta, gate, gate_form, "chunk", layout, None if functional else scratch
    )


def run_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    scale: float,
    delta: bool,
    gate: str,
    gate_form: str = "log",
    norm_eps: float = 0.0,
    overwrite: bool = False,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token (T = 1) through the recurrence itself; arguments and results as in :func:`run_linear_attention`.

    With ``overwrite`` the state returned may be ``initial_state``, overwritten once everything else was read; or not.
    ``checked``: whoever calls knows that the operands are right.
    """
    if not checked:
        _check(q, k, v, g, beta, initial_state, gate, gate_form, None)
        if q.shape[1] != 1:
            raise ArgumentError(f"a step takes one token, got {q.shape[1]}")
    functional = _needs_functional(q, k, v, g, beta, initial_state)
    if not functional and runs_recurrence(q):
        return run_recurrence(
            q, k, v, g, beta, initial_state,
            scale=scale, delta=delta, gate=gate, gate_form=gate_form, norm_eps=norm_eps, overwrite=overwrite,
        )  # fmt: skip
    q, k = l2norm(q, norm_eps), l2norm(k, norm_eps)
    scratch = None if functional else Scratch()
    layout = dense_layout(q.shape[0], 1, v.shape[2], 1)
    return _execute(q, k, v, g, beta, initial_state, scale, delta, gate, gate_form, "token", layout, scratch)


def l2norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x * x) + eps)`` over the last dimension: a zero row stays zero. ``x`` itself if eps is 0."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) if eps else x


def _execute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    delta: bool,
    gate: str,
    gate_form: str,
    form: str,
    layout: Layout,
    scratch: Scratch | None,
) -> tuple[Tensor, Tensor]:
    if gate == "head" and g is not None:
        g = g.expand(q.shape[0], q.shape[1], -1)
    run = executable(gate, delta, beta is not None, gate_form, form)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    dims = {"C": layout.chunk, "K": q.shape[-1], "V": v.shape[-1]}
    out = run(tensors, layout, dims=dims, dtype=q.dtype, scalars={"scale": scale}, scratch=scratch)
    return out["o"], out["final_state"]


def _nothing(
    v: Tensor, initial_state: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """T = 0: no outputs, and the state as it was."""
    state = (
        v.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype, copy=True).contiguous()
    )
    return v.new_zeros(v.shape, dtype=dtype), state


def _needs_functional(*tensors: Tensor | None) -> bool:
    """Whether autograd, ``torch.func`` or a tensor subclass (fake tensors) looks at one of these tensors."""
    return any(x is not None and is_watched(x) for x in tensors)


def is_watched(x: Tensor) -> bool:
    """Whether more than the numbers of ``x`` count: a kernel that is given its address would leave that out."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        return True
    return (x.requires_grad and torch.is_grad_enabled()) or is_functorch_wrapped_tensor(x)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    gate: str,
    gate_form: str,
    cu_seqlens: Tensor | None,
) -> int:
    """Raise :class:`ArgumentError` on shapes outside the contract; returns the number of sequences."""
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise ArgumentError(f"q, k [B, T, H, K] and v [B, T, HV, V] expected, got {q.shape}, {k.shape}, {v.shape}")
    if q.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"the compute dtype is float32 or float64, got {q.dtype}")
    batch, length, heads, width = q.shape
    value_heads = v.shape[2]
    if heads == 0 or value_heads % heads:
        raise ArgumentError(f"value heads ({value_heads}) must be a multiple of key heads ({heads})")
    if gate not in GATES or (gate == "none") != (g is None):
        raise ArgumentError(f"gate={gate!r} does not go with g={None if g is None else tuple(g.shape)}")
    if cu_seqlens is not None and batch != 1:
        raise ArgumentError(f"packed sequences come in one batch entry, got {batch}")
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    per_token = (batch, length, value_heads)
    shapes = {"none": None, "head": (value_heads,), "token": per_token, "channel": (*per_token, width)}
    expected = (
        ("g", g, shapes[gate]),
        ("beta", beta, per_token),
        ("initial_state", initial_state, (sequences, value_heads, width, v.shape[3])),
    )
    for name, x, shape in expected:
        if x is not None and tuple(x.shape) != shape:
            raise ArgumentError(f"{name} must be {shape}, got {tuple(x.shape)}")
    if gate_form not in ("log", "factor"):
        raise ArgumentError(f"gate_form must be 'log' or 'factor', got {gate_form!r}")
    return sequences
