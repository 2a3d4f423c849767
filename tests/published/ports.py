"""Ports of linear attention read for the first time on 2026-11-27: DeltaNet, Mamba-2, RWKV-7, and of serving libraries.
Some look like the delta rule and are not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.published.draw import B, H, K, V, bhtd, bthd, gates, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

TINY = Repository("kanishkez/TinyLLM", "ed32ecfa592f8ab250097ca54a121a26935910cb")
OMNI = Repository("MindIntels/omni_qwen", "5ca5a4002c4bf7331827bfc6b78e8686da371317")
VISHAL = Repository("Vishal-sys-code/variational-linear-attention", "71b33b13c7711b69bf732de2ed1ca878ff0531d1")
MOMENTUM = Repository("HuuYuLong/MomentumDeltaNet", "c6e77fa261fb0c002fae1a14b6209a5b28d2edc9")
SPARROW = Repository("VladousSparrowous/mamba-transformer-comparison", "8c2cdb5601cc8ac8b8d931f064a46f8b9ece6746")
XPU = Repository("sgl-project/sgl-kernel-xpu", "9cf16bf9f37928c2786195c7e10ff92d9051dfaf")
SGL_NPU = Repository(
    "sgl-project/sgl-kernel-npu", "f425bdf1e191a7682296d3b2ed0b927d4e37d671", roots=("python/sgl_kernel_npu",)
)
QUALCOMM = Repository("MollySophia/rwkv-qualcomm", "24407f892c9f7e0122325f37b6eb332974fd054b", roots=("",))

TOKENS, WIDTH, HEADS = 10, 24, 3


# -- delta rules -------------------------------------------------------------------------------------------------------


def _tiny(m: Any, tokens: int) -> Program:
    layer = m.DeltaNet(WIDTH, K, K, K).eval()
    return layer, (0.3 * normal(1, tokens, WIDTH), normal(1, K, K, K))


@case(TINY, "models/deltanet.py")
def tiny_deltanet(m: Any) -> Program:
    """Runs with as many heads as key channels alone: the share of a head scales a channel of what all heads write."""
    return _tiny(m, 6)


@case(TINY, "models/deltanet.py")
def tiny_deltanet_step(m: Any) -> Program:
    return _tiny(m, 1)


def _omni(m: Any) -> Any:
    return m.GatedDeltaNet(WIDTH, head_dim=K, num_heads=HEADS, chunk_size=4).eval()


@case(OMNI, "gated_deltanet.py", "delta_rule")
def omni_tokens(m: Any) -> Program:
    layer = _omni(m)
    return lambda x: layer(x, use_chunkwise=False), (normal(B, TOKENS, WIDTH),)


@case(OMNI, "gated_deltanet.py", "delta_rule")
def omni_chunks(m: Any) -> Program:
    """Chunks in name: tokens one by one, the state of a chunk beside the whole one; ten tokens in chunks of four."""
    return _omni(m), (normal(B, TOKENS, WIDTH),)


@case(OMNI, "gated_deltanet.py", "delta_rule")
def omni_step(m: Any) -> Program:
    return _omni(m), (normal(B, 1, WIDTH), normal(B, HEADS, K, K))


@case(VISHAL, "src/models/attention/deltanet.py", "delta_rule")
def vishal_deltanet(m: Any) -> Program:
    """Values in front of keys in the state, erased and written by two products."""
    return m.DeltaNetLayer(WIDTH).eval(), (normal(B, TOKENS, WIDTH),)


@case(VISHAL, "src/models/attention/linear_transformer.py", "linear_attention")
def vishal_linear(m: Any) -> Program:
    """The sum of keys beside the state, 1e-6 in the divisor of each token."""
    return m.LinearTransformerLayer(WIDTH).eval(), (normal(B, TOKENS, WIDTH),)


@case(VISHAL, "src/models/attention/vla_v3.py")
def vishal_variational(m: Any) -> Program:
    """Errors are read along the key and written along another direction, made of a second state."""
    return m.VLAv3(WIDTH).eval(), (normal(B, 6, WIDTH),)


_MOMENTUM = "flash-linear-attention/fla/ops/momentum_delta_rule/naive.py"


def _momentum() -> tuple[Tensor, ...]:
    q, k, v = bthd(8)
    return q, k, v, gates(B, 8, H), gates(B, 8, H), F.normalize(normal(B, 8, H, K), dim=-1)


@case(MOMENTUM, _MOMENTUM, only=("recurrent_momentum_delta_rule_ref",))
def momentum_tokens(m: Any) -> Program:
    """The delta rule's error goes into a momentum, and that into the state: two states."""

    def run(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, mu: Tensor, p: Tensor, beta: Tensor, eta: Tensor) -> Any:
        return m.recurrent_momentum_delta_rule_ref(q, k, v, alpha, mu, p, beta, eta, output_final_state=True)

    return run, (*_momentum(), unit(B, 8, H), unit(B, 8, H))


@case(MOMENTUM, _MOMENTUM, only=("chunk_momentum_delta_rule_ref",))
def momentum_chunks(m: Any) -> Program:
    def run(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, mu: Tensor, p: Tensor, beta: Tensor, eta: Tensor) -> Any:
        return m.chunk_momentum_delta_rule_ref(q, k, v, p, alpha, mu, beta, eta, chunk_size=4)

    return run, (*_momentum(), unit(B, 8, H), unit(B, 8, H))


# -- serving -----------------------------------------------------------------------------------------------------------


_NATIVE = ("inv_tril_inplace", "chunk_gated_delta_rule_native")
_CHUNK = "python/sgl_kernel_npu/sgl_kernel_npu/fla/chunk.py"


