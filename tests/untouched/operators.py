"""The operators a kernel library for language models has, each as a program of its own.

``OPERATORS[name]`` makes the function and its arguments anew, in a floating dtype. Attention and rotary embeddings are
there in every form models use, since they come nearest to what the backend looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
Program = tuple[Function, tuple[Any, ...]]
Maker = Callable[[torch.dtype], Program]

ROWS, COLUMNS = 6, 40


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _drawn(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    generator = _generator()
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def _unary(fn: Function) -> Maker:
    return lambda dtype: (fn, _drawn(dtype, (ROWS, COLUMNS)))


def _positive(fn: Function) -> Maker:
    return lambda dtype: (fn, (_drawn(dtype, (ROWS, COLUMNS))[0].abs() + 0.1,))


def _binary(fn: Function) -> Maker:
    return lambda dtype: (fn, _drawn(dtype, (ROWS, COLUMNS), (ROWS, COLUMNS)))


def _compared(fn: Function) -> Maker:
    def make(dtype: torch.dtype) -> Program:
        x, y = _drawn(dtype, (ROWS, COLUMNS), (ROWS, COLUMNS))
        y[::2] = x[::2]  # some are equal
        return fn, (x, y)

    return make


def _special(fn: Function) -> Maker:
    def make(dtype: torch.dtype) -> Program:
        (x,) = _drawn(dtype, (ROWS, COLUMNS))
        x[0], x[1], x[2] = torch.inf, -torch.inf, torch.nan
        return fn, (x,)

    return make


def _integers(fn: Function, count: int) -> Maker:
    generator = _generator()
    tensors = tuple(torch.randint(-99, 99, (ROWS, COLUMNS), generator=generator) for _ in range(count))
    return lambda dtype: (fn, tensors)


def _shaped(fn: Function, *shapes: tuple[int, ...]) -> Maker:
    return lambda dtype: (fn, _drawn(dtype, *shapes))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps=1e-6)


def rms_norm_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def swiglu(x: Tensor, gate: Tensor) -> Tensor:
    return x * F.silu(gate)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def cached(q: Tensor, k: Tensor, v: Tensor, k_new: Tensor, v_new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A decode step: the new key and value join the cache, which all heads of a group share."""
    k, v = torch.cat([k, k_new], dim=2), torch.cat([v, v_new], dim=2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), k, v


def cached_in_place(q: Tensor, cache: Tensor, k_new: Tensor, v_new: Tensor) -> Tensor:
    """A decode step over a cache of fixed size that it writes to."""
    place = cache.shape[3] - 1
    cache[0, :, :, place : place + 1] = k_new
    cache[1, :, :, place : place + 1] = v_new
    return F.scaled_dot_product_attention(q, cache[0], cache[1], enable_gqa=True)


def attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    mask = torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu(1)
    return torch.matmul(F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype), v)


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] for x [.., T, D]."""
    frequency = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * frequency
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def rope_interleaved(x: Tensor) -> Tensor:
    cos, sin = _angles(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def rope_halves(x: Tensor) -> Tensor:
    cos, sin = _angles(x)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_rotate_half(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        cos, sin = (angle.repeat(1, 2) for angle in _angles(x))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    return rotated(q), rotated(k)


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3, training=True)


def bounded(x: Tensor) -> Tensor:
    return x.clamp(-0.5, 0.7)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


_HEADS, _SHARED, _ONE, _ONE_SHARED = (2, 4, 9, 16), (2, 2, 9, 16), (2, 4, 1, 16), (2, 2, 1, 16)

OPERATORS: dict[str, Maker] = {
    **{name: _binary(getattr(torch, name)) for name in ("add", "sub", "mul", "div")},
    **{name: _compared(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: _unary(getattr(torch, name)) for name in ("exp", "sin", "cos", "tanh", "sigmoid", "relu")},
    **{name: _positive(getattr(torch, name)) for name in ("log", "sqrt", "rsqrt")},
    "pow": lambda dtype: (torch.pow, (*_positive(torch.pow)(dtype)[1], *_drawn(dtype, (ROWS, COLUMNS)))),
    "gelu": _unary(F.gelu),
    "gelu_tanh": _unary(gelu_tanh),
    "silu": _unary(F.silu),
    "swiglu": _binary(swiglu),
    "hardswish": _unary(F.hardswish),
    "layer_norm": _shaped(layer_norm, (ROWS, COLUMNS), (COLUMNS,), (COLUMNS,)),
    "rms_norm": _shaped(rms_norm, (ROWS, COLUMNS), (COLUMNS,)),
    "rms_norm_by_hand": _shaped(rms_norm_by_hand, (ROWS, COLUMNS), (COLUMNS,)),
    "mm": _shaped(torch.mm, (24, 40), (40, 16)),
    "bmm": _shaped(torch.bmm, (3, 24, 40), (3, 40, 16)),
    "addmm": _shaped(torch.addmm, (16,), (24, 40), (40, 16)),
    "matmul": _shaped(torch.matmul, (2, 3, 24, 40), (40, 16)),
    "scaled_dot_product_attention": _shaped(F.scaled_dot_product_attention, _HEADS, _HEADS, _HEADS),
    "attention_causal": _shaped(causal, _HEADS, _HEADS, _HEADS),
    "attention_grouped": _shaped(grouped, _HEADS, _SHARED, _SHARED),
    "attention_masked": _shaped(masked, _HEADS, _HEADS, _HEADS),
    "attention_cached": _shaped(cached, _ONE, _SHARED, _SHARED, _ONE_SHARED, _ONE_SHARED),
    "attention_cached_in_place": _shaped(cached_in_place, _ONE, (2, *_SHARED), _ONE_SHARED, _ONE_SHARED),
    "attention_by_hand": _shaped(attention_by_hand, _HEADS, _HEADS, _HEADS),
    "rope_interleaved": _shaped(rope_interleaved, _HEADS),
    "rope_halves": _shaped(rope_halves, _HEADS),
    "rope_rotate_half": _shaped(rope_rotate_half, _HEADS, _SHARED),
    "softmax": _unary(softmax),
    "clamp": _unary(bounded),
    "dropout": _unary(dropout),
    "isinf": _special(torch.isinf),
    "isnan": _special(torch.isnan),
    "bitwise_and": _integers(torch.bitwise_and, 2),
    "bitwise_or": _integers(torch.bitwise_or, 2),
    "bitwise_not": _integers(torch.bitwise_not, 1),
}
PRODUCTS = ("mm", "bmm", "addmm", "matmul", "scaled_dot_product_attention", "attention_by_hand")
"""Those that ``torch.set_float32_matmul_precision`` is about."""
