"""Linear attention in repositories of experiments and lessons: delta rules, retention, Mamba-2 and GLA."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.published.draw import B, H, K, V, bhtd, gates, keys, normal, unit
from tests.published.mamba import minimal_layer, minimal_step
from tests.published.registry import Program, case
from tests.published.sources import Repository

MADPODS = Repository(
    "madpods/linear-attention-memory-research", "b8d88bd55cfee971bd6e176d82451e2265ce3222", roots=("src",)
)
SHRI = Repository("Shri5648/deltanet", "5a958749faa228f72ab9949d55490f97fd62b4c3")
KEAGAN = Repository("keaganjp/EECS595-RetNet-Study", "f5402ab0bea76c8d8e213ea1f291f75186c32ecc")
DONRL = Repository("DonRL10/RetNet", "19e881d1b48672e90932b855ae5ca6ae244e8b7c")
SHADER = Repository("ShaderManager/RetNet", "0653d39d088af1dca53d401cad7cffc56d51fda9")
MEIDI = Repository("WANGCHEN722/RetNet", "d0ee77866917c69c3df46544fab4599dcf4b5f15")
MYSCIENCE = Repository("myscience/retnet-pytorch", "fc420e13d8db0c6786a2194b59fe1c835666fcae")
DRAGN = Repository("DRAGNLabs/301r_retnet", "2d1c878567d0190b7196f6b4d0f0bc596954eaed")
CLARIN = Repository("CLARIN-PL/RetNet", "40fd75858a0877e6afdcd79ea9774ed80ac078ea")
MAD = Repository("athms/mad-lab", "0f49a452b84ca0d13f8eb9c1ffa649032376fb1b")
RUUU = Repository("Ruuuuuush2027/mamba2-optimization", "bff3ce0c45b661bd17db87ab5ba0c1082c62e4f5")
ASI = Repository("agorevski/ASI-Arch-algoracle", "2ea8eed80d4aaef90cdd68271417864e6e4d22e1")
LAMR = "src/lamr/layers"
WIDTH, TOKENS = 24, 10


def _beta() -> torch.Tensor:
    return unit(B, H, TOKENS)


@case(MADPODS, f"{LAMR}/chunked.py", "gated_delta_rule")
def madpods_gated_chunks(m: Any) -> Program:
    q, _, v = bhtd(TOKENS)
    inputs = (q, keys(B, H, TOKENS, K), v, _beta(), unit(B, H, TOKENS) * 0.5 + 0.5)
    return lambda q, k, v, b, a, s: m.chunk_gated_delta_rule(q, k, v, b, a, chunk_size=4, initial_state=s), (
        *inputs,
        normal(B, H, K, V),
    )


@case(MADPODS, f"{LAMR}/chunked.py", "delta_rule")
def madpods_delta_chunks(m: Any) -> Program:
    q, _, v = bhtd(TOKENS)
    return partial(m.chunk_delta_rule, chunk_size=4), (q, keys(B, H, TOKENS, K), v, _beta())


@case(MADPODS, f"{LAMR}/chunked.py", "linear_attention")
def madpods_linear_chunks(m: Any) -> Program:
    """A normaliser with eps is carried beside the state."""
    q, k, v = bhtd(TOKENS)
    return partial(m.chunk_linear_attn, chunk_size=4), (q.exp(), k.exp(), v)


@case(MADPODS, f"{LAMR}/recurrent.py", "delta_rule")
def madpods_delta_tokens(m: Any) -> Program:
    q, _, v = bhtd(6)
    return m.delta_rule_recurrent, (q, keys(B, H, 6, K), v, unit(B, H, 6))


@case(MADPODS, f"{LAMR}/recurrent.py", "linear_attention")
def madpods_linear_tokens(m: Any) -> Program:
    return m.linear_attn_recurrent, bhtd(6)


@case(MADPODS, f"{LAMR}/linear_attn.py", "gated_delta_rule")
def madpods_layer(m: Any) -> Program:
    return m.LinearAttentionLayer(WIDTH, H, chunk_size=4), (normal(B, TOKENS, WIDTH),)


@case(MADPODS, f"{LAMR}/linear_attn.py", "linear_attention")
def madpods_linear_layer(m: Any) -> Program:
    return m.LinearAttentionLayer(WIDTH, H, mode="linear", chunk_size=4), (normal(B, TOKENS, WIDTH),)


@case(SHRI, "deltanet.py", "delta_rule")
def shri_chunks(m: Any) -> Program:
    """One head without a head dimension; the inverse is copied for every row."""
    return m.DeltaBlock(K), (normal(B, 8, K) / 4, 4)


@case(SHRI, "deltanet.py", "delta_rule")
def shri_step(m: Any) -> Program:
    """One token of one sequence: the state is a matrix, as weights are."""
    return m.DeltaBlock(K).step, (normal(K), normal(K, K))


def _keagan(m: Any) -> Any:
    return m.MultiScaleRetention(24, 3, activation="gelu").eval()


@case(KEAGAN, "retnet/retention.py", "retention")
def keagan_parallel(m: Any) -> Program:
    x = normal(B, TOKENS, 24)
    return _keagan(m).forward_parallel, (x, x.clone(), x.clone())


@case(KEAGAN, "retnet/retention.py", "retention")
def keagan_chunk(m: Any) -> Program:
    x = normal(B, TOKENS, 24)
    return _keagan(m).forward_chunkwise, (x, x.clone(), x.clone(), 4, normal(B, 3, 8, 8))


@case(KEAGAN, "retnet/retention.py", "retention")
def keagan_step(m: Any) -> Program:
    x = normal(B, 24)
    return _keagan(m).forward_recurrent, (x, x.clone(), x.clone(), 4, normal(B, 3, 8, 8))


def _donrl(m: Any) -> Any:
    return m.Fused(SimpleNamespace(nembed=24, nheads=3)).eval()


@case(DONRL, "model.py", "retention")
def donrl_parallel(m: Any) -> Program:
    return _donrl(m), (normal(B, TOKENS, 24),)


@case(DONRL, "model.py", "retention")
def donrl_step(m: Any) -> Program:
    layer = _donrl(m)
    return lambda x, state: layer(x, state, "recurrent", 5), (normal(B, 1, 24), normal(B, 3, 8, 8))


def _shader(m: Any) -> Any:
    layer = m.MSR(24, 8)
    layer.pos_emb = SimpleNamespace(rotate_queries_and_keys=lambda q, k: (q, k))
    return layer


@case(SHADER, "main.py", "retention", only=("MSR",))
def shader_parallel(m: Any) -> Program:
    layer = _shader(m)
    layer.gn = torch.nn.Identity()  # made for as many channels as heads
    return layer, (normal(B, TOKENS, 24),)


@case(SHADER, "main.py", "retention", only=("MSR",))
def shader_step(m: Any) -> Program:
    return _shader(m).eval(), (normal(B, 1, 24), normal(B, 3, 8, 8))


@case(MEIDI, "retention.py")
def times_parallel(m: Any) -> Program:
    """Tokens come at times of their own, and see those of no later time: which they are is known when it runs."""
    return m.MultiScaleRetention(24, 3, 8), (normal(B, TOKENS, 24), unit(B, TOKENS).cumsum(1))


@case(MEIDI, "retention.py", "simple_gla")
def times_step(m: Any) -> Program:
    layer = m.MultiScaleRetention(24, 3, 8)

    def step(x: Any, time: Any, state: Any, before: Any) -> Any:
        return layer(x, time, m.RetentionState(state, before), "recurrent")

    return step, (normal(B, 24), unit(B) + 1, normal(3, B, 8, 8), unit(B))


def _causal() -> torch.Tensor:
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return torch.where(distance >= 0, distance.float(), torch.inf)


@case(MYSCIENCE, "src/msr.py")
def myscience_mask(m: Any) -> Program:
    """The distances are an argument: any numbers may come in it."""
    return m.MultiScaleRetention(24, 3).eval(), (normal(B, TOKENS, 24), None, _causal())


@case(MYSCIENCE, "src/msr.py", "retention")
def myscience_parallel(m: Any) -> Program:
    """Decays pass through ``nan_to_num``."""
    layer = m.MultiScaleRetention(24, 3).eval()
    return lambda x: layer(x, attn_mask=_causal()), (normal(B, TOKENS, 24),)


@case(MYSCIENCE, "src/msr.py", "retention")
def myscience_chunks(m: Any) -> Program:
    layer = m.MultiScaleRetention(24, 3).eval()
    return lambda x: layer(x, num_chunk=2, attn_mask=_causal()[:5, :5]), (normal(B, TOKENS, 24),)


def _dragn(m: Any) -> Any:
    m.LayerNorm = torch.nn.LayerNorm  # in the place of apex's
    return m.MultiScaleRetention(SimpleNamespace(layernorm_eps=1e-6, multiway=False), 24, 48, 3).eval()


def _angles(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(float(tokens))[:, None] * torch.rand(8)
    return angles.sin(), angles.cos()


@case(DRAGN, "src/torchscale/component/multiscale_retention.py", "simple_gla")
def dragn_step(m: Any) -> Program:
    """The state is kept divided by the root of a running scale."""
    layer = _dragn(m)

    def step(x: Any, decay: Any, state: Any, scale: Any) -> Any:
        return layer(x, (_angles(1), decay), incremental_state={"prev_key_value": state, "scale": scale})

    return step, (normal(B, 1, 24), unit(3), normal(B, 3, 16, 8), unit(3) + 1)


@case(DRAGN, "src/torchscale/component/multiscale_retention.py")
def dragn_parallel(m: Any) -> Program:
    """Scores are divided by sums of their absolute values, which no state carries."""
    layer = _dragn(m)
    decay = unit(3)[:, None, None] ** _causal()
    return lambda x: layer(x, (_angles(TOKENS), decay)), (normal(B, TOKENS, 24),)


@case(CLARIN, "retnet/modeling_retnet.py", "simple_gla", only=("MultiScaleRetention",))
def clarin_step(m: Any) -> Program:
    """The state is kept divided by a running scale; a mask leaves it as it is."""

    def step(q: Any, k: Any, v: Any, decay: Any, state: Any, scale: Any, mask: Any) -> Any:
        held = {"prev_key_value": state, "scale": scale}
        return m.MultiScaleRetention.recurrent_retention(SimpleNamespace(), q, k, v, decay, held, mask)

    mask = torch.tensor([[1.0], [0.0]])
    return step, (*bhtd(1), unit(1, H, 1, 1), normal(B, H, V, K), unit(B, H, 1, 1) + 1, mask)


@case(MAD, "mad/model/layers/ops/gla/naive.py", "gla", only=("naive_recurrent_gla",))
def mad_gla(m: Any) -> Program:
    return m.naive_recurrent_gla, (*bhtd(7), gates(B, H, 7, K), normal(B, H, K, V), True)


@case(MAD, "mad/model/layers/ops/gla/naive.py", "gla", "gla", only=("naive_recurrent_gla",))
def mad_gla_both_ways(m: Any) -> Program:
    q, k, _ = bhtd(5)
    return partial(m.naive_recurrent_gla, causal=False), (q, k, normal(B, H, 5, V), gates(B, H, 5, K))


@case(MAD, "mad/model/layers/ops/causal_dot_prod/linear_attention.py", "linear_attention", only=("linear_attention",))
def mad_running_sums(m: Any) -> Program:
    """The normaliser is clamped: the sums are one more column of the values, the clamp comes after the op."""
    q, k, v = bhtd(7)
    return partial(m.linear_attention, causal=True), (q.exp(), k.exp(), v)


@case(MAD, "mad/model/layers/attention_linear.py", "linear_attention")
def mad_layer(m: Any) -> Program:
    return m.LinearAttention(WIDTH, "elu", num_heads=H), (normal(B, TOKENS, WIDTH),)


@case(RUUU, "mamba2.py", "simple_gla")
def ruuu_layer(m: Any) -> Program:
    return minimal_layer(m)


@case(RUUU, "mamba2.py", "simple_gla")
def ruuu_step(m: Any) -> Program:
    return minimal_step(m)


@case(ASI, "pipeline/pool/deltanet/deltanet_base.py")
def asi_layer(m: Any) -> Program:
    """Its outer product sums over the values: every row of the state is the same."""
    return m.DeltaNetLayer(WIDTH, H).eval(), (normal(B, 6, WIDTH),)
