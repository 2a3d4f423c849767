"""Prefill of MLA on CUDA through cuDNN's fused attention: keys and values expanded once, then one call. Its gradients.

FlashAttention refuses heads whose keys (N + D) are wider than their values (V); cuDNN takes them. Keys are written in
their final place: the product with ``w_uk`` goes straight into the first N columns, the rotated key of all heads is
copied into the rest. Queries that are halves of one buffer are read as that buffer. Gradients expand again (less than a
tenth of the work at 8192 tokens) rather than keep keys and values from one pass to the other.

cuDNN counts causality from the first key, MLA's last query sees the last token. A chunk of T queries over more tokens
is therefore two calls, over its own T tokens (causal) and over those before (all seen), merged by their sums: no mask
is written, and no score computed twice. Probabilities under the merged sum are those of the whole softmax, so its
gradients are those of the two calls too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdacompile.compat import cudnn

from .attention_calls import joined, not_expanded
from .run_attention import Attention
from .scratch import Scratch

HALF = (torch.bfloat16, torch.float16)


class CudnnAttention:
    """All of one dtype, in half precision, no masks."""

    name = "cudnn"

    def declines(self, call: Attention) -> str | None:
        reason = not_expanded(call, self.name, without=("mask", "sinks", "lengths", "block_table"))
        if reason is not None:
            return reason
        operands = (call.q, call.q_rope, call.latent, call.k_rope, call.w_uk, call.w_uv)
        floats = {x.dtype for x in operands if x is not None}
        if len(floats) != 1 or call.q.dtype not in HALF:
            return "not everything is of one dtype that the kernels take"
        if call.q.device.type != "cuda":
            return "the tensors are not on a cuda device"
        q, k, v = _stand_ins(call)
        taken = all(cudnn.takes(q, k[:, :, part], v[:, :, part], causal=causal) for part, causal in _parts(call))
        return None if taken else "cudnn does not take these sizes here"

    def run(self, call: Attention, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        scratch = scratch or Scratch()
        scratch.once()  # torch's operators allocate what they return
        q, k, v = expanded(call, scratch)
        results = [
            cudnn.attention(q, k[:, :, part], v[:, :, part], causal=causal, scale=call.scale)
            for part, causal in _parts(call)
        ]
        o, lse = results[0] if len(results) == 1 else _merged(*results)
        return o.transpose(1, 2).to(call.out_dtype).contiguous(), lse.contiguous()

    def gradients(
        self, call: Attention, o: Tensor, lse: Tensor, grad_o: Tensor, wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """Of the ``wanted`` operands, in their dtype; o and grad_o ``[B, T, H, V]``, lse ``[B, H, T]``."""
        q, k, v = expanded(call, Scratch())
        o, grad_o = (x.to(q.dtype).contiguous().transpose(1, 2) for x in (o, grad_o))
        grads = [
            cudnn.attention_gradients(grad_o, q, k[:, :, part], v[:, :, part], o, lse, causal=causal, scale=call.scale)
            for part, causal in _parts(call)
        ]
        of_q, of_k, of_v = zip(*grads, strict=True)
        whole = (of_q[0] if len(of_q) == 1 else of_q[0] + of_q[1], _along_tokens(of_k), _along_tokens(of_v))
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in whole)
        return _of_operands(call, grad_q, grad_k, grad_v, wanted)


def _parts(call: Attention) -> list[tuple[slice, bool]]:
    """Which tokens the kernels are called for, and whether causally: in one, or those before the queries' own first."""
    earlier = call.width - call.q.shape[1] if call.causal else 0
    own = (slice(earlier, None), call.causal)
    return [(slice(0, earlier), False), own] if earlier else [own]


