"""Models read for the first time on 2026-11-28: references of engines and trainers, Qwen3.5, retention, Mamba-2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.published.draw import B, H, K, V, bhtd, bthd, gates, keys, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

EXLLAMA = Repository("turboderp-org/exllamav3", "4f8ad0121f483ba66a5336244a4c3b6d7210385e")
SPEECH = Repository("just-ai/speechflow", "04c7ed1ca4699f0534e3f660faecddf0c7d79476")
WYF = Repository("wyf3/llm_related", "a492338499a9381f1714ecda8c802684e0556d3e")
INFCTX = Repository("RWKV/RWKV-infctx-trainer", "70d02c4997578a027d110e3acb03a523d3986448")
STOCK = Repository("xy200303/kda-mla-stock", "9e73586903d4f3b7afe2fdc6fda178c68c4ab42b", ("src",))
NANO = Repository("HKAB/nanoqwen35", "9a8222c549a878ef4b5d2730e9c4d9e662f59a39")
NANO_MOE = Repository("mergennachin/nano_qwen35_moe", "420db9f5a600673966039f30b3e5ac380fff4b86")
JJQK = Repository("jjqk/qwen3_5_9B-from-scratch", "9ca5b89831fb51f1235ab041664713eb60bd308b")
PROTEIN = Repository("ml-jku/Prot-xLSTM", "5aa8ddf609300044b9d263d437425f54fccd7237")
AVOCUDA = Repository("aramesh10/flashinfer-avocuda-gated-delta-net-decode", "d912e01dbed7827923bc6f97208f8bc7b167dab5")
LIGHTNING = Repository("xiefan46/lightning-attention-cuda", "9b466619c70da57e5ec18b14dd0bb25e2329e31c")
LM_ENGINE = Repository("open-lm-engine/lm-engine", "36bad91e0f59e5cfafd692f71b6cbcf3e13ff7ed")
PHI = Repository("goombalab/phi-mamba", "b2e405f74d1e2a56ffc4623cf3f4be68f7d6d79e")
GOOSE = Repository("dfytensor/transformers-rwkv7", "9d2e91c38e97d2f9168106c55952b83b3063e72a")
WEIGHTS = Repository("ischlag/fast-weight-transformers", "ebe13ea2e6409da91d12d22175f4f6efe8bf2f0a")

TOKENS, WIDTH = 12, 24


# -- the gated delta rule ----------------------------------------------------------------------------------------------

EXLLAMA_RULE = "exllamav3/modules/gated_delta_net_fn/gated_delta_rule.py"


def _exllama(m: Any, tokens: int) -> Program:
    """What is predicted is decayed after it was read; the buffer of outputs is a cast of itself."""
    run = m.torch_recurrent_gated_delta_rule
    inputs = (*bthd(tokens), gates(B, tokens, H), unit(B, tokens, H), normal(B, H, K, V))
    return lambda *given: run(*given, True, True), inputs


@case(EXLLAMA, EXLLAMA_RULE, "gated_delta_rule", only=("torch_recurrent_gated_delta_rule",))
def exllama_prompt(m: Any) -> Program:
    return _exllama(m, TOKENS)


@case(EXLLAMA, EXLLAMA_RULE, "gated_delta_rule", only=("torch_recurrent_gated_delta_rule",))
def exllama_step(m: Any) -> Program:
    return _exllama(m, 1)


@case(AVOCUDA, "solution/pytorch/kernel.py", "gated_delta_rule")
def avocuda_step(m: Any) -> Program:
    """Heads one by one, states with keys last; what is removed and what is written are two products."""
    rest = (normal(1, 8, 128, 128), normal(8), normal(1, 1, 8), normal(8), normal(1, 1, 8))
    inputs = (normal(1, 1, 4, 128), keys(1, 1, 4, 128), normal(1, 1, 8, 128), *rest)
    return lambda *given: m.run(*given, None), inputs


NANO_RULES = ("l2norm", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
NANO_PARTS = (*NANO_RULES, "Linear", "torch_causal_conv1d_update", "Qwen3_5RMSNormGated", "Qwen3_5GatedDeltaNet")


def _nano(m: Any) -> nn.Module:
    vars(m).update(COMPUTE_DTYPE=torch.float32, HAS_FLA=False, print0=lambda *_: None)
    sizes = {"emb_dim": WIDTH, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": K, "linear_value_head_dim": V, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    return m.Qwen3_5GatedDeltaNet(SimpleNamespace(**sizes), 0).eval()


@case(NANO, "nanoqwen35/qwen.py", "gated_delta_rule", only=NANO_RULES)
def nano_chunks(m: Any) -> Program:
    run, inputs = m.torch_chunk_gated_delta_rule, (*bthd(70), gates(B, 70, H), unit(B, 70, H))
    return lambda *given: run(*given, output_final_state=True, use_qk_l2norm_in_kernel=True), inputs


@case(NANO, "nanoqwen35/qwen.py", "gated_delta_rule", only=NANO_PARTS)
def nano_layer(m: Any) -> Program:
    return _nano(m), (normal(B, TOKENS, WIDTH),)


@case(NANO, "nanoqwen35/qwen.py", "gated_delta_rule", only=NANO_PARTS)
def nano_layer_step(m: Any) -> Program:
    """States in lists of a cache, one of which is overwritten, the other replaced."""
    layer = _nano(m)

    def step(x: Tensor, conv: Tensor, state: Tensor) -> Any:
        cache: Any = SimpleNamespace(
            linear_conv_states=[conv], linear_recurrent_states=[state], has_previous_state=True
        )
        return layer(x, cache=cache), cache.linear_conv_states, cache.linear_recurrent_states

    return step, (normal(B, 1, WIDTH), normal(B, 4 * K + 4 * V, 4), normal(B, 4, K, V))


@case(JJQK, "modules/linear_attention.py", "gated_delta_rule")
def jjqk_layer(m: Any) -> Program:
    return m.GatedDeltaNetAttention(WIDTH, 2, 4, K, V, 4, torch.float32).eval(), (normal(B, TOKENS, WIDTH),)


@case(NANO_MOE, "model.py", "simple_gla", only=("RMSNormGated", "GatedDeltaNet"))
def nano_moe_layer(m: Any) -> Program:
    """Called gated delta net, and written without a delta term."""
    sizes = {"n_embd": WIDTH, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": K, "linear_value_head_dim": V, "rms_norm_eps": 1e-6}
    return m.GatedDeltaNet(SimpleNamespace(**sizes)).eval(), (normal(B, TOKENS, WIDTH), torch.arange(TOKENS))


@case(WEIGHTS, "synthetic/linearAttention.py", only=("PrefixSumLinearAttentionModel",))
def fast_weights(m: Any) -> Program:
    """The delta rule; one query reads the last state, and no other is read."""
    vars(m)["check"] = lambda *_: None
    model = m.PrefixSumLinearAttentionModel(12, 8, 10, 9, "linear", "ours").eval()
    pairs = torch.stack([torch.randint(0, 9, (B, TOKENS)), torch.randint(10, 20, (B, TOKENS))], 1)
    return model, (pairs, torch.randint(0, 9, (B, 1)))


# -- KDA, RWKV ---------------------------------------------------------------------------------------------------------

STOCK_MODELS = "src/kda_mla_stock/models/kda_mla/"


def _stock(kind: Any, **options: Any) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": H, "head_dim": K, "kda_conv_kernel": 4, "kv_lora_rank": 16}
    sizes |= {"qk_nope_head_dim": K, "qk_rope_head_dim": 4, "value_head_dim": V, "rope_theta": 1e4, "dropout": 0.0}
    settings = {"attention_backend": "torch", "kda_gate_lower_bound": None, **options}
    return kind(SimpleNamespace(**sizes, **settings)).eval()


@case(STOCK, STOCK_MODELS + "kda.py", "kda")
def stock_kda(m: Any) -> Program:
    return _stock(m.KimiDeltaAttention), (normal(B, TOKENS, WIDTH),)


@case(STOCK, STOCK_MODELS + "kda.py", "kda")
def stock_kda_bounded_gate(m: Any) -> Program:
    return _stock(m.KimiDeltaAttention, kda_gate_lower_bound=-5.0), (normal(B, TOKENS, WIDTH),)


@case(STOCK, STOCK_MODELS + "kda.py", "kda")
def stock_kda_padding(m: Any) -> Program:
    """Where a token is padding the state before it is kept (``torch.where``)."""
    mask = torch.ones(B, TOKENS)
    mask[0, :3] = 0
    return _stock(m.KimiDeltaAttention), (normal(B, TOKENS, WIDTH), mask)


def _infctx(m: Any, tokens: int) -> Program:
    """Chunks of 8; decays are taken from the middle of a chunk."""
    inputs = (*bhtd(tokens), unit(B, H, tokens, K) * 0.5 + 0.5, normal(1, H, 1, K), normal(B, H, K, V))
    return lambda *given: m.rwkv_inner(*given, 8, 32), inputs


@case(INFCTX, "RWKV-v5/src/module/rwkv_inner.py", "gla")
def infctx_rwkv5(m: Any) -> Program:
    return _infctx(m, 16)


@case(INFCTX, "RWKV-v6/src/module/rwkv_inner.py", "gla")
def infctx_rwkv6_step(m: Any) -> Program:
    return _infctx(m, 1)


@case(GOOSE, "transformers_rwkv7/modeling_rwkv7.py", only=("rwkv7_wkv_headed",))
def goose_tokens(m: Any) -> Program:
    """What is erased and what is written have keys of their own."""
    r, w, k, v = (normal(B, TOKENS, H, K) for _ in range(4))
    erased, rate = keys(B, TOKENS, H, K), unit(B, TOKENS, H, K)
    return m.rwkv7_wkv_headed, (r, w, k, v, -erased, erased * rate, normal(B, H, K, K))


# -- retention, mLSTM, Mamba-2, linear attention -----------------------------------------------------------------------

RETENTIVE = "tts/acoustic_models/modules/common/gpts/layers/retentive.py"


@case(SPEECH, RETENTIVE, "retention")
def speech_parallel(m: Any) -> Program:
    """Distances above the diagonal are infinite."""
    return lambda *given: m.retention_parallel(*given)[0], bhtd(TOKENS)


@case(SPEECH, RETENTIVE, "retention")
def speech_chunk(m: Any) -> Program:
    return m.retention_chunkwise, (*bhtd(TOKENS), normal(B, H, K, V))


@case(SPEECH, RETENTIVE, "retention")
def speech_layer(m: Any) -> Program:
    x = normal(B, TOKENS, WIDTH)
    return m.MultiScaleRetention(WIDTH, H).eval(), (x, x.clone(), x.clone())


LIGHTNING_MODEL = "benchmarks/benchmark_triton_impl/model/lightning_attention_pytorch.py"


def _lightning(m: Any) -> Any:
    vars(m).update(BLOCK=8, do_eval=False)
    return m.MiniMaxText01LightningAttention(
        hidden_size=24, num_attention_heads=3, head_dim=8, hidden_act="silu"
    ).eval()


@case(LIGHTNING, LIGHTNING_MODEL, "retention")
def lightning_prompt(m: Any) -> Program:
    layer = _lightning(m)
    return lambda x, slopes: layer.inference(x, slope_rate=slopes), (normal(B, 20, 24), unit(3, 1, 1))


@case(LIGHTNING, LIGHTNING_MODEL, "retention")
def lightning_step(m: Any) -> Program:
    layer, inputs = _lightning(m), (normal(B, 1, 24), normal(B, 3, 8, 8), unit(3, 1, 1))
    return lambda x, state, slopes: layer.inference(x, past_key_value=state, slope_rate=slopes), inputs


@case(PROTEIN, "protxlstm/xlstm/blocks/mlstm/backends.py", "simple_gla")
def protein_parallel(m: Any) -> Program:
    inputs = (*(normal(B, H, TOKENS, K) for _ in range(3)), normal(B, H, TOKENS, 1), normal(B, H, TOKENS, 1) + 2)
    return m.parallel_stabilized_simple, inputs


@case(EXLLAMA, "exllamav3/modules/mamba2.py", "simple_gla", only=("torch_recurrent_mamba2",))
def exllama_mamba2(m: Any) -> Program:
    """Two groups of keys; one projection for values, keys and queries."""
    x, dt, g, d = normal(B, TOKENS, 4 * V + 4 * K), unit(B, TOKENS, 4), gates(B, TOKENS, 4), normal(4)
    return lambda *given: m.torch_recurrent_mamba2(*given, None, 2, 4, K, V), (x, dt, g, d)


ENGINE = "lm_engine/modeling_utils/sequence_mixer_blocks/"
ENGINE_PARTS = ("_pad_tensor_by_size", "_reshape_into_chunks", "_segment_sum")
ENGINE_SSD = (*ENGINE_PARTS, "_mamba2_recurrent_step_torch", "_mamba2_chunk_scan_torch")


@case(LM_ENGINE, ENGINE + "linear_attention/op.py", "linear_attention", only=("linear_attention_torch",))
def engine_linear(m: Any) -> Program:
    """A token reads the state before its own write, without a bonus."""
    vars(m)["divide_if_divisible"] = lambda a, b: a // b
    inputs = (normal(B, TOKENS, 4, K), normal(B, TOKENS, 2, K), normal(B, TOKENS, 4, V), normal(B, 4, K, V))
    return lambda *given: m.linear_attention_torch(*given, 0.3), inputs


@case(LM_ENGINE, ENGINE + "mamba2/op.py", "simple_gla", only=ENGINE_SSD)
def engine_chunks(m: Any) -> Program:
    """The length is no multiple of the chunk's."""
    vars(m)["ProcessGroupManager"] = SimpleNamespace(is_context_parallel_enabled=lambda: False)
    x, b, c = normal(B, 20, 4 * V), normal(B, 20, 2 * K), normal(B, 20, 2 * K)
    inputs = (x, -unit(4), b, c, normal(4), unit(B, 20, 4))
    return lambda *given: m._mamba2_chunk_scan_torch(*given, 8, 4, 2, V, K, 20), inputs


