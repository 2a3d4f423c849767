"""Kernel references, xLSTM, Based and MLA of seven more repositories; what is not causal is none of the family."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.published.draw import B, H, K, V, bhtd, bthd, gates, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

CUTLASS = Repository("NVIDIA/cutlass", "7107b05535f8977f5ecb9d01ee203205b1fd9bc4")
XLSTM = Repository("myscience/x-lstm", "b1635c99cd6105e96b94fdb5433b287cb1594cbf")
RECURSIVE = Repository("JacobFV/recursive-kimi-linear", "41e4af4342167dcd6d57bb5ca89d4b0125e997e5")
BIDIRECTIONAL = Repository("fla-org/flash-bidirectional-linear-attention", "dd222769550d320bbb67edf3d78ddd5b8cfabb4d")
TAYLOR = Repository("lucidrains/taylor-series-linear-attention", "4d99e804d4492b2dec3f2348459493039e5acf26")
LLM720 = Repository("wrmedford/llm720", "75564c9fe1dffd66e2915ebfedae19937749adee")
PREFIX = Repository("HazyResearch/prefix-linear-attention", "7490f22bda3e38dc057bcbaffe6bdb09b4d475e6")
SSD = "examples/python/CuTeDSL/cute/blackwell/kernel/attention/mamba2_ssd/mamba2_ssd_reference.py"
KDA = "src/fla/ops/kda/naive.py"
ROPE, WIDTH, TOKENS = 4, 24, 10


def _ssd() -> tuple[Tensor, ...]:
    """x, a, delta, B and C of two chunks of eight tokens, and where outputs and states go. None of the numbers is
    rounded in bf16, nor is a * delta.
    """
    chunk, chunks, groups = 8, 2, 1
    drawn = normal(V, chunk, chunks, H, B), unit(chunk, chunks, H, B)
    x, delta = (value.bfloat16().float() for value in drawn)
    b, c = (normal(chunk, K, chunks, groups, B).bfloat16().float() for _ in range(2))
    decays = -(2.0 ** -torch.arange(1.0, H + 1))
    return x, decays, delta, b, c, torch.zeros(chunk, V, chunks, H, B), torch.zeros(V, K, H, B)


SKIP = torch.tensor([[1.0, -0.5, 0.75]])


@case(CUTLASS, SSD, "simple_gla")
def ssd_of_a_kernel(m: Any) -> Program:
    return partial(m.ssd_reference_fp32_all, D=SKIP, has_d=True, d_has_hdim=False), _ssd()


def _ssd_rounded_to(dtype: torch.dtype, m: Any) -> Any:
    options = {"intermediate_dtype": dtype, "D": SKIP, "has_d": True, "d_has_hdim": False}
    return partial(m.ssd_reference_lowprecision_intermediates, **options)


@case(CUTLASS, SSD, "simple_gla", exact=partial(_ssd_rounded_to, torch.float64))
def ssd_in_bf16(m: Any) -> Program:
    """Inputs and results, scores, keys and states are rounded to bf16, as the kernel does it."""
    return _ssd_rounded_to(torch.bfloat16, m), _ssd()


@case(XLSTM, "xlstm/lstm.py", "simple_gla")
def xlstm_step(m: Any) -> Program:
    layer = m.mLSTM(WIDTH, H, K).eval()
    return layer, (normal(B, WIDTH), (normal(B, H, K, K), normal(B, H, K), normal(B, H)))


@case(RECURSIVE, KDA, "kda")
def kda_tokens(m: Any) -> Program:
    return m.naive_recurrent_kda, (*bthd(9), gates(B, 9, H, K), unit(B, 9, H))


@case(RECURSIVE, KDA, "kda")
def kda_chunks(m: Any) -> Program:
    fn = partial(m.naive_chunk_kda, chunk_size=8, output_final_state=True)
    return fn, (*bthd(16), gates(B, 16, H, K), unit(B, 16, H))


@case(BIDIRECTIONAL, "flash_bla/ops/simple_la/naive.py")
def not_causal(m: Any) -> Program:
    return m.naive_simple_la, bhtd(TOKENS)


@case(TAYLOR, "taylor_series_linear_attention/attention.py")
def taylor_not_causal(m: Any) -> Program:
    return m.TaylorSeriesLinearAttn(WIDTH, dim_head=4, heads=H), (normal(B, TOKENS, WIDTH),)


def _llm720(m: Any) -> tuple[Any, Tensor, Tensor]:
    sizes = {"kv_lora_rank": 8, "qk_rope_head_dim": ROPE, "v_head_dim": 10, "qk_nope_head_dim": 6}
    layer = m.MultiHeadedLatentAttention(WIDTH, 4, **sizes).eval()
    layer.post_weight_load()
    angles = torch.arange(32.0)[:, None] * torch.tensor([1.0, 0.1])
    return layer, angles.cos(), angles.sin()


@case(LLM720, "llm/models/attention.py", "mla")
def llm720_prompt(m: Any) -> Program:
    layer, cos, sin = _llm720(m)
    return layer, (normal(B, TOKENS, WIDTH), cos, sin, None, torch.arange(TOKENS).expand(B, -1))


@case(LLM720, "llm/models/attention.py")
def llm720_step(m: Any) -> Program:
    """One query under ``is_causal``, which sees the first cached token and no other."""
    layer, cos, sin = _llm720(m)
    past = normal(B, TOKENS, 8), normal(B, TOKENS, ROPE)
    return lambda *given: layer(*given, use_cache=True), (
        normal(B, 1, WIDTH),
        cos,
        sin,
        None,
        torch.full((B, 1), TOKENS),
        past,
    )


@case(
    PREFIX,
    "based/models/mixers/linear_attention.py",
    "linear_attention",
    only=("FeatureMap", "TaylorExp", "LinearAttention"),
)
def based_of_prefixes(m: Any) -> Program:
    """The layer's parallel form; the layer itself is made for a GPU."""
    itself = SimpleNamespace(
        parallel_implementation="quadratic",
        feature_map=m.TaylorExp(4),
        use_decay_proj=False,
        eps=1e-12,
        out_proj=torch.nn.Linear(H * V, WIDTH),
    )
    q, k, v = normal(B, H, TOKENS, 4), normal(B, H, TOKENS, 4), normal(B, H, TOKENS, V)
    return partial(m.LinearAttention.parallel_forward, itself), (normal(B, TOKENS, WIDTH), q, k, v)
