"""Repositories tried as strangers: cosine-weighted attention, retention of a MIDI model, complex gates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.published.draw import B, H, K, V, bhtd, normal
from tests.published.registry import Program, case
from tests.published.sources import Repository

COSFORMER = Repository("OpenNLPLab/cosFormer", "8e12da111e2a683ea875711e0bf5810c6b4e8f9f")
MIDI = Repository("dourgey/RetNet-MIDI", "b13e840a1e35dc82fe6962a730ac379104ac6287")
OHARA = Repository("joey00072/ohara", "c4440160964c6773a71c95c5953c1690622770db")
GATELOOP = Repository("lucidrains/gateloop-transformer", "1ded1cb95af3677411103e8fd2cbf662287507bc")

TOKENS, WIDTH = 20, 24


@case(COSFORMER, "cosformer.py", "linear_attention")
def cosformer_sums(m: Any) -> Program:
    """Running sums of outer products; the sum of scores is clamped before it divides."""
    return m.CosformerAttention(WIDTH, H, causal=True).eval(), (normal(TOKENS, B, WIDTH),)


@case(COSFORMER, "cosformer.py", "linear_attention")
def cosformer_scores(m: Any) -> Program:
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~torch.ones(TOKENS, TOKENS).tril().bool(), float("-inf"))
    layer = m.CosformerAttention(WIDTH, H, causal=True).eval()
    return lambda x: layer.left_product(x, attn_mask=mask), (normal(TOKENS, B, WIDTH),)


@case(COSFORMER, "cosformer.py")
def cosformer_both_ways(m: Any) -> Program:
    """Every token reads every other: no recurrence."""
    return m.CosformerAttention(WIDTH, H).eval(), (normal(TOKENS, B, WIDTH),)


def _midi(m: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "qk_dim": H * K, "v_dim": H * V, "num_heads": H, "use_default_gamma": True}
    return m.MultiScaleRetention(SimpleNamespace(**sizes, use_bias_in_msr=False, use_bias_in_msr_out=False)).eval()


_LAYER = ("MultiScaleRetention",)


@case(MIDI, "modules/retnet/modeling_retnet.py", "retention", only=_LAYER)
def midi_parallel(m: Any) -> Program:
    """With the state that the tokens leave."""
    layer = _midi(m)
    return lambda q, k, v: layer.parallel_retention(q, k, v, layer.get_parallel_decay_mask(TOKENS))[:2], bhtd(TOKENS)


@case(MIDI, "modules/retnet/modeling_retnet.py", "retention", only=_LAYER)
def midi_padded(m: Any) -> Program:
    layer, mask = _midi(m), torch.ones(B, TOKENS)
    mask[0, :5] = 0

    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return layer.parallel_retention(q, k, v, layer.get_parallel_decay_mask(TOKENS, mask))[0]

    return run, (*bhtd(TOKENS), mask)


@case(MIDI, "modules/retnet/modeling_retnet.py", "retention", only=_LAYER)
def midi_step(m: Any) -> Program:
    layer = _midi(m)
    return lambda q, k, v, state: layer.recurrent_retention(q, k, v, state, layer.get_recurrent_decay()), (
        *bhtd(1),
        normal(B, H, K, V),
    )


@case(MIDI, "modules/retnet/modeling_retnet.py", "retention", only=_LAYER)
def midi_chunk(m: Any) -> Program:
    layer = _midi(m)

    def run(q: Any, k: Any, v: Any, state: Any) -> Any:
        mask, whole, inner = layer.get_chunkwise_decay(TOKENS)
        return layer.chunkwise_retention(q, k, v, mask, state, whole, inner)

    return run, (*bhtd(TOKENS), normal(B, H, K, V))


@case(OHARA, "ohara/models/retnet.py")
def ohara_retention(m: Any) -> Program:
    """Scores are divided by sums of their absolute values, which no state carries."""
    layer = m.Retention(m.Config(d_model=WIDTH, num_heads=H)).eval()
    mask = (0.9 ** (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).clamp(min=0)).tril().expand(H, TOKENS, TOKENS)
    return layer, (normal(B, TOKENS, WIDTH), mask.clone())


@case(GATELOOP, "gateloop_transformer/gateloop_transformer.py")
def gateloop_operator(m: Any) -> Program:
    """The gate is complex."""
    q, k, v = (normal(B, 8, size) for size in (K, K, V))
    gate = torch.polar(torch.rand(B, 8, 1, 1), normal(B, 8, 1, 1))
    return m.gate_loop_operator, (q, k, v, gate)
