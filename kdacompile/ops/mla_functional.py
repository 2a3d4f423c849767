"""The public functions over the MLA op: defaults, splitting, squeezing; everything else is the op's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kdacompile.lowering.operands import Kind
from kdacompile.ops import definitions
from kdacompile.ops.checks import check_number, check_tensors
from kdacompile.ops.errors import DtypeError, OptionError, RankError, SizeError

if TYPE_CHECKING:
    from kdacompile.distributed import ContextParallel


def mla(
    q: Tensor,
    q_rope: Tensor | None,
    latent: Tensor,
    k_rope: Tensor | None,
    w_uk: Tensor | None = None,
    w_uv: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    schedule: Tensor | None = None,
    return_lse: bool = False,
    form: str = "auto",
    out_dtype: torch.dtype | None = None,
    context_parallel: ContextParallel | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head latent attention: every head's keys and values are expanded from one latent per token.

    Per head, with the latent ``c_s`` and one rotated key ``r_s`` for all heads::

        k_s = [w_uk c_s | r_s]      v_s = w_uv c_s
        o_t = softmax_s(scale * [q_t | q_rope_t] . k_s + mask_ts) v

    as in DeepSeek-V2 (arXiv 2405.04434, section 2.1). Two forms compute it, to the last rounding the same: *expanded*
    takes the latent through the weights, block by block; *absorbed* takes the query through ``w_uk`` and the result
    through ``w_uv``, and every head attends to the latent itself. The cheaper one is chosen per call from its sizes.

    Args:
        q: ``[B, T, H, N]``, the part of the queries that is not rotated. bfloat16, float16, float32 or float64, any
            strides. Without weights ``[B, T, H, R]``: absorbed already.
        q_rope: ``[B, T, H, D]``, the rotated part; None together with ``k_rope`` (no positions).
        latent: ``[B, S, R]``, or with ``block_table`` pages of it, ``[P, page, R]``, of any page size.
        k_rope: ``[B, S, D]``, or pages of it: shared by all heads.
        w_uk, w_uv: ``[H, N, R]`` and ``[H, V, R]``, the two halves of kv_b_proj, views are welcome; both or none.
        scale: factor on the scores; default ``(N + D) ** -0.5``. It has no default without weights, whose N is lost.
        causal: query t of T sees the tokens up to ``length - T + t``, the last query sees all.
        mask: bool (True: may be seen) or a float to add, ``[B | 1, H | 1, T | 1, S]``.
        sinks: ``[H]``, a logit per head that takes part in the softmax's denominator alone.
        lengths: ``[B]`` int32 or int64: how many of the S tokens each request has; 0 is legal. What lies past the
            length may be anything, NaN included. On the CPU the values are checked.
        block_table: ``[B, pages]`` int32 or int64: the pages of each request. Entries past its last page may be
            anything.
        schedule: what :func:`mla_schedule` made of these lengths; None leaves that to the call.
        return_lse: also return the natural logarithm of the sum of the scores' exponentials, over the keys alone.
        form: "auto", "absorbed" or "expanded".
        out_dtype: dtype of o; default q's.
        context_parallel: q, q_rope, latent and k_rope hold this rank's tokens of longer sequences, see
            :class:`kdacompile.distributed.ContextParallel`; prefill alone, without lengths and pages;
            the mask has this rank's queries for its T rows, and all ranks' tokens, in their order, for its S columns.

    Returns:
        o ``[B, T, H, V]`` (``[B, T, H, R]`` without weights), and with ``return_lse`` lse ``[B, H, T]`` in float32
        (float64 if q or the latent is). A query that sees no token gives 0 and lse +inf. All arithmetic is float32
        (float64). Differentiable in all float operands, except from a paged cache.

    DTensors are computed shard by shard, by batch or by heads, as in :func:`kdacompile.ops.linear_attention`; by heads
    the cache is replicated, and its gradient a partial sum.

    Raises:
        kdacompile.ops.errors.OpError: one class per mistake, each also a ValueError or a TypeError.
    """
    optional = {"q_rope": q_rope, "k_rope": k_rope, "w_uk": w_uk, "w_uv": w_uv, "mask": mask, "sinks": sinks}
    optional |= {"lengths": lengths, "block_table": block_table, "schedule": schedule}
    check_tensors({"q": q, "latent": latent}, optional)
    check_number("scale", scale)
    if scale is None:
        if w_uk is None:
            raise OptionError(name="scale", expected="a number: without w_uk it has no default", actual=None)
        scale = (q.shape[-1] + (0 if q_rope is None else q_rope.shape[-1])) ** -0.5
    operands = (q, q_rope, latent, k_rope, w_uk, w_uv, mask, sinks, lengths, block_table)
    options = {"scale": scale, "causal": causal, "form": form, "out_dtype": out_dtype}
    if context_parallel is None:
        o, lse = definitions.mla(*operands, schedule, **options)
    else:
        from kdacompile.distributed.attention import parallel_mla  # torch.distributed is slow to import

        o, lse = parallel_mla(operands, options, context_parallel)
    return (o, lse) if return_lse else o