@case(SGL_NPU, _CHUNK, "gated_delta_rule", only=_NATIVE)
def sgl_chunks(m: Any) -> Program:
    """transformers' chunks with the inverse in a function of its own."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return m.chunk_gated_delta_rule_native(
            q, k, v, g, beta, 4, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return run, (*bthd(TOKENS), gates(B, TOKENS, H), unit(B, TOKENS, H))


@case(SGL_NPU, _CHUNK, "gated_delta_rule", only=_NATIVE)
def sgl_chunks_continued(m: Any) -> Program:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        return m.chunk_gated_delta_rule_native(q, k, v, g, beta, 4, state, output_final_state=True)

    return run, (*bthd(8), gates(B, 8, H), unit(B, 8, H), normal(B, H, K, V))


_NAIVE = "lightning_attention_decode_naive"


@case(XPU, "benchmark/bench_lightning_attention_decode.py", "retention", only=(_NAIVE,))
def xpu_lightning_step(m: Any) -> Program:
    return m.lightning_attention_decode_naive, (*bhtd(1), normal(B, H, K, V), unit(H, 1, 1))


@case(XPU, "benchmark/bench_lightning_attention_decode.py", "retention", only=(_NAIVE,))
def xpu_lightning_tokens(m: Any) -> Program:
    return m.lightning_attention_decode_naive, (*bhtd(6), normal(B, H, K, V), unit(H, 1, 1))


# -- RWKV-7 ------------------------------------------------------------------------------------------------------------


class _Operator(nn.Module):
    """What AIMET's element-wise modules are; Qualcomm's file takes them from there."""

    def __init__(self, *_: object, of: Any = None) -> None:
        super().__init__()
        self.of = of

    def forward(self, *x: Tensor) -> Tensor:
        return self.of(*x)


def _wkv(m: Any) -> Any:
    plain = {
        "Split": None,
        "Reshape": None,
        "Concat": None,
        "Multiply": torch.mul,
        "MatMul": torch.matmul,
        "Add": torch.add,
    }
    vars(m).update({name: partial(_Operator, of=of) for name, of in plain.items()})
    return m.Wkv7(HEADS, K)


def _rows(tokens: int) -> tuple[Tensor, ...]:
    """r, w, k and v ``[T, H, K]``, and the share of the old value that is erased."""
    key = F.normalize(normal(tokens, HEADS, K), dim=-1)
    return normal(tokens, HEADS, K), unit(tokens, HEADS, K), key, normal(tokens, HEADS, K), unit(tokens, HEADS, 1)


def _tied(m: Any, tokens: int, *, decayed: bool = True) -> Program:
    """One key to erase and to write; ``decayed``: what is erased is read behind the decay."""
    block = _wkv(m)

    def run(r: Tensor, w: Tensor, k: Tensor, v: Tensor, share: Tensor, state: Tensor) -> Any:
        return block(tokens, r, w, k * share, v, -k * w if decayed else -k, k * share, state)

    return run, (*_rows(tokens), normal(HEADS, K, K))


@case(QUALCOMM, "rwkv_src/rwkv_v7_modules.py", only=("Wkv7",))
def qualcomm_tokens(m: Any) -> Program:
    """What is erased is read before the state decays, and along another direction than what is written."""
    block = _wkv(m)
    r, w, k, v, share = _rows(6)
    return lambda *x: block(6, *x), (r, w, normal(6, HEADS, K), v, -k, k * share, normal(HEADS, K, K))


@case(QUALCOMM, "rwkv_src/rwkv_v7_modules.py", only=("Wkv7",))
def qualcomm_almost_tied(m: Any) -> Program:
    """The same keys, but what is erased is read before the state decays: not KDA."""
    return _tied(m, 6, decayed=False)


@case(QUALCOMM, "rwkv_src/rwkv_v7_modules.py", "kda", only=("Wkv7",))
def qualcomm_tied_tokens(m: Any) -> Program:
    """Tied within the program, read behind the decay: KDA, values in front of keys, no batch."""
    return _tied(m, 6)


@case(QUALCOMM, "rwkv_src/rwkv_v7_modules.py", "kda", only=("Wkv7",))
def qualcomm_tied_step(m: Any) -> Program:
    return _tied(m, 1)


# -- Mamba-2 -----------------------------------------------------------------------------------------------------------


def _sparrow(m: Any) -> tuple[Any, Any]:
    config = m.Mamba2Config(d_model=WIDTH, n_layer=1, d_state=K, headdim=V, chunk_size=4, vocab_size=16)
    layer = m.Mamba2(config)
    with torch.no_grad():
        for parameter in (layer.dt_bias, layer.A_log, layer.D):
            parameter.copy_(torch.rand_like(parameter))
    return layer.eval(), config


_SPARROW = "mamba2/mamba2.py"


@case(SPARROW, _SPARROW, "simple_gla")
def sparrow_layer(m: Any) -> Program:
    return _sparrow(m)[0], (normal(B, 8, WIDTH),)


@case(SPARROW, _SPARROW, "simple_gla")
def sparrow_step(m: Any) -> Program:
    """Both states are overwritten in place."""
    layer, config = _sparrow(m)
    conv, state = m.InferenceCache.alloc(B, config)

    def step(x: Tensor, conv: Tensor, state: Tensor) -> Any:
        return layer.step(x, m.InferenceCache(conv, state))[0]

    return step, (normal(B, 1, WIDTH), normal(*conv.shape), normal(*state.shape))
