"""Decoding over a paged latent cache with the weights absorbed by hand, through ``kdacompile.ops.mla_decode``.

    python examples/absorbed_mla.py [--quick] [--device cuda]

What a serving engine does for DeepSeek-V3: pages of any size, an int32 block table, requests of different lengths (one
of them empty), two query tokens a request (speculative decoding), and lse for merging partial results. Slots and table
entries that no request owns hold NaN and garbage, as they do in a real pool. The result must be that of attention over
the expanded keys and values in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kdacompile import ops

if __package__:
    from examples import _common as common
else:
    import _common as common

NOPE, ROPE, RANK, VALUE = 128, 64, 512, 128


def pool(lengths: Sequence[int], page: int) -> tuple[Tensor, Tensor]:
    """A cache ``[pages, page, 576]`` and the block table of requests scattered over it."""
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages) + 5)
    table = torch.full((len(lengths), max(pages)), 1 << 30, dtype=torch.int32)
    cache = torch.full((len(order), page, RANK + ROPE), torch.nan)
    taken = 0
    for request, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        own = order[taken : taken + count]
        table[request, :count] = own
        for index, entry in enumerate(own.tolist()):
            used = min(page, length - index * page)
            cache[entry, :used] = torch.randn(used, RANK + ROPE)
        taken += count
    return cache, table


def expanded(q: Tensor, tokens: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float) -> Tensor:
    """One request ``[T, H, 192]`` over its tokens ``[S, 576]``, in float64, every head with keys of its own."""
    latent, rope = tokens.double().split([RANK, ROPE], dim=-1)
    keys = torch.einsum("hnr,sr->hsn", w_uk.double(), latent)
    keys = torch.cat([keys, rope.expand(keys.shape[0], -1, -1)], dim=-1)
    values = torch.einsum("hvr,sr->hsv", w_uv.double(), latent)
    scores = torch.einsum("thk,hsk->hts", q.double(), keys) * scale
    position = torch.arange(q.shape[0])[:, None] + len(tokens) - q.shape[0]
    weights = scores.masked_fill(torch.arange(len(tokens)) > position, -torch.inf).softmax(-1)
    return torch.einsum("hts,hsv->thv", weights, values)


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    torch.manual_seed(0)
    heads, page, lengths = (4, 16, (0, 37, 64)) if args.quick else (16, 64, (0, 1000, 4096, 777))
    scale = (NOPE + ROPE) ** -0.5
    w_uk, w_uv = torch.randn(heads, NOPE, RANK) * RANK**-0.5, torch.randn(heads, VALUE, RANK) * RANK**-0.5
    q = torch.randn(len(lengths), 2, heads, NOPE + ROPE)
    cache, table = pool(lengths, page)

    absorbed = torch.cat([torch.einsum("bthn,hnr->bthr", q[..., :NOPE], w_uk), q[..., NOPE:]], dim=-1)
    operands = (x.to(args.device) for x in (absorbed, cache, torch.tensor(lengths, dtype=torch.int32), table))
    query, pages, counts, entries = operands
    result = ops.mla_decode(query, pages, rank=RANK, scale=scale, lengths=counts, block_table=entries, return_lse=True)
    context, lse = result
    out = torch.einsum("bthr,hvr->bthv", context.cpu(), w_uv)

    found: list[str] = []
    for request, length in enumerate(lengths):
        if not length:
            empty = bool((out[request] == 0).all()) and bool(lse[request].isposinf().all())
            found += [] if empty else ["a request without tokens does not give 0 and +inf"]
            continue
        own = table[request, : -(-length // page)].long()
        want = expanded(q[request], cache[own].flatten(0, 1)[:length], w_uk, w_uv, scale)
        error = common.relative_error(out[request], want)
        print(f"request of {length} tokens: error against float64 {error:.1e}")
        found += [f"error {error:.1e} over {length} tokens"] if not error < 1e-5 else []
    return common.verdict(found)


if __name__ == "__main__":
    raise SystemExit(main())
