"""Small repositories that write the family down in plain PyTorch: lin-attn-zoo, deltanet, MLA with a layer per head."""

from __future__ import annotations

from typing import Any

from tests.published.draw import B, H, K, bhtd, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

ZOO = Repository("HassanJbara/lin-attn-zoo", "a88b48ff9ba583110dc51e4fcd38121cb64f0961")
RYNCHIN = Repository("rynchin/deltanet", "06c988ddb7837e95b40b5cc8f103a2752b165c8b")
NEEL = Repository("neelbanodiya/Multi-head-Latent-Attention-from-scratch", "3f6722423d78f33fed97790fe7f75df87920b0c5")
KEERAT = Repository("keeratpreetsingh/Multi-Head-Latent-Attention", "0a5cda8ff7eb2e7983bce5d794d5c8fd0fa19f43")
WIDTH, TOKENS = 24, 10


@case(ZOO, "models/deltanet.py", "delta_rule")
def zoo_delta_chunks(m: Any) -> Program:
    return m.DeltaNet(WIDTH, H, chunk_size=4), (normal(B, TOKENS, WIDTH),)


@case(ZOO, "models/deltanet.py", "delta_rule")
def zoo_delta_tokens(m: Any) -> Program:
    return m.DeltaNet(WIDTH, H, mode="recurrent"), (normal(B, TOKENS, WIDTH), normal(B, 1, H, K, K))


@case(ZOO, "models/deltaproduct.py", "gated_delta_rule")
def zoo_products_tokens(m: Any) -> Program:
    return m.GatedDeltaProduct(WIDTH, K, H, mode="recurrent"), (normal(B, TOKENS, WIDTH),)


@case(ZOO, "models/gated_deltanet.py", "gated_delta_rule")
def zoo_gated_delta_chunks(m: Any) -> Program:
    return m.GatedDeltaNet("chunk", WIDTH, K, H, chunk_size=4), (normal(B, TOKENS, WIDTH),)


@case(ZOO, "models/gated_deltanet.py", "gated_delta_rule")
def zoo_gated_delta_tokens(m: Any) -> Program:
    return m.GatedDeltaNet("recurrent", WIDTH, K, H), (normal(B, TOKENS, WIDTH),)


@case(ZOO, "models/gla.py", "gla")
def zoo_gla_chunks(m: Any) -> Program:
    return m.GatedLinearAttention("chunk", WIDTH, H, chunk_size=4), (normal(B, TOKENS, WIDTH),)


@case(ZOO, "models/gla.py", "gla")
def zoo_gla_step(m: Any) -> Program:
    return m.GatedLinearAttention("recurrent", WIDTH, H), (normal(B, 1, WIDTH), normal(B, H, K, K))


@case(RYNCHIN, "deltanet_naive.py", "delta_rule")
def rynchin_tokens(m: Any) -> Program:
    q, k, _ = bhtd(6)
    return m.deltanet_forward_naive, (q, k, normal(B, H, 6, K), unit(B, H, 6))


@case(RYNCHIN, "deltanet_ref.py", "delta_rule")
def rynchin_corrected_values(m: Any) -> Program:
    """Corrections are read of all earlier keys, not of the state."""
    q, k, _ = bhtd(6)
    return m.deltanet_forward_ref, (q, k, normal(B, H, 6, K), unit(B, H, 6))


@case(NEEL, "models/mla.py", "mla")
def neel_prompt(m: Any) -> Program:
    """A layer for each head's keys, and one for its values."""
    layer = m.MultiHeadLatentAttention(WIDTH, H, 16).eval()
    return lambda x: layer(x, mask=m.create_causal_mask(x.shape[1])), (normal(B, TOKENS, WIDTH),)


@case(NEEL, "models/mla.py", "mla")
def neel_step(m: Any) -> Program:
    layer = m.MultiHeadLatentAttention(WIDTH, H, 16).eval()
    step = (normal(B, 1, WIDTH), normal(B, TOKENS, 16))
    return lambda x, cache: layer(x, use_cache=True, cache={"c_kv": cache}), step


@case(KEERAT, "MultiHeadLatentAttention.py")
def keerat_prompt(m: Any) -> Program:
    """Keys are split into heads behind the concatenation: some heads have a latent's, the others rotated ones."""
    layer = m.multiheadlatentattention(WIDTH, 32, 16, 4, 0.0, 16).eval()
    return layer, (normal(B, TOKENS, WIDTH),)
