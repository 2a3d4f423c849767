"""Recurrences of small models and course work: chunks that are padded, states read one token at a time, own gates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.published.draw import B, H, K, T, V, bhtd, bthd, gates, keys, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

AURORA = Repository("pjjajal/mamba2-aurora", "48ba80cab9028311bd35c4c4b6556fccb622e543")
AMPLIFIER = Repository("Davidezorz/Orange-neural-amp", "6424103269fd6ed659aa933ee2144e0c655f9d67")
LUCKY = Repository("Luckyoriginal/deltanet", "4b6caeabc5fcf6263cb6490ab7788ed2328af383")
MINIMAL = Repository("chen-yingfa/deltanet-minimal", "596b45ca727442d9722a01cb36836ab1372ad71d")
TARUN = Repository("TarunAIDS/Retentive-Network-Model-Implementation", "9b6a10832ed57bbfa5dff1294d407f73124440dc")
HEBBIAN = Repository("jfguan/hebbian_mamba", "2d28512e9aaa6931687b259eb2a2ef27e6c14bc3")
SWAMLA = Repository("Orolol/swamla", "d0d0844644d719b72aaef11e492e869315f3d0cf")
FUSION = Repository("atandra2000/FusionLLM", "a06c4b8a099407cbc4f56146671602394c065826")
KAINOMOS = Repository("AwakeningOS/KaiNomos-747M", "4b5a3b36b528ef2ad93fbe71be3715fa2e6f9df8", roots=("architecture",))
TOY = Repository("wac81/toy_retnet_1.3b", "83ac5279579bbf4cb81782110e07eeee3e0d7daa")
VARIANT = Repository("myxyy/TimeVariantRetNet", "241c831a4aa762e86353b172b314a2763474fe0d")
PRECONDITIONED = Repository("ntumm120/preconditioned-deltanet", "7bd753279af87b39114149a104c5bde9bf67145f")

WIDTH = 24


@case(AURORA, "layers/ssd.py", "simple_gla")
def aurora_padded(m: Any) -> Program:
    """Twenty tokens in chunks of eight: the last chunk is filled up with zeros."""
    x, a, b, c = normal(B, 20, H, V), gates(B, 20, H), keys(B, 20, H, K), normal(B, 20, H, K)
    return lambda x, a, b, c: m.ssd_minimal_discrete(x, a, b, c, 8), (x, a, b, c)


@case(AURORA, "layers/ssd.py", "simple_gla")
def aurora_state(m: Any) -> Program:
    x, a, b, c = normal(B, 16, H, V), gates(B, 16, H), keys(B, 16, H, K), normal(B, 16, H, K)
    return lambda *given: m.ssd_minimal_discrete(*given[:4], 8, given[4]), (x, a, b, c, normal(B, 1, H, V, K))


@case(AMPLIFIER, "mamba2.py", "simple_gla")
def amplifier_layer(m: Any) -> Program:
    """Its function asks for a state, so that only a layer that learns one can run."""
    layer = m.Mamba2(16, d_state=K, headdim=8, chunk_size=8, learnable_init_states=True).eval()
    with torch.no_grad():
        layer.init_states.normal_()
    return layer, (normal(B, 16, 16),)


@case(LUCKY, "deltanet.py", "delta_rule")
def lucky_chunks(m: Any) -> Program:
    """One head, and each chunk's matrix is inverted row by row in a loop over chunks."""
    return lambda q, k, v, beta: m.chunk_batched_delta_rule_forward(q, k, v, beta, 4), (
        normal(B, 16, K),
        keys(B, 16, K),
        normal(B, 16, K),
        unit(B, 16, 1),
    )


@case(LUCKY, "deltanet.py", "delta_rule")
def lucky_step(m: Any) -> Program:
    """No batch, no heads: vectors and a matrix."""
    return m.delta_rule_recurrent_step, (normal(K), keys(K), normal(K), torch.tensor(0.4), normal(K, K))


@case(MINIMAL, "deltanet.py", "delta_rule")
def minimal_tokens(m: Any) -> Program:
    q, k, v = bhtd(12)
    return m.delta_rule_recurrence, (q, k, v, unit(B, H, 12), normal(B, H, K, V))


@case(MINIMAL, "deltanet.py", "delta_rule")
def minimal_chunks(m: Any) -> Program:
    q, k, v = bhtd(T)
    return m.delta_rule_chunkwise, (q, k, v, unit(B, H, T), normal(B, H, K, V))


class _Unturned(torch.nn.Module):
    """In place of rotations, which its file asks for in a folder that is not there."""

    def forward(self, x: Any, offset: int = 0, downscale: bool = False) -> Any:
        return x


def _tarun(m: Any) -> Any:
    m.XPOS = lambda size: _Unturned()
    return m.MultiScaleRetention(16, 2)


@case(TARUN, "retention.py", "retention", "retention")
def tarun_parallel(m: Any) -> Program:
    return _tarun(m), (normal(B, 20, 16),)


