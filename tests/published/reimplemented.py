"""Linear attention written anew by single authors: RetNet, lightning attention, Mamba-2, Kimi Linear and others."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from tests.published.draw import B, H, K, V, bhtd, bthd, gates, keys, normal, unit
from tests.published.mamba import minimal_layer, minimal_step
from tests.published.registry import Program, case
from tests.published.sources import Repository

LEET = Repository("Computational-Machine-Intelligence/LeetDecoding", "1b545c2f5bacc155255250d1f70ac9484744559a")
XOPES = Repository("Doraemonzzz/xopes", "1dfa3df896141398cd1afb92bca5c95ea8dacbac")
JINHO = Repository("jinho-choi123/gated-deltanet-impl", "f4b79972227cf37e77a5b6b6881411a41ee62fba")
DEV_X = Repository("Dev-X25874/Kimi-Linear-Attention", "518d0ea390a8496440bc10d687e6aeedc00fdaca")
OPEN_KIMI = Repository("kyegomez/Open-Kimi", "f17939c8fb1708a508f38ec4c8b60ff3cc59caa2")
HKEVIN = Repository("hkevin01/kimi-linear", "b28ff72bfd6470b70589764633acd9ab30a46289")
PRATEEK = Repository("prateekstark/retnet", "8ca5206e6c8f83facfd66433226900cc82900430")
RYOKO = Repository("Ronsor/ryoko-retnet", "ba16af94e19b46a32936704ad32d97c90938a52a")
JUVI = Repository("juvi21/retnet-torch", "c18bc3243729d4fce75a4d65ad9c9e7159fe3c9c")
MAMBA2 = Repository("BrianPetkovsek/mamba2-minimal", "68d8bd8c4b1688bd3d24673770caf3942da72187")
INTERATTN = Repository("Kevin-lkw/interattn", "75761ef45a615a354747ceff165169183ed1f35c")
ONE_SIXTH = Repository("One-sixth/flash-linear-attention-pytorch", "742ef7cddad960a4fbe22492be4f5edc1089335d")
LEET_METHODS = "leetDecoding/methods"
XOPES_LIGHTNING = "xopes/ops/lightning_attn"


def _powers(tokens: int, slopes: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return torch.exp(-slopes[:, None, None] * distance).tril()


def _slopes() -> torch.Tensor:
    return torch.tensor([0.5, 0.25, 0.125])


@case(LEET, f"{LEET_METHODS}/lightningAttention2_torch.py", "retention")
def leet_lightning_slopes(m: Any) -> Program:
    m.BLOCK = 4
    return m.lightningAttention2_torch, (*bhtd(12), _slopes())


@case(LEET, f"{LEET_METHODS}/lightningAttention2_torch.py", "linear_attention")
def leet_lightning(m: Any) -> Program:
    m.BLOCK = 4
    return m.lightningAttention2_torch, bhtd(12)


@case(LEET, f"{LEET_METHODS}/causal_dot_product_torch.py", "retention")
def leet_tokens_decay(m: Any) -> Program:
    """The forward of an autograd function."""
    return m.causal_dot_product_torch, (*bhtd(7), unit(H))


@case(LEET, f"{LEET_METHODS}/causal_dot_product_torch.py", "linear_attention")
def leet_tokens(m: Any) -> Program:
    return m.causal_dot_product_torch, bhtd(7)


@case(LEET, f"{LEET_METHODS}/linear_attn.py", "retention")
def leet_slopes_by_item(m: Any) -> Program:
    return m.linear_attn, (*bhtd(9), _slopes())


@case(LEET, f"{LEET_METHODS}/Recursion.py", "retention", only=("recursive_infer_with_decay",))
def leet_recursion(m: Any) -> Program:
    """Halves of halves, the later of which reads the state of the earlier one."""
    m.get_full_mask = _powers
    return lambda q, k, v: m.recursive_infer_with_decay(q, k, v, 0, 12, _slopes()), bhtd(12)


@case(XOPES, f"{XOPES_LIGHTNING}/constant_decay/lacd_torch.py", "retention")
def xopes_constant_decay(m: Any) -> Program:
    return m.lacd_torch, (*bthd(7), gates(H), normal(B, H, K, V))


@case(XOPES, f"{XOPES_LIGHTNING}/constant_decay/lacd_torch.py", "linear_attention")
def xopes_without_decay(m: Any) -> Program:
    return m.lacd_torch, bthd(7)


@case(XOPES, f"{XOPES_LIGHTNING}/scalar_decay/lasd_torch.py", "simple_gla")
def xopes_scalar_decay(m: Any) -> Program:
    return m.lasd_torch, (*bthd(7), gates(B, 7, H))


@case(XOPES, f"{XOPES_LIGHTNING}/vector_decay/lavd_torch.py", "gla")
def xopes_vector_decay(m: Any) -> Program:
    return m.lavd_torch, (*bthd(7), gates(B, 7, H, K))


@case(XOPES, f"{XOPES_LIGHTNING}/vector_decay/lavd_torch.py", "gla")
def xopes_tied_keys(m: Any) -> Program:
    """The key is what the decay forgets."""
    q, _, v = bthd(7)
    return lambda q, v, decay: m.lavd_torch(q, None, v, decay), (q, v, gates(B, 7, H, K))


@case(XOPES, "xopes/ops/kernel_regression/causal_linear/krcl_torch.py")
def xopes_kernel_regression(m: Any) -> Program:
    """What is returned are the corrected values, not a reading of the state."""
    q, k, v = bthd(7)
    return m.krcl_torch, (q, k, v, gates(B, 7, H))


@case(JINHO, "gated_deltanet/torch/gated_delta_recurrent_torch.py", "gated_delta_rule", "gated_delta_rule")
def jinho_recurrent(m: Any) -> Program:
    """Loops over packed sequences, heads and tokens; the offsets are a tensor."""
    q, k, v = normal(1, 6, 1, K), keys(1, 6, 1, K), normal(1, 6, 1, K)
    offsets = torch.tensor([0, 4, 6])
    return m.gated_delta_recurrent_torch, (q, k, v, gates(1, 6, 1), unit(1, 6, 1), offsets, normal(2, 1, K, K))


@case(DEV_X, "kimi_linear/kda.py", "gla")
def dev_x_layer(m: Any) -> Program:
    """Called KDA, and without the delta rule."""
    layer = m.KimiDeltaAttention(16, 2, feature_dim=8, chunk_size=4)
    return partial(layer, use_cache=True), (normal(B, 10, 16),)


@case(DEV_X, "kimi_linear/kda.py", "gla")
def dev_x_step(m: Any) -> Program:
    layer = m.KimiDeltaAttention(16, 2, feature_dim=8)
    return lambda x, state: layer(x, None, True, state), (normal(B, 1, 16), normal(B, 2, 8, 8))


@case(OPEN_KIMI, "open_kimi/kimi_linear.py", only=("chunk_kda",))
def open_kimi_chunk(m: Any) -> Program:
    """Its beta is not used, and the state is updated with uncorrected values."""
    return partial(m.chunk_kda, chunk_size=4), (*bhtd(8), gates(B, H, 8, K), unit(B, H, 8))


@case(HKEVIN, "src/kda/state_manager.py", "kda")
def hkevin_step(m: Any) -> Program:
    """Looks for NaN in the new state and takes another path there."""
    manager = m.StateManager(K, V, H)

    def step(q: Any, *inputs: Any) -> Any:
        state, _ = manager.update_state(*inputs)
        return torch.einsum("bhk,bhkv->bhv", q, state), state

    inputs = (normal(B, H, K, V), keys(B, H, K), normal(B, H, V), unit(B, H, K), unit(B, H, 1))
    return step, (normal(B, H, K), *inputs)


def _prateek(m: Any) -> Any:
    return m.GatedMultiScaleRetentionLayer(24, 8, 8, 3).eval()


@case(PRATEEK, "src/base.py", "retention")
def prateek_parallel(m: Any) -> Program:
    return _prateek(m), (normal(B, 9, 24),)


@case(PRATEEK, "src/base.py", "retention")
def prateek_step(m: Any) -> Program:
    layer = _prateek(m)
    return lambda x, state: layer(x, state, "recurrent", 5), (normal(B, 1, 24), normal(B, 3, 8, 8))


@case(PRATEEK, "src/base.py", "retention")
def prateek_first_chunk(m: Any) -> Program:
    layer = _prateek(m)
    return lambda x: layer(x, None, "chunkwise", 0), (normal(B, 9, 24),)


def _ryoko(m: Any, tokens: int) -> Program:
    layer = m.Retention(16, 8, 0.9, head_vdim=12)
    return lambda x, state: layer(x, x, x, None, 3, state, True), (normal(B, tokens, 16), normal(B, 8, 12))


@case(RYOKO, "ryoko/retention.py", "retention", "retention")
def ryoko_parallel(m: Any) -> Program:
    """A module for every head."""
    layer = m.MultiscaleRetention(16, 2).eval()
    return lambda x: layer(x, x, x), (normal(B, 9, 16),)


@case(RYOKO, "ryoko/retention.py", "retention")
def ryoko_chunk(m: Any) -> Program:
    return _ryoko(m, 6)


@case(RYOKO, "ryoko/retention.py", "retention")
def ryoko_step(m: Any) -> Program:
    return _ryoko(m, 1)


@case(JUVI, "src/retention.py", "retention")
def juvi_parallel(m: Any) -> Program:
    layer = m.Retention(16, 8, 0.9, head_vdim=12)
    return lambda x: layer(x, x, x), (normal(B, 9, 16),)


@case(MAMBA2, "mamba2.py", "simple_gla")
def mamba2_layer(m: Any) -> Program:
    return minimal_layer(m)


@case(MAMBA2, "mamba2.py", "simple_gla")
def mamba2_step(m: Any) -> Program:
    return minimal_step(m)


@case(INTERATTN, "linearattn.py", "linear_attention")
def interattn_layer(m: Any) -> Program:
    """Running sums of the states, and a normaliser with eps."""
    m.F = F
    layer = m.CausalLinearAttention(SimpleNamespace(n_embd=24, n_head=3, dropout=0.0, bias=False)).eval()
    return layer, (normal(B, 9, 24),)


@case(ONE_SIXTH, "normal_linear_attention_ops.py")
def one_sixth_mask(m: Any) -> Program:
    """The mask is an argument: any numbers may come in it."""
    distance = torch.arange(9)[:, None] - torch.arange(9)
    mask = torch.where(distance >= 0, 0.9 ** distance.clamp(min=0), 0.0)
    return lambda q, k, v: m.normal_linear_attention(q, k, v, mask), bhtd(9)
