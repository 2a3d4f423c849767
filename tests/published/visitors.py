"""Models read for the first time on 2026-11-28: RWKV-5 and 6 for one request, RetNet's forms in four manners."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.published.draw import B, K, V, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

VISUAL = Repository("howard-hou/VisualRWKV", "8e1becc44d0ef22270490282a1bb0153a79e521a")
XATL = Repository("syncdoth/RetNet-XATL", "a96412fea96c53b9cdba03fb5d93e366074f6c85")
LRA = Repository("DFNaiff/lra-benchmarks-retnet", "f95ad47a7dbd6d4363fa499ea2dee9a4d424adaf")
ACCESSIBLE = Repository("Vijay190899/accessible-retnet", "0ac8a25a3cdf5d2a2c9b9a61e0f5e79a4b79148a")

TOKENS, WIDTH, HEADS = 12, 24, 3
HEAD = WIDTH // HEADS

for jit in ("RWKV_JIT_ON", "RWKV_CUDA_ON"):
    os.environ.setdefault(jit, "0")  # read by a file where it is loaded


# -- RWKV: one request, which has no dimension -------------------------------------------------------------------------

VISUAL_MODEL = "VisualRWKV-v6/v6.21/app/modeling_rwkv.py"


def _visual(m: Any, method: str, tokens: int, mixes: tuple[Tensor, ...], decays: tuple[Tensor, ...]) -> Program:
    """A method of the author's, which reads nothing of its object; its products are of quantised weights."""
    vars(m)["matmul"] = lambda a, b, *_, output_dtype=None: a @ b
    x = normal(tokens, WIDTH) if tokens else normal(WIDTH)
    norms = torch.ones(WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH), torch.zeros(WIDTH)
    weights = [normal(WIDTH, WIDTH) * 0.2 for _ in range(4 if method.endswith("v5") else 5)]
    given = (x, normal(WIDTH), normal(HEADS, HEAD, HEAD), *norms, *mixes, *decays, *weights)
    run, scales = getattr(m.RWKV, method), (None,) * (4 * len(weights))
    return lambda *given: run(None, *given, *scales), given


def _visual5(m: Any, method: str, mixes: int, channels: int, tokens: int = TOKENS) -> Program:
    decays = unit(HEADS, channels, 1), normal(HEADS, channels, 1)
    return _visual(m, method, tokens, tuple(unit(WIDTH) for _ in range(mixes)), decays)


def _visual6(m: Any, method: str, tokens: int) -> Program:
    mixes = (*(unit(WIDTH) for _ in range(6)), normal(WIDTH, 20) * 0.3, normal(5, 4, WIDTH) * 0.3)
    low = normal(WIDTH, 4) * 0.3, normal(4, WIDTH) * 0.3
    return _visual(m, method, tokens, (*mixes, *low), (normal(HEADS, HEAD, 1), normal(HEADS, HEAD, 1)))


@case(VISUAL, VISUAL_MODEL, "simple_gla")
def visual_rwkv5(m: Any) -> Program:
    """A table of powers by padding, tiles and slices, with the bonus on its diagonal; a state enters and leaves."""
    return _visual5(m, "att_seq_v5", 3, 1)


@case(VISUAL, VISUAL_MODEL, "simple_gla")
def visual_rwkv5_step(m: Any) -> Program:
    return _visual5(m, "att_one_v5", 3, 1, 0)


@case(VISUAL, VISUAL_MODEL, "simple_gla")
def visual_rwkv5_gated(m: Any) -> Program:
    return _visual5(m, "att_seq_v5_1", 4, 1)


@case(VISUAL, VISUAL_MODEL, "gla")
def visual_rwkv5_channels(m: Any) -> Program:
    return _visual5(m, "att_seq_v5_2", 4, HEAD)


@case(VISUAL, VISUAL_MODEL, "gla")
def visual_rwkv6(m: Any) -> Program:
    return _visual6(m, "att_seq_v6_0", TOKENS)


@case(VISUAL, VISUAL_MODEL, "gla")
def visual_rwkv6_step(m: Any) -> Program:
    return _visual6(m, "att_one_v6_0", 0)


# -- retention ---------------------------------------------------------------------------------------------------------