@case(TARUN, "retention.py", "retention", "retention")
def tarun_chunk(m: Any) -> Program:
    layer = _tarun(m)
    return lambda x, first, second: layer.forward_chunkwise(x, [first, second], 2), (
        normal(B, 6, 16),
        normal(B, 8, 8),
        normal(B, 8, 8),
    )


@case(TARUN, "retention.py", "retention", "retention")
def tarun_step(m: Any) -> Program:
    layer = _tarun(m)
    return lambda x, first, second: layer.forward_recurrent(x, [first, second], 5), (
        normal(B, 1, 16),
        normal(B, 8, 8),
        normal(B, 8, 8),
    )


@case(HEBBIAN, "models/gated_deltanet.py", "gated_delta_rule")
def hebbian_chunks(m: Any) -> Program:
    return m.GatedDeltaNetBlock(WIDTH, num_heads=H, chunk_size=16).eval(), (normal(B, 20, WIDTH),)


@case(HEBBIAN, "models/gated_deltanet.py", "gated_delta_rule")
def hebbian_step(m: Any) -> Program:
    layer = m.GatedDeltaNetBlock(WIDTH, num_heads=H).eval()
    held = {"S": normal(B, H, 8, 8), **dict.fromkeys(("q_conv", "k_conv", "v_conv"))}
    return lambda x, state: layer.step(x, {**held, "S": state})[0], (normal(B, WIDTH), held["S"])


@case(SWAMLA, "models/gated_deltanet.py")
def swamla_layer(m: Any) -> Program:
    """What the delta rule takes away is read before the state decays: the gated delta rule only after a division of its
    write gates by the decays, which may be 0.
    """
    m.FLA_AVAILABLE = False
    config = SimpleNamespace(n_embd=WIDTH, n_head=H, dropout=0.0)
    return m.GatedDeltaNet(config).eval(), (normal(B, 12, WIDTH),)


@case(FUSION, "models/gdn.py", "gla")
def fusion_layer(m: Any) -> Program:
    """Called gated delta net; nothing is taken away from the state, whose columns decay by themselves."""
    sizes = {"gdn_d_inner": WIDTH, "gdn_d_state": K, "gdn_d_conv": 4, "gdn_headdim": 8, "gdn_chunk_size": 4}
    return m.GatedDeltaNet({"dim": WIDTH, **sizes}).eval(), (normal(B, 12, WIDTH),)


@case(KAINOMOS, "architecture/kda.py", "kda")
def kainomos_tokens(m: Any) -> Program:
    q, k, v = bthd(12)
    return m.recurrent_kda, (q, k, v, gates(B, 12, H, K), unit(B, 12, H), normal(B, H, K, V))


@case(KAINOMOS, "architecture/kda.py", "kda")
def kainomos_documents(m: Any) -> Program:
    """The state is emptied where a document begins."""
    q, k, v = bthd(12)
    starts = torch.zeros(B, 12, dtype=torch.bool)
    starts[:, 0] = starts[1, 5] = True
    return m.recurrent_kda, (q, k, v, gates(B, 12, H, K), unit(B, 12, H), normal(B, H, K, V), starts)


_LAYER = ("MultiScaleRetention", "split_heads", "split_chunks")


def _toy(m: Any) -> Any:
    m.XPOS = lambda size: torch.nn.Identity()
    sizes = {"hidden_size": WIDTH, "qk_dim": H * K, "v_dim": H * V, "num_heads": H, "use_default_gamma": True}
    return m.MultiScaleRetention(SimpleNamespace(**sizes, use_bias_in_msr=False, use_bias_in_msr_out=False)).eval()


@case(TOY, "retnet/modeling_retnet.py", "retention", only=_LAYER)
def toy_parallel(m: Any) -> Program:
    layer = _toy(m)
    return lambda q, k, v: layer.parallel_retention(q, k, v, layer.get_parallel_decay_mask(20)), bhtd(20)


@case(TOY, "retnet/modeling_retnet.py", "retention", only=_LAYER)
def toy_step(m: Any) -> Program:
    layer = _toy(m)
    return lambda q, k, v, state: layer.recurrent_retention(q, k, v, state, layer.get_recurrent_decay()), (
        *bhtd(1),
        normal(B, H, K, V),
    )


@case(VARIANT, "src/model/retnet.py")
def variant_chunks(m: Any) -> Program:
    """The gate is complex, and what decays is found by Fourier transforms."""
    return m.ChunkWiseRetentionLayer(WIDTH, 8, H, 4, torch.float32).eval(), (normal(B, 12, WIDTH),)


@case(PRECONDITIONED, "3rdparty/flash-linear-attention/fla/ops/precond_kda/naive.py")
def preconditioned_tokens(m: Any) -> Program:
    """Keys are scaled by sums of their squares before they are written: others than those that are read."""
    q, k, v = bthd(12)
    given = (gates(B, 12, H, K), gates(B, 12, H), unit(B, 12, H), unit(B, 12, H))
    return lambda *given: m.naive_recurrent_precond_kda(*given), (q, k, v, *given)