def mla_decode(
    q: Tensor,
    cache: Tensor,
    *,
    rank: int,
    scale: float,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    schedule: Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decoding over a latent cache with the weights absorbed by the caller, in FlashMLA's terms.

    Args:
        q: ``[B, T, H, R + D]``: ``q_nope`` taken through ``w_uk``, then the rotated part. T is 1, or the tokens of a
            speculative step.
        cache: ``[B, S, R + D]``, or with ``block_table`` ``[P, page, R + D]`` or ``[P, page, 1, R + D]``.
        rank: R; the first R columns of the cache are the values.
        scale: ``(N + D) ** -0.5`` of the head before absorption, times mscale ** 2 where YaRN is used.

    The other arguments and the results are those of :func:`mla`; o is ``[B, T, H, R]``.
    """
    check_tensors({"q": q, "cache": cache}, {"lengths": lengths, "block_table": block_table, "schedule": schedule})
    if cache.dim() == 4 and cache.shape[2] == 1:
        cache = cache.squeeze(2)
    for name, x, dims in (("q", q, 4), ("cache", cache, 3)):
        if x.dim() != dims:
            raise RankError(name=name, expected=dims, layout="[..., R + D]", actual=tuple(x.shape))
    width = cache.shape[-1]
    if not 0 < rank <= width or q.shape[-1] != width:
        raise SizeError(name="q", expected=(*q.shape[:3], width), layout=f"R = {rank} <= R + D", actual=tuple(q.shape))
    q_nope, latent, q_rope, k_rope = q, cache, None, None
    if rank < width:
        (q_nope, q_rope), (latent, k_rope) = (x.split_with_sizes((rank, width - rank), -1) for x in (q, cache))
    return mla(
        q_nope,
        q_rope,
        latent,
        k_rope,
        scale=scale,
        lengths=lengths,
        block_table=block_table,
        schedule=schedule,
        causal=causal,
        return_lse=return_lse,
        out_dtype=out_dtype,
    )


def mla_schedule(lengths: Tensor, *, rows: int, width: int) -> Tensor:
    """How the kernels of :func:`mla` share out the caches of requests of different lengths: once for all layers.

    It is made on the device of the lengths, and no length is read on the host. A call of :func:`mla` without one makes
    its own. To be made anew whenever a length changes; a schedule of other lengths gives wrong results.

    Args:
        lengths: ``[B]`` int32 or int64, as :func:`mla` is given them.
        rows: queries times heads of a request, T * H.
        width: how many tokens a request may have: S, or pages of a request times tokens of a page.

    Returns:
        ``[entries]`` int32, for ``schedule`` of :func:`mla` and :func:`mla_decode`. Without entries where the device's
        kernels make no use of one.

    Raises:
        kdacompile.ops.errors.OpError: one class per mistake, each also a ValueError or a TypeError.
    """
    check_tensors({"lengths": lengths}, {})
    if lengths.dim() != 1:
        raise RankError(name="lengths", expected=1, layout="[B]", actual=tuple(lengths.shape))
    if lengths.dtype not in Kind.INDEX.dtypes:
        raise DtypeError(name="lengths", expected=Kind.INDEX.described, actual=lengths.dtype)
    for name, value in (("rows", rows), ("width", width)):
        if value < 1:
            raise OptionError(name=name, expected="a positive number", actual=value)
    return definitions.mla_schedule(lengths, rows=rows, width=width)
