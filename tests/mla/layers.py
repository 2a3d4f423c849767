"""Whole layers of MLA, from a hidden state on, as published code and tutorials write them; prefill.

Every module takes ``x [B, T, 16]`` and, where it decodes, what it keeps of earlier tokens. None of them knows how a
recogniser works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, NOPE, ROPE, RANK, VALUE, WIDTH = 4, 6, 4, 12, 8, 16
BATCH, TOKENS, CACHED = 2, 11, 13
Shape = tuple[int, int, int]
QK = NOPE + ROPE


@dataclass(frozen=True)
class Case:
    """A module, the shapes of its arguments, and the mode its attention is matched in."""

    build: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]
    mode: str

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def arguments(self, longer: int = 0) -> tuple[Tensor, ...]:
        """Inputs, with as many tokens more (a single one stays alone)."""
        generator = torch.Generator().manual_seed(3)
        shapes = [(b, t + longer if t > 1 else 1, width) for b, t, width in self.shapes]
        return tuple(torch.randn(shape, generator=generator) for shape in shapes)


LAYERS: dict[str, Case] = {}
HIDDEN, TOKEN = (BATCH, TOKENS, WIDTH), (BATCH, 1, WIDTH)
PAST, PAST_ROPE = (BATCH, CACHED, RANK), (BATCH, CACHED, ROPE)


def prefill(cls: type[nn.Module]) -> type[nn.Module]:
    LAYERS[cls.__name__] = Case(cls, (HIDDEN,), "sequence")
    return cls


def decode(*past: Shape) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(cls: type[nn.Module]) -> type[nn.Module]:
        LAYERS[cls.__name__] = Case(cls, (TOKEN, *past), "step")
        return cls

    return register


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def frequencies(tokens: int, start: int = 0) -> Tensor:
    base = 1.0 / 100.0 ** (torch.arange(0, ROPE, 2).float() / ROPE)
    return torch.outer(torch.arange(start, start + tokens).float(), base)


def rotate_half(x: Tensor, angles: Tensor) -> Tensor:
    """Halves against each other; ``angles [T, D / 2]`` broadcast to ``x``."""
    angles = torch.cat([angles, angles], dim=-1)
    left, right = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-right, left], dim=-1) * angles.sin()


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbours as complex numbers, tokens in dimension 1."""
    turns = torch.polar(torch.ones_like(angles), angles).view(1, x.size(1), 1, -1)
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).to(x.dtype)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbours by strided slices."""
    out = torch.empty_like(x)
    even, odd = x[..., ::2], x[..., 1::2]
    out[..., ::2] = even * angles.cos() - odd * angles.sin()
    out[..., 1::2] = even * angles.sin() + odd * angles.cos()
    return out


class Layer(nn.Module):
    """The projections that most of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_a, self.q_norm = nn.Linear(WIDTH, 12, bias=False), Norm(12)
        self.wq_b = nn.Linear(12, HEADS * QK, bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(WIDTH, RANK + ROPE, bias=False), Norm(RANK)
        self.wkv_b = nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False)
        self.wo = nn.Linear(HEADS * VALUE, WIDTH, bias=False)
        self.scale = QK**-0.5

    def queries(self, x: Tensor) -> Tensor:
        """``[B, T, H, QK]``."""
        return self.wq_b(self.q_norm(self.wq_a(x))).view(*x.shape[:2], HEADS, QK)


@prefill
class TorchTitan(Layer):
    """Complex rotations, a concatenated key, SDPA."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q_nope, q_pe = torch.split(self.queries(x), [NOPE, ROPE], dim=-1)
        q = torch.cat([q_nope, rotate_complex(q_pe, frequencies(tokens))], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [RANK, ROPE], dim=-1)
        k_pe = rotate_complex(k_pe.unsqueeze(2), frequencies(tokens))
        kv = self.wkv_b(self.kv_norm(kv)).view(batch, tokens, -1, NOPE + VALUE)
        k_nope, v = torch.split(kv, [NOPE, VALUE], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, HEADS, -1)], dim=-1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, tokens, -1))


@prefill
class RemoteCode(Layer):
    """The modelling file that came with DeepSeek-V2: states filled by assignment, a checked additive mask."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.size()
        q = self.queries(x).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
        compressed, k_pe = torch.split(self.wkv_a(x), [RANK, ROPE], dim=-1)
        k_pe = k_pe.view(batch, length, 1, ROPE).transpose(1, 2)
        kv = self.wkv_b(self.kv_norm(compressed)).view(batch, length, HEADS, NOPE + VALUE).transpose(1, 2)
        k_nope, value_states = torch.split(kv, [NOPE, VALUE], dim=-1)
        q_pe, k_pe = (rotate_half(item, frequencies(length)) for item in (q_pe, k_pe))
        query_states = k_pe.new_empty(batch, HEADS, length, QK)
        query_states[:, :, :, :NOPE] = q_nope
        query_states[:, :, :, NOPE:] = q_pe
        key_states = k_pe.new_empty(batch, HEADS, length, QK)
        key_states[:, :, :, :NOPE] = k_nope
        key_states[:, :, :, NOPE:] = k_pe
        mask = torch.full((length, length), torch.finfo(x.dtype).min)
        mask = torch.triu(mask, diagonal=1)[None, None].expand(batch, 1, length, length)
        weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scale
        weights = F.softmax(weights + mask, dim=-1, dtype=torch.float32).to(query_states.dtype)
        weights = F.dropout(weights, p=0.0, training=self.training)
        out = torch.matmul(weights, value_states).transpose(1, 2).contiguous()
        return self.wo(out.reshape(batch, length, HEADS * VALUE))