@case(LM_ENGINE, ENGINE + "mamba2/op.py", "simple_gla", only=ENGINE_SSD)
def engine_step(m: Any) -> Program:
    x, b, c = normal(B, 1, 4 * V), normal(B, 1, 2 * K), normal(B, 1, 2 * K)
    inputs = (x, -unit(4), b, c, normal(4), unit(B, 1, 4), normal(B, 4, V, K))
    return lambda *given: m._mamba2_recurrent_step_torch(*given, 4, 2, V, K), inputs


@case(PHI, "modules/mixers/discrete_mamba2_ref.py", "simple_gla")
def phi_ssd(m: Any) -> Program:
    inputs = (normal(B, 24, H, V), gates(B, 24, H), normal(B, 24, H, K), normal(B, 24, H, K), normal(B, H, V, K))
    return lambda x, a, b, c, state: m.ssd_minimal_discrete(x, a, b, c, 8, state), inputs


@case(PHI, "modules/mixers/discrete_mamba2_ref.py", "simple_gla")
def phi_step(m: Any) -> Program:
    """The decay is a sigmoid of minus the gate."""
    inputs = (normal(B, 4, V), normal(B, 2, K), normal(B, 2, K), normal(B, 4), normal(B, 4, V, K))
    return lambda x, b, c, gate, state: m.step(x, b, c, gate, {"ssm": state}), inputs


# -- latent attention --------------------------------------------------------------------------------------------------


@case(STOCK, STOCK_MODELS + "mla.py", "mla")
def stock_mla(m: Any) -> Program:
    return _stock(m.MultiHeadLatentAttention), (normal(B, TOKENS, WIDTH),)


WYF_PARTS = ("RMSNorm", "rotate_half", "apply_rotate_pos_emb", "RotaryEmbedding", "MLA")


def _wyf(m: Any, mode: str) -> Program:
    vars(m)["seqlen"] = TOKENS  # a global that its author had
    return m.MLA(32, 4, 12, 16, 8, 4, 8, 32, 4, mode).eval(), (normal(B, TOKENS, 32), 0)


@case(WYF, "deepseek_learn/MLA.py", "mla", only=WYF_PARTS)
def wyf_absorbed(m: Any) -> Program:
    """A weight of a biased projection is multiplied into both sides; the bias is not used."""
    return _wyf(m, "absorbed")


@case(WYF, "deepseek_learn/MLA.py", only=WYF_PARTS)
def wyf_biased_expansion(m: Any) -> Program:
    return _wyf(m, "naive")