def _merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens from that over each, o ``[B, H, T, V]`` and lse ``[B, H, T]``; in fp32."""
    (o, lse), (other, other_lse) = first, second
    weight = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    return (o * weight).addcmul_(other, 1 - weight), torch.logaddexp(lse, other_lse)


def _along_tokens(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def expanded(call: Attention, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[B, H, T, N + D]``, keys ``[B, H, S, N + D]`` and values ``[B, H, S, V]``, heads next to channels."""
    assert call.w_uk is not None and call.w_uv is not None
    heads, nope, _ = call.w_uk.shape
    rope = 0 if call.k_rope is None else call.k_rope.shape[-1]
    rows = (*call.latent.shape[:2], heads)
    k = scratch.empty((*rows, nope + rope), call.latent.dtype, call.latent.device)
    v = scratch.empty((*rows, call.w_uv.shape[1]), call.latent.dtype, call.latent.device)
    _expand(call.latent, call.w_uk, k[..., :nope])
    _expand(call.latent, call.w_uv, v)
    if call.k_rope is not None:
        _copy_rows(call.k_rope.unsqueeze(2), k[..., nope:])
    q = call.q if call.q_rope is None else joined(call.q, call.q_rope, -1)
    q = q if q.stride(-1) == 1 else q.contiguous()
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _expand(latent: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out[b, s, h] = weight[h] latent[b, s]``, into whatever rows ``out [B, S, H, O]`` has."""
    for rows, place in zip(latent, out, strict=True):
        torch.bmm(rows.expand(weight.shape[0], -1, -1), weight.mT, out=place.transpose(0, 1))


def _of_operands(
    call: Attention, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Gradients of the op's operands from those of queries, keys ``[B, T, H, N + D]`` and values ``[B, T, H, V]``."""
    assert call.w_uk is not None and call.w_uv is not None
    nope = call.w_uk.shape[1]
    grad_rope = grad_k[..., nope:]
    found: dict[str, Tensor] = {"q": grad_q[..., :nope], "q_rope": grad_q[..., nope:]}
    if "k_rope" in wanted:
        found["k_rope"] = grad_rope.sum(2, dtype=torch.float32).to(grad_k.dtype)
    # A token's row of all heads is one of a matrix. So nothing is copied: what is rotated meets zeros, or is left out.
    tokens = call.latent.flatten(0, 1)
    keys, values = (x.flatten(0, 1).flatten(1) for x in (grad_k, grad_v))
    if "w_uk" in wanted:
        found["w_uk"] = (keys.mT @ tokens).unflatten(0, grad_k.shape[2:])[:, :nope]
    if "w_uv" in wanted:
        found["w_uv"] = (values.mT @ tokens).unflatten(0, grad_v.shape[2:])
    if "latent" in wanted:
        w_uk = torch.nn.functional.pad(call.w_uk, (0, 0, 0, grad_rope.shape[-1])).flatten(0, 1)
        found["latent"] = torch.addmm(keys @ w_uk, values, call.w_uv.flatten(0, 1)).view_as(call.latent)
    return {name: found[name] for name in wanted}


def _copy_rows(rows: Tensor, out: Tensor) -> None:
    """``out.copy_(rows)``, sixteen bytes an entry where both allow it: a copy of strided rows costs by the entry."""
    entries = torch.complex128.itemsize // rows.element_size()
    for x in (rows, out):
        sizes = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        aligned = x.data_ptr() % torch.complex128.itemsize == 0 and not any(size % entries for size in sizes)
        if x.stride(-1) != 1 or x.dtype is not out.dtype or not aligned:
            out.copy_(rows)
            return
    out.view(torch.complex128).copy_(rows.view(torch.complex128))


def _stand_ins(call: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of the sizes that the kernels would get, without their memory."""
    assert call.w_uk is not None and call.w_uv is not None
    batch, tokens, heads, nope = call.q.shape
    key = nope + (0 if call.q_rope is None else call.q_rope.shape[-1])
    shapes = ((tokens, key), (call.width, key), (call.width, call.w_uv.shape[1]))
    q, k, v = (call.q.new_empty(width).expand(batch, heads, rows, width) for rows, width in shapes)
    return q, k, v