@prefill
class Transformers4(Layer):
    """transformers before 5, without a cache: interleaved rotations, heads repeated once, a mask cut to length."""

    def rotate(self, x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        x = x.view(batch, heads, length, width // 2, 2).transpose(4, 3).reshape(batch, heads, length, width)
        return rotate_half(x, frequencies(length))

    def repeat_kv(self, x: Tensor, times: int) -> Tensor:
        batch, _, length, width = x.shape
        return x if times == 1 else x[:, :, None].expand(-1, -1, times, -1, -1).reshape(batch, -1, length, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, NOPE + VALUE)
        q_pass, q_rot = torch.split(self.queries(x).transpose(1, 2), [NOPE, ROPE], dim=-1)
        k_pass, k_rot = torch.split(self.wkv_a(x), [RANK, ROPE], dim=-1)
        k_pass = self.wkv_b(self.kv_norm(k_pass)).view(shape).transpose(1, 2)
        k_pass, value_states = torch.split(k_pass, [NOPE, VALUE], dim=-1)
        q_rot, k_rot = self.rotate(q_rot), self.rotate(k_rot.view(x.shape[0], 1, x.shape[1], ROPE))
        query_states = torch.cat((q_pass, q_rot), dim=-1)
        key_states = torch.cat((k_pass, k_rot.expand(*k_pass.shape[:-1], -1)), dim=-1)
        mask = torch.full((32, 32), torch.finfo(x.dtype).min).triu(1)[None, None]
        key_states, value_states = self.repeat_kv(key_states, 1), self.repeat_kv(value_states, 1)
        weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scale
        weights = weights + mask[:, :, : x.shape[1], : key_states.shape[-2]]
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        return self.wo(torch.matmul(weights, value_states).transpose(1, 2).contiguous().flatten(2))


@prefill
class PaddedValues(Layer):
    """Values padded to the keys' width, as flash attention wants them; the result is cut again."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.size()
        q = self.queries(x).transpose(1, 2)
        kv, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(batch, length, HEADS, -1).transpose(1, 2)
        k_nope, v = kv.split([NOPE, VALUE], dim=-1)
        k = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        v = F.pad(v, [0, QK - VALUE])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.wo(out[:, :, :, :VALUE].transpose(1, 2).flatten(2))


@prefill
class RepeatedRope(Layer):
    """A tutorial's: the rotated key repeated for every head, softmax over scores divided by a root."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.queries(x)
        q_nope, q_rope = q[..., :NOPE], rotate_pairs(q[..., NOPE:], frequencies(length)[:, None])
        compressed = self.wkv_a(x)
        k_rope = rotate_pairs(compressed[:, :, None, RANK:], frequencies(length)[:, None]).repeat(1, 1, HEADS, 1)
        kv = self.wkv_b(self.kv_norm(compressed[..., :RANK])).reshape(batch, length, HEADS, NOPE + VALUE)
        k, v = torch.cat((kv[..., :NOPE], k_rope), -1), kv[..., NOPE:]
        q, k, v = (t.permute(0, 2, 1, 3) for t in (torch.cat((q_nope, q_rope), -1), k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(QK)
        scores = scores.masked_fill(torch.tril(torch.ones(length, length)) == 0, float("-inf"))
        return self.wo((torch.softmax(scores, dim=-1) @ v).permute(0, 2, 1, 3).reshape(batch, length, -1))


@prefill
class InterleavedRepeat(Layer):
    """The rotated key through ``repeat_interleave``, the way grouped heads are copied."""

    def forward(self, x: Tensor) -> Tensor:
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe.unsqueeze(1).repeat_interleave(HEADS, dim=1)], dim=-1)
        q = self.queries(x).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, kv[..., NOPE:], is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


@prefill
class RotatedAfterExpanding(Layer):
    """The rotation runs over heads that all have the same key."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        q_nope, q_pe = self.queries(x).transpose(1, 2).split([NOPE, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).view(batch, length, HEADS, -1).transpose(1, 2)
        k_pe = rotate_half(k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1), frequencies(length))
        q = torch.cat([q_nope, rotate_half(q_pe, frequencies(length))], dim=-1)
        k = torch.cat([kv[..., :NOPE], k_pe], dim=-1)
        out = F.scaled_dot_product_attention(q, k, kv[..., NOPE:], is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


@prefill
class HandSoftmax(Layer):
    """Exponentials of what is left of the maximum, over their sum."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (HEADS, -1))
        q_nope, q_pe = self.queries(x).split([NOPE, ROPE], dim=-1)
        scores = torch.einsum("bihd,bjhd->bhij", q_nope, kv[..., :NOPE])
        scores = (scores + torch.einsum("bihd,bjd->bhij", q_pe, k_pe)) * self.scale
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = torch.where(later, torch.finfo(scores.dtype).min, scores)
        scores = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
        weights = scores / scores.sum(dim=-1, keepdim=True)
        return self.wo(torch.einsum("bhij,bjhd->bihd", weights, kv[..., NOPE:]).flatten(2))


@prefill
class DividedAtTheEnd(Layer):
    """The sum divides the result, as flash attention does it."""

    def forward(self, x: Tensor) -> Tensor:
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        scores = self.queries(x).transpose(1, 2) @ k.mT * self.scale
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = weights @ kv[..., NOPE:] / weights.sum(-1, keepdim=True)
        return self.wo(out.transpose(1, 2).flatten(2))


@prefill
class LogSumExp(Layer):
    """``exp(s - logsumexp(s))``."""

    def forward(self, x: Tensor) -> Tensor:
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        scores = self.queries(x).transpose(1, 2) @ k.mT * self.scale
        out = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ kv[..., NOPE:]
        return self.wo(out.transpose(1, 2).flatten(2))


@prefill
class StackedHalves(Layer):
    """All keys' rows of the weight, then all values'."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        k_nope, v = self.wkv_b(self.kv_norm(compressed)).split([HEADS * NOPE, HEADS * VALUE], dim=-1)
        k_nope, v = k_nope.view(batch, length, HEADS, NOPE), v.view(batch, length, HEADS, VALUE).transpose(1, 2)
        k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, HEADS, -1)], dim=-1).transpose(1, 2)
        out = F.scaled_dot_product_attention(self.queries(x).transpose(1, 2), k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class PerHeadWeights(nn.Module):
    """Parameters with a dimension for heads, as einsum likes them."""

    def __init__(self) -> None:
        super().__init__()
        self.w_dkv, self.w_kr = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(WIDTH, ROPE, bias=False)
        self.w_q, self.w_qr = (nn.Linear(WIDTH, HEADS * n, bias=False) for n in (NOPE, ROPE))
        self.w_uk = nn.Parameter(torch.randn(HEADS, RANK, NOPE) * RANK**-0.5)
        self.w_uv = nn.Parameter(torch.randn(HEADS, RANK, VALUE) * RANK**-0.5)
        self.w_o = nn.Parameter(torch.randn(HEADS, VALUE, WIDTH) * 0.1)

    def split_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.w_q(x).unflatten(-1, (HEADS, NOPE)), self.w_qr(x).unflatten(-1, (HEADS, ROPE))


@prefill
class EinsumPerHead(PerHeadWeights):
    def forward(self, x: Tensor) -> Tensor:
        c, r, length = self.w_dkv(x), self.w_kr(x), x.shape[1]
        q, q_r = self.split_queries(x)
        k, v = torch.einsum("bsr,hrn->bhsn", c, self.w_uk), torch.einsum("bsr,hrv->bhsv", c, self.w_uv)
        scores = torch.einsum("bthn,bhsn->bhts", q, k) + torch.einsum("bthd,bsd->bhts", q_r, r)
        bias = torch.zeros(length, length).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        weights = torch.softmax(scores / math.sqrt(QK) + bias, -1)
        return torch.einsum("bthv,hvw->btw", torch.einsum("bhts,bhsv->bthv", weights, v), self.w_o)


@prefill
class RankFirstWeights(PerHeadWeights):
    """One kernel ``[R, H, N + V]``, as it comes out of a JAX checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(RANK, HEADS, NOPE + VALUE) * RANK**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k_pe = torch.cat(self.split_queries(x), -1), self.w_kr(x)
        k, v = torch.einsum("bsr,rhk->bshk", self.w_dkv(x), self.kernel).split([NOPE, VALUE], -1)
        k = torch.cat([k, k_pe[:, :, None].broadcast_to(*k.shape[:-1], ROPE)], -1)
        weights = torch.einsum("bshk,bthk->bhts", k, q * QK**-0.5).softmax(-1)
        return torch.einsum("bthv,hvw->btw", torch.einsum("bshv,bhts->bthv", v, weights), self.w_o)


@prefill
class TokensFirst(Layer):
    """``[T, B, ..]`` all along and ``baddbmm`` over heads merged with the batch, as Megatron does it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        length, batch, _ = x.shape
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        k_nope, v = self.wkv_b(self.kv_norm(compressed)).view(length, batch, HEADS, -1).split([NOPE, VALUE], dim=-1)
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(length, batch, HEADS, QK)
        k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, HEADS, -1)], dim=-1)
        q, k, v = (item.reshape(length, batch * HEADS, -1) for item in (q, k, v))
        buffer = torch.empty(batch * HEADS, length, length)
        scores = torch.baddbmm(buffer, q.transpose(0, 1), k.permute(1, 2, 0), beta=0.0, alpha=self.scale)
        scores = scores.view(batch, HEADS, length, length)
        scores = scores.masked_fill(torch.triu(torch.ones(length, length, dtype=torch.bool), 1), -torch.inf)
        weights = scores.softmax(-1).view(batch * HEADS, length, length)
        out = torch.bmm(weights, v.transpose(0, 1)).view(batch, HEADS, length, VALUE)
        return self.wo(out.permute(2, 0, 1, 3).reshape(length, batch, -1)).transpose(0, 1)


@prefill
class MergedHeads(Layer):
    """Heads merged with the batch all along, as fairseq does it."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).view(batch, length, HEADS, -1)
        k = torch.cat([kv[..., :NOPE], k_pe[:, :, None].expand(-1, -1, HEADS, -1)], dim=-1)
        operands = (self.queries(x), k, kv[..., NOPE:])
        q, k, v = (item.transpose(1, 2).reshape(batch * HEADS, length, -1) for item in operands)
        hidden = torch.full((length, length), -torch.inf).triu(1)
        weights = (torch.bmm(q * self.scale, k.transpose(1, 2)) + hidden).softmax(-1)
        return self.wo(torch.bmm(weights, v).view(batch, HEADS, length, -1).transpose(1, 2).reshape(batch, length, -1))


@prefill
class DropoutOfNothing(Layer):
    """A dropout module of probability zero, while training."""

    def forward(self, x: Tensor) -> Tensor:
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        weights = F.dropout((self.queries(x).transpose(1, 2) @ k.mT * self.scale).softmax(-1), 0.0, training=True)
        return self.wo((weights @ kv[..., NOPE:]).transpose(1, 2).flatten(2))


@prefill
class ScaledOperands(Layer):
    """Half of the scale on each side; causal by a buffer of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.ones(32, 32, dtype=torch.bool).tril()[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length, half = x.shape[1], QK**-0.25
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1)
        scores = (self.queries(x).transpose(1, 2) * half) @ (k * half).mT
        scores = scores.masked_fill(self.seen[:, :, :length, :length].logical_not(), float("-inf"))
        return self.wo((scores.softmax(-1) @ kv[..., NOPE:]).transpose(1, 2).flatten(2))


@prefill
class HalfPrecision(Layer):
    """bfloat16 with scores and softmax in float32, no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_b = nn.Linear(12, HEADS * NOPE, bias=False)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (HEADS, NOPE)).transpose(1, 2)
        kv = self.wkv_b(self.kv_norm(self.wkv_a(x)[..., :RANK])).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        scores = torch.matmul(q.float(), kv[..., :NOPE].float().mT) * NOPE**-0.5
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        return self.wo((weights @ kv[..., NOPE:]).transpose(1, 2).flatten(2))


@prefill
class OneRequest(Layer):
    """No batch at all: attention runs over ``[T, H, D]``, as code that packs requests has it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(row) for row in x.unbind(0)])

    def one(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(length, HEADS, QK)
        compressed, k_pe = self.wkv_a(x).split([RANK, ROPE], dim=-1)
        kv = self.wkv_b(self.kv_norm(compressed)).view(length, HEADS, NOPE + VALUE)
        k = torch.cat([kv[..., :NOPE], k_pe.unsqueeze(1).expand(-1, HEADS, -1)], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        scores = scores + torch.full((length, length), -torch.inf).triu(1)
        return self.wo(torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[..., NOPE:]).flatten(1))