XATL_PARTS = ("split_heads", "rotate_every_two", "theta_shift", "get_activation_fn", "RMSNorm", "RetNetRelPos")


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *_: bool) -> Tensor:
    """In the place of a library's kernel: neighbouring channels turn together."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


def _xatl(m: Any, form: str, length: int, stable: bool = False) -> Any:
    for fused in ("parallel", "recurrent", "chunk"):
        vars(m)[f"fused_{fused}_retention"] = None
    vars(m)["apply_rotary_emb_func"] = _turned
    config = SimpleNamespace(
        decoder_retention_heads=HEADS,
        decoder_embed_dim=WIDTH,
        decoder_value_embed_dim=HEADS * V,
        rotary_percentage=1.0,
        use_lm_decay=False,
        recurrent_chunk_size=4,
        retnet_stability_update=stable,
        retnet_bottleneck=None,
        groupnorm_affine=True,
        use_rms_norm=True,
        layernorm_eps=1e-5,
    )
    layer, positions = m.MultiScaleRetention(config), m.RetNetRelPos(config)

    def run(x: Tensor, *past: Tensor) -> Any:
        kept = dict(zip(("prev_key_value", "scale"), past, strict=False)) or None
        return layer(x, positions(length, forward_impl=form), forward_impl=form, past_key_value=kept)

    return run


@case(XATL, "hf_retnet/modeling_retnet.py", "retention", only=(*XATL_PARTS, "MultiScaleRetention"))
def xatl_parallel(m: Any) -> Program:
    return _xatl(m, "parallel", TOKENS), (normal(B, TOKENS, WIDTH),)


@case(XATL, "hf_retnet/modeling_retnet.py", "retention", only=(*XATL_PARTS, "MultiScaleRetention"))
def xatl_step(m: Any) -> Program:
    return _xatl(m, "recurrent", TOKENS + 1), (normal(B, 1, WIDTH), normal(B, HEADS, V, HEAD), unit(1, HEADS, 1, 1))


@case(XATL, "hf_retnet/modeling_retnet.py", only=(*XATL_PARTS, "MultiScaleRetention"))
def xatl_magnitudes(m: Any) -> Program:
    """Scores are divided by sums of their magnitudes, which no state has."""
    return _xatl(m, "parallel", TOKENS, stable=True), (normal(B, TOKENS, WIDTH),)


@case(XATL, "lit_gpt/model.py", "retention", only=("parallel_retention", "build_retention_mask_cache"))
def xatl_decays_between(m: Any) -> Program:
    """The heads' decays lie between two tensors, made by ``linspace``."""
    vars(m)["fused_parallel_retention"] = None
    config = SimpleNamespace(head_size=K, n_head=HEADS, use_lm_decay=True)
    layer = SimpleNamespace(config=config)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = m.build_retention_mask_cache(config, q.shape[2], None, torch.float32)
        return m.parallel_retention(layer, q, k, v, mask)

    return run, tuple(normal(B, HEADS, TOKENS, K) for _ in range(3))


@case(LRA, "retnet.py", "retention")
def lra_parallel(m: Any) -> Program:
    return m.MSRBlock(WIDTH, HEADS, True), (normal(B, TOKENS, WIDTH),)


@case(LRA, "retnet.py", "retention")
def lra_step(m: Any) -> Program:
    layer = m.MSRBlock(WIDTH, HEADS, True)
    given = normal(B, WIDTH), normal(B, HEADS, HEAD, HEAD)
    return lambda x, state: layer.recurrent_retention_step(x, state, 5)[:2], given


def _accessible(m: Any) -> nn.Module:
    config = m.RetNetConfig()
    config.d_model, config.n_heads, config.d_head_qk, config.d_head_v, config.max_seq_len = WIDTH, HEADS, K, V, 32
    config.gammas = config.gammas[:HEADS]
    return m.MultiScaleRetention(config)


@case(ACCESSIBLE, "retnet_model.py", *("retention",) * 3)
def accessible_step(m: Any) -> Program:
    """Heads one by one, each with a state of its own."""
    return _accessible(m), (normal(B, 1, WIDTH), [normal(B, K, V) for _ in range(HEADS)], 7)


@case(ACCESSIBLE, "retnet_model.py", "retention")
def accessible_parallel(m: Any) -> Program:
    """The table of decays is a buffer, divided by the roots of its row sums when the module is made."""
    return _accessible(m), (normal(B, TOKENS, WIDTH),)
