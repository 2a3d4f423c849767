"""Decoding over a paged latent cache with the weights absorbed by hand, through ``kdacompile.ops.mla_decode``.

    python examples/absorbed_mla.py [--quick] [--device cuda]

What a serving engine does for DeepSeek-V3: pages of any size, an int32 block table, requests of different lengths (one
of them empty), two query tokens a request (speculative decoding), and lse for merging partial results. Slots and table
entries that no request owns hold NaN and garbage, as they do in a real pool. The result must be that of attention over
the expanded keys and values in float64; the same in float32, by eager mode and by Inductor, runs beside it.
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
    """One request ``[T, H, 192]`` over its tokens ``[S, 576]``: every head with keys and values of its own."""
    latent, rope = tokens.split([RANK, ROPE], dim=-1)
    keys = torch.einsum("hnr,sr->hsn", w_uk, latent)
    keys = torch.cat([keys, rope.expand(keys.shape[0], -1, -1)], dim=-1)
    values = torch.einsum("hvr,sr->hsv", w_uv, latent)
    scores = torch.einsum("thk,hsk->hts", q, keys) * scale
    position = torch.arange(q.shape[0], device=q.device)[:, None] + len(tokens) - q.shape[0]
    visible = torch.arange(len(tokens), device=q.device) <= position
    return torch.einsum("hts,hsv->thv", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)


def by_hand(q: Tensor, requests: Sequence[Tensor], w_uk: Tensor, w_uv: Tensor, scale: float) -> Tensor:
    """Every request over its own tokens; ``[B, T, H, V]``."""
    rows = [expanded(own, tokens, w_uk, w_uv, scale) for own, tokens in zip(q, requests, strict=True)]
    return torch.stack(rows)


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    torch.manual_seed(0)
    heads, page, lengths = (4, 16, (0, 37, 64)) if args.quick else (16, 64, (0, 1000, 4096, 777))
    scale = (NOPE + ROPE) ** -0.5
    w_uk, w_uv = torch.randn(heads, NOPE, RANK) * RANK**-0.5, torch.randn(heads, VALUE, RANK) * RANK**-0.5
    q = torch.randn(len(lengths), 2, heads, NOPE + ROPE)
    cache, table = pool(lengths, page)
    own = [
        cache[row[: -(-length // page)].long()].flatten(0, 1)[:length]
        for row, length in zip(table, lengths, strict=True)
    ]
    truth = by_hand(q.double(), [x.double() for x in own], w_uk.double(), w_uv.double(), scale)

    counts = torch.tensor(lengths, dtype=torch.int32).to(args.device)
    q, cache, table, w_uk, w_uv, truth = (x.to(args.device) for x in (q, cache, table, w_uk, w_uv, truth))
    own = [tokens.to(args.device) for tokens in own]
    lses: list[Tensor] = []

    def absorbed() -> Tensor:
        """The query through the weights, attention over the pages as they are, the result through the weights."""
        query = torch.cat([torch.einsum("bthn,hnr->bthr", q[..., :NOPE], w_uk), q[..., NOPE:]], dim=-1)
        context, lse = ops.mla_decode(
            query, cache, rank=RANK, scale=scale, lengths=counts, block_table=table, return_lse=True
        )
        lses.append(lse)
        return torch.einsum("bthr,hvr->bthv", context, w_uv)

    common.say(f"{len(lengths)} requests of {lengths} tokens, {heads} heads, pages of {page}, on {args.device}")
    out, kda = common.contend("kda", absorbed, args.device, truth)
    results = [common.contend("eager", lambda: by_hand(q, own, w_uk, w_uv, scale), args.device, truth)[1], kda]
    if args.quick:
        common.say("Inductor alone: left out by --quick")
    else:
        alone = torch.compile(by_hand, backend="inductor")
        common.say("Inductor alone compiles the expanded form, gathered already")
        results.append(common.contend("inductor", lambda: alone(q, own, w_uk, w_uv, scale), args.device, truth)[1])

    print("\nerrors against float64; the op reads pages, the others tokens that were gathered before")
    common.print_table(results)
    found = [] if kda.error is not None and kda.error < 1e-5 else [f"an error of {kda.error}"]
    for request, length in enumerate(lengths):
        if not length and not (bool((out[request] == 0).all()) and bool(lses[0][request].isposinf().all())):
            found.append("a request without tokens does not give 0 and +inf")
    return common.verdict(found)


if __name__ == "__main__":
    raise SystemExit(main())
