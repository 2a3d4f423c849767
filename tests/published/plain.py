"""Linear attention with and without decay: lightning, based, lolcats, performers, YOCO, RWKV-6, xLSTM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.published.draw import B, H, K, V, bhtd, bthd, gates, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

LIGHTNING = Repository("OpenNLPLab/lightning-attention", "d15c38529bbd5c2c82b44ddda3cac885825aa873")
CULA = Repository("inclusionAI/cuLA", "fa742a23fcc6d818b0f591532ecad7985e3f64e5")
BASED = Repository("HazyResearch/based", "32c1bd4e09c8f7f718b0ed3f2e0a333908297879")
LOLCATS = Repository("HazyResearch/lolcats", "375df84f58417a57b78c875fa3f8fa76e84ab12e")
PERFORMER = Repository("lucidrains/performer-pytorch", "fc8b78441b1e27eb5d9b01fc738a8772cee07127")
LUCIDRAINS = Repository("lucidrains/linear-attention-transformer", "24ecf20b11a7c8ddbc15e33a30f0be0cc73b145d")
IDIAP = Repository("idiap/fast-transformers", "2ad36b97e64cb93862937bd21fcc9568d989561f")
YOCO = Repository("microsoft/unilm", "768a3c873f598bb9b4d4dfb9267b099e35f8fe56")
TORCHSCALE = Repository("microsoft/torchscale", "4d1e0e82e5adf86dd424f1463192635b73fc8efc")
GPTCORE = Repository("SmerkyG/gptcore", "499586641f25e4ea3c596466999c2944b1c85f8a")
RWKV_BLOCK = Repository("RWKV/RWKV-block", "060d03ac87762620eeaa568a5438952e7a309d33")
TILELANG = Repository("tile-ai/tilelang", "a35008a42531c62b976ae4cec3855d4383db0f3c")
XLSTM = Repository("NX-AI/xlstm", "032a6fb8ee19a8c0db80ae6111ff4744a09414a9")
MLSTM = Repository("NX-AI/mlstm_kernels", "39d3c61741e5d2c0e6ab8922106dd236632c5139")
GATE_RECURRENT = "YOCO/yoco/models/decoder/kernel/gate_recurrent.py"
BASED_FILE = "based/models/mixers/linear_attention.py"
LOLCATS_FILE = "src/model/linear_attention/linear_attention.py"
PERFORMER_FILE = "performer_pytorch/performer_pytorch.py"
LIGHTNING_TORCH = "lightning_attn/ops/torch/linear_attention.py"


@case(LIGHTNING, LIGHTNING_TORCH, "retention")
def lightning_slopes(m: Any) -> Program:
    slopes = torch.tensor([0.5, 0.25, 0.125])
    return lambda q, k, v: m.linear_attn(q, k, v, slopes), bhtd(12)


@case(LIGHTNING, LIGHTNING_TORCH, "linear_attention")
def lightning_without_decay(m: Any) -> Program:
    return m.linear_attn, bhtd(12)


@case(CULA, "tests/test_lightning_attn.py", "retention", only=("pytorch_reference",))
def cula_lightning_chunks(m: Any) -> Program:
    q, k, v = normal(B, 12, H, K), normal(B, 12, H, K), normal(B, 12, H, K)
    fn = partial(m.pytorch_reference, chunk_size=4, output_final_state=True)
    return fn, (q, k, v, unit(H))


def _cula_step_in_fp64(m: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def step(q: Tensor, k: Tensor, v: Tensor, state: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, state, slopes = (x.double() for x in (q, k, v, state, slopes))
        state = state * torch.exp(-slopes).view(1, H, 1, 1) + k.unsqueeze(-1) * v.unsqueeze(-2)
        return torch.einsum("bhk,bhkv->bhv", q * K**-0.5, state), state

    return step


@case(CULA, "tests/test_la_decode.py", "retention", only=("torch_la_decode_ref",), exact=_cula_step_in_fp64)
def cula_lightning_step(m: Any) -> Program:
    """Its output is rounded to bf16."""
    q, k, v = normal(B, H, K), normal(B, H, K), normal(B, H, K)
    return partial(m.torch_la_decode_ref, scale=K**-0.5), (q, k, v, normal(B, H, K, K), unit(H))


@case(CULA, "benchmarks/bench_lightning_attn.py", "retention", only=("torch_naive_lightning_attn",))
def cula_lightning_recurrent(m: Any) -> Program:
    q, k, v = normal(B, 7, H, K), normal(B, 7, H, K), normal(B, 7, H, K)
    return partial(m.torch_naive_lightning_attn, output_final_state=True), (q, k, v, unit(H))


@case(BASED, BASED_FILE, "linear_attention", only=("FeatureMap", "TaylorExp", "LinearAttention"))
def based_layer(m: Any) -> Program:
    layer = m.LinearAttention(24, m.TaylorExp(4), feature_dim=4, num_heads=3)
    return layer, (normal(B, 20, 24),)


@case(
    LOLCATS,
    "src/model/linear_attention/linear_attention.py",
    "linear_attention",
    only=("causal_dot_product", "linear_attention"),
)
def lolcats_cumulative(m: Any) -> Program:
    m.fast_causal_dot_product = None
    q, k, v = bhtd(9)
    return lambda q, k, v: m.linear_attention(q, k, v)[0], (q.exp(), k.exp(), v)


@case(
    LOLCATS,
    "src/model/linear_attention/linear_attention.py",
    "linear_attention",
    only=("causal_dot_product", "linear_attention"),
)
def lolcats_cumulative_fp32(m: Any) -> Program:
    m.fast_causal_dot_product = None
    q, k, v = bhtd(9)
    return lambda q, k, v: m.linear_attention(q, k, v, fp32_attention=True)[0], (q.exp(), k.exp(), v)


@case(
    PERFORMER, "performer_pytorch/performer_pytorch.py", "linear_attention", only=("causal_linear_attention_noncuda",)
)
def performer_chunks(m: Any) -> Program:
    q, k, v = bhtd(12)
    return partial(m.causal_linear_attention_noncuda, chunk_size=4), (q.exp(), k.exp(), v)


@case(LUCIDRAINS, "linear_attention_transformer/linear_attention_transformer.py", "linear_attention")
def lucidrains_causal(m: Any) -> Program:
    q, k, _ = bhtd(12)
    return partial(m.causal_linear_attn, bucket_size=1), (q, k, normal(B, H, 12, K))


@case(IDIAP, "fast_transformers/recurrent/attention/self_attention/linear_attention.py", "linear_attention")
def idiap_step(m: Any) -> Program:
    layer = m.RecurrentLinearAttention(K)
    q, k, v = normal(B, H, K), normal(B, H, K), normal(B, H, V)
    return lambda q, k, v, s, z: layer(q, k, v, [s, z]), (q, k, v, normal(B, H, K, V), unit(B, H, K))


@case(TILELANG, "examples/linear_attention/example_linear_attn_fwd.py", "linear_attention", only=("ref_program",))
def tilelang_chunks(m: Any) -> Program:
    """Chunks of 64 tokens, whose states are summed up."""
    return m.ref_program, bthd(128)


@case(YOCO, GATE_RECURRENT, "simple_gla", only=("parallel_gate_retention",))
def yoco_parallel(m: Any) -> Program:
    return m.parallel_gate_retention, (*bhtd(12), gates(B, H, 12))


@case(YOCO, GATE_RECURRENT, "simple_gla", only=("recurrent_gate_retention",))
def yoco_step(m: Any) -> Program:
    def step(q: Any, k: Any, v: Any, g: Any, state: Any) -> Any:
        held = {"last_hidden_state": state}
        return m.recurrent_gate_retention(q, k, v, g, held), held["last_hidden_state"]

    return step, (*bhtd(1), gates(B, H), normal(B, H, K, V))


@case(TORCHSCALE, "torchscale/component/multiscale_retention.py", "simple_gla", only=("MultiScaleRetention",))
def torchscale_step(m: Any) -> Program:
    """The state is kept divided by a running scale."""

    def step(q: Any, k: Any, v: Any, decay: Any, state: Any, scale: Any) -> Any:
        held = {"prev_key_value": state, "scale": scale}
        return m.MultiScaleRetention.recurrent_forward(layer, q, k, v, decay, held), held

    layer = SimpleNamespace(num_heads=H, head_dim=V, key_dim=K)
    q, k, _ = bhtd(1)
    return step, (q, k, normal(B, 1, H * V), unit(H), normal(B, H, V, K), unit(H) + 1)


@case(GPTCORE, "model/experimental/rwkv_inner.py", "gla")
def gptcore_rwkv6(m: Any) -> Program:
    inputs = (*bhtd(16), unit(B, H, 16, K), normal(1, H, 1, K), normal(B, H, K, V))
    return partial(m.rwkv_inner, chunk_len=8, precision_dtype=torch.float64), inputs


@case(RWKV_BLOCK, "rwkv_block/v5_eagle/block/rwkv5_optimized_ops.py", "gla")
def rwkv_block_rwkv6(m: Any) -> Program:
    inputs = (*bhtd(16), unit(B, H, 16, K), normal(1, H, 1, K), normal(B, H, K, V))
    return partial(m.RWKVx060_subchunk_torch, chunk_len=8), inputs


@case(MLSTM, "mlstm_kernels/torch/parallel/native_siging/fw.py", "simple_gla")
def mlstm_sigmoid_gates(m: Any) -> Program:
    """Without its normaliser."""
    q, k, v = bhtd(12)
    return lambda *x: m.mlstm_siging_parallel_fw(*x, normalize=False)[0], (q, k, v, normal(B, H, 12), normal(B, H, 12))


@case(MLSTM, "mlstm_kernels/torch/parallel/native_siging/fw.py", "simple_gla")
def mlstm_sigmoid_gates_normalised(m: Any) -> Program:
    q, k, v = bhtd(12)
    return lambda *x: m.mlstm_siging_parallel_fw(*x)[0], (q, k, v, normal(B, H, 12), normal(B, H, 12))


@case(MLSTM, "mlstm_kernels/torch/recurrent/native_step.py", "simple_gla", only=("mlstm_recurrent_step__native_fw",))
def mlstm_step(m: Any) -> Program:
    inputs = (normal(B, H, K, V), unit(B, H, K), normal(B, H, 1), normal(B, H, K), normal(B, H, K), normal(B, H, V))
    return m.mlstm_recurrent_step__native_fw, (*inputs, normal(B, H, 1), normal(B, H, 1))


@case(MLSTM, "mlstm_kernels/torch/recurrent/native_sequence.py", "simple_gla")
def mlstm_tokens(m: Any) -> Program:
    """Token by token, with the largest exponent so far."""
    return m.mlstm_recurrent_sequence__native_fw, (*bhtd(8), normal(B, H, 8), normal(B, H, 8))


@case(XLSTM, "xlstm/blocks/mlstm/backends.py", "simple_gla")
def xlstm_step(m: Any) -> Program:
    state = (normal(B, H, K, K), unit(B, H, K, 1), normal(B, H, 1, 1))
    token = (normal(B, H, 1, K), normal(B, H, 1, K), normal(B, H, 1, K), normal(B, H, 1, 1), normal(B, H, 1, 1))
    return m.recurrent_step_stabilized_simple, (*state, *token)


@case(XLSTM, "xlstm/blocks/mlstm/backends.py", "simple_gla")
def xlstm_parallel_stabilised(m: Any) -> Program:
    """Every row of decays is divided by its largest."""
    q, k, v = bhtd(12)
    return m.parallel_stabilized_simple, (q, k, v, normal(B, H, 12, 1), normal(B, H, 12, 1))


@case(MLSTM, "mlstm_kernels/torch/parallel/native_stablef/fw.py", "simple_gla")
def mlstm_parallel_stabilised(m: Any) -> Program:
    return lambda *x: m.mlstm_parallel_fw(*x)[0], (*bhtd(12), normal(B, H, 12), normal(B, H, 12))


@case(LOLCATS, LOLCATS_FILE, only=("softmax_attention",))
def lolcats_softmax(m: Any) -> Program:
    return lambda q, k, v: m.softmax_attention(q, k, v)[0], bhtd(12)


@case(BASED, BASED_FILE, only=("FeatureMap", "TaylorExp"))
def based_feature_map(m: Any) -> Program:
    q, _, _ = bthd(12)
    return m.TaylorExp(K), (q,)
