"""Models read for the first time on 2026-11-27: RWKV explained, Qwen3.5, mLSTM, Mamba-2, retention, delta rules."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.published.draw import B, H, K, V, bhtd, bthd, gates, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

EXPLAINED = Repository("SmerkyG/RWKV_Explained", "f58c873b7b30e7d8dac91776412b05752afb3a69")
PIP = Repository("Beortext/new_rwkv_pip", "363c0b9dcc997e9b0ad355b38860c59ebe16e52b")
QWEN = Repository("codespaceDrifter/qwen3.5_interp", "ee26b82a1f7bbd85a3148f4b3da6864e199e8b86")
NKOUM = Repository("Manuelnkegoum-8/xLSTM", "90b9e7e17c975ef980d3c29c308d9bb25822d445")
BLUEBAUM = Repository("LukasBluebaum/xLSTM-Triton-CUDA-Implementation", "18a924acc71132880fd7539691f56f501937c193")
PYXLSTM = Repository("muditbhargava66/PyxLSTM", "f3c9bb80ac62f1b19bf196ab9b8045f33e8f849a")
SCHAUPPI = Repository("schauppi/xLSTM", "7f482e820ecf543009d54ee89971a50148211956")
DOLOMITE = Repository("IBM/dolomite-engine", "d0ee186128e8b8dfff7c1f90390398fdabc75be7")
MEGATRON = Repository("tommasocerruti/linear-attention-architectures", "95ed7a440692b663af970a1fd5717135da33adc6")
FURIOUS = Repository("gmongaras/2Mamba2Furious", "7ad98b5dde9e729563fbabf82454b4fa3fdbc39f")
YINGRET = Repository("naidezhujimo/YingRet", "0ccbb2c7c716e8766a5b19ffd6b137f8e7c71f51")
KSTERX = Repository("ksterx/RetNet", "800dc46e823706846c81d6372f48fab5a9b36b81")
MYXYY = Repository("myxyy/RetNetReImpl", "b65871eff4021cb0b5ced1607aeb504aaa33e139")

TOKENS, WIDTH, HEADS = 10, 24, 3
HEAD = WIDTH // HEADS


os.environ.setdefault("RWKV_CUDA_ON", "0")  # read by a file where it is loaded


def drawn(module: nn.Module) -> nn.Module:
    """Parameters that their authors leave empty, or zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.eval()


# -- RWKV --------------------------------------------------------------------------------------------------------------


def _explained(m: Any, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    layer = drawn(m.TimeMixer(m.Config(d_model=WIDTH, n_heads=HEADS, **options), 0))
    return layer, (normal(B, TOKENS, WIDTH), normal(B, WIDTH), normal(B, HEADS, HEAD, HEAD))


@case(EXPLAINED, "rwkv5_2.py", "gla")
def explained_rwkv5(m: Any) -> Program:
    """Decays that no token changes, one a channel; the state is read before it is written, with a bonus."""
    return _explained(m)


@case(EXPLAINED, "rwkv6.py", "gla")
def explained_rwkv6(m: Any) -> Program:
    return _explained(m)


@case(EXPLAINED, "rwkv6.py", "gla")
def explained_rwkv6_step(m: Any) -> Program:
    layer, (x, *state) = _explained(m)
    return layer, (x[:, :1], *state)


@case(EXPLAINED, "rwkv7.py")
def explained_rwkv7(m: Any) -> Program:
    """What is erased and what is written have keys of their own."""
    layer, (x, shifted, state) = _explained(m, **{f"lora_rank_{n}": 8 for n in ("decay", "iclr", "gate")})
    return layer, (x, torch.zeros_like(x), shifted, state)


def _pip6(m: Any, tokens: tuple[int, ...]) -> Program:
    """One request, which has no dimension; products through a function for quantised weights."""
    m.matmul = lambda a, b, *_, output_dtype=None: a @ b
    mixes = [normal(WIDTH) for _ in range(6)]
    lora = (normal(WIDTH, 5 * 4), normal(5, 4, WIDTH), normal(WIDTH, 4), normal(4, WIDTH))
    weights = [normal(WIDTH, WIDTH) * 0.2 for _ in range(5)]
    run = m.RWKV_x060_TMix_seq if tokens else m.RWKV_x060_TMix_one
    given = (normal(WIDTH), normal(WIDTH), *mixes, *lora, normal(HEADS, HEAD, 1), normal(HEADS, HEAD, 1), *weights)

    def mix(x: Tensor, shifted: Tensor, state: Tensor, *rest: Tensor) -> Any:
        return run(x, shifted, state, *rest, *(None,) * 20)

    return mix, (normal(*tokens, WIDTH), normal(WIDTH), normal(HEADS, HEAD, HEAD), *given)


@case(PIP, "src/model_src/RWKV_v6.py", "gla")
def pip_rwkv6(m: Any) -> Program:
    return _pip6(m, (TOKENS,))


@case(PIP, "src/model_src/RWKV_v6.py", "gla")
def pip_rwkv6_step(m: Any) -> Program:
    return _pip6(m, ())


# -- the delta rule ----------------------------------------------------------------------------------------------------

QWEN_MODEL = "qwen3_5_4b_implementation/model.py"


def _qwen(m: Any) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_key_head_dim": K, "linear_value_head_dim": V, "rms_norm_eps": 1e-6}
    return m.Qwen3_5GatedDeltaNet(SimpleNamespace(**sizes), 0)


@case(QWEN, QWEN_MODEL, "gated_delta_rule")
def qwen_prompt(m: Any) -> Program:
    return _qwen(m), (normal(B, 70, WIDTH),)


@case(QWEN, QWEN_MODEL, "gated_delta_rule")
def qwen_padded_prompt(m: Any) -> Program:
    mask = torch.ones(B, TOKENS)
    mask[0, :4] = 0
    layer = _qwen(m)
    return lambda x, mask: layer(x, attention_mask=mask), (normal(B, TOKENS, WIDTH), mask)


class Held:
    """The part of the author's cache that one layer asks for."""

    def __init__(self, conv: Tensor, state: Tensor) -> None:
        self.conv_states, self.recurrent_states = [conv], [state]

    def has_previous_state(self, layer: int) -> bool:
        return True

    def update_conv_state(self, conv: Tensor, layer: int) -> None:
        self.conv_states[layer] = conv

    def update_recurrent_state(self, state: Tensor, layer: int) -> None:
        self.recurrent_states[layer] = state


def _qwen_cached(m: Any, tokens: int) -> Program:
    layer = _qwen(m)

    def run(x: Tensor, conv: Tensor, state: Tensor) -> Any:
        held = Held(conv, state)
        return layer(x, held), held.conv_states, held.recurrent_states

    return run, (normal(B, tokens, WIDTH), normal(B, 2 * 2 * K + 4 * V, 3), normal(B, 4, K, V))


@case(QWEN, QWEN_MODEL, "gated_delta_rule")
def qwen_step(m: Any) -> Program:
    return _qwen_cached(m, 1)


@case(QWEN, QWEN_MODEL, "gated_delta_rule")
def qwen_chunk(m: Any) -> Program:
    return _qwen_cached(m, 7)


def _ssm(name: str) -> str:
    return f"megatron/core/ssm/{name}_pytorch.py"


@case(MEGATRON, _ssm("delta_net"), "delta_rule", only=("torch_chunk_delta_rule", "l2norm"))
def megatron_delta_chunks(m: Any) -> Program:
    def run(*args: Tensor) -> Any:
        return m.torch_chunk_delta_rule(*args, chunk_size=8, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return run, (*bthd(20), unit(B, 20, H))


@case(MEGATRON, _ssm("linear_transformer"), "linear_attention", only=("torch_chunk_linear_transformer_rule",))
def megatron_additive_chunks(m: Any) -> Program:
    run = m.torch_chunk_linear_transformer_rule
    return lambda *args: run(*args, chunk_size=8, output_final_state=True), bthd(20)


@case(MEGATRON, _ssm("cler_delta_net"), "delta_rule", only=("torch_chunk_cler_delta_rule",))
def megatron_delta_residual(m: Any) -> Program:
    run = m.torch_chunk_cler_delta_rule
    return lambda *args: run(*args, chunk_size=8, output_final_state=True), (*bthd(20), unit(B, 20, H))


@case(MEGATRON, _ssm("gated_delta_net2"), only=("torch_recurrent_gated_delta_net2",))
def megatron_erase_and_write(m: Any) -> Program:
    """Gated DeltaNet 2: what is erased is weighted channel by channel, and what is written too."""
    return m.torch_recurrent_gated_delta_net2, (
        *bthd(6),
        gates(B, 6, H, K),
        unit(B, 6, H, K),
        unit(B, 6, H, V),
    )


@case(MEGATRON, _ssm("gated_delta_net2"), "kda", only=("torch_recurrent_gated_delta_net2",))
def megatron_erase_and_write_alike(m: Any) -> Program:
    """The same with one number for both is KDA."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
        return m.torch_recurrent_gated_delta_net2(q, k, v, g, beta[..., None], beta[..., None])

    return run, (*bthd(6), gates(B, 6, H, K), unit(B, 6, H))


# -- mLSTM -------------------------------------------------------------------------------------------------------------


@case(NKOUM, "models/mlstm.py", "simple_gla")
def nkoum_parallel(m: Any) -> Program:
    """The largest exponent of a row is taken without gradients; an eps is added behind the maximum."""
    return m.mLSTM_cell(WIDTH, HEADS), tuple(normal(B, TOKENS, WIDTH) for _ in range(3))


@case(BLUEBAUM, "mlstm_matmul.py", "simple_gla", only=("mlstm_matmul_pytorch",))
def bluebaum_parallel(m: Any) -> Program:
    return m.mlstm_matmul_pytorch, (*bhtd(TOKENS), normal(B, H, TOKENS), normal(B, H, TOKENS))


_SCAN = ("mlstm_scan_pytorch", "scan_op_python", "stabilization_scan_op_python")


@case(BLUEBAUM, "mlstm_scan.py", *("simple_gla",) * 4, only=_SCAN)
def bluebaum_scan(m: Any) -> Program:
    """Requests, heads and tokens one by one, as a scan over pairs, with the largest exponent so far."""
    q, k, v = (normal(1, 2, 6, K) for _ in range(3))
    return m.mlstm_scan_pytorch, (q, k, v, normal(1, 2, 6), normal(1, 2, 6), normal(1, 2, 6, K))


@case(PYXLSTM, "xLSTM/mlstm.py")
def pyxlstm_sequence(m: Any) -> Program:
    """Gates are made of the token's result before: no recurrence that is known beforehand."""
    return m.mLSTM(WIDTH, 8, 1).eval(), (normal(B, 5, WIDTH),)


@case(SCHAUPPI, "src/mLSTMCell.py", "linear_attention")
def schauppi_step(m: Any) -> Program:
    """The forget gate is one for every channel of the values: a step of what it has left of the state."""
    cell = m.mLSTMCell(WIDTH, 8)
    return lambda x, c, n, m: cell(x, (c, n, m)), (normal(B, WIDTH), normal(B, 8, 8), unit(B, 8), normal(B, 8))


# -- Mamba-2, linear attention, retention ------------------------------------------------------------------------------


DOLOMITE_MAMBA = "lm_engine/hf_models/modeling_utils/sequence_mixer_blocks/mamba2.py"
_MAMBA = ("Mamba2", "_reshape_into_chunks", "_pad_tensor_by_size", "_segment_sum")


class GatedNorm(nn.Module):
    """In the place of the library's own, which its other files make."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * F.silu(gate)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _dolomite(m: Any) -> Any:
    m.ParameterizedConv1d = lambda *args, std=None, **options: nn.Conv1d(*args, **options)
    m.ParameterizedLinear = lambda *args, std=None, **options: nn.Linear(*args, **options)
    m.get_activation_function, m.divide_if_divisible = lambda name: F.silu, lambda a, b, text: a // b
    m.get_normalization_function, m._get_std_for_linear = lambda *_, **__: GatedNorm(), lambda *_: 1.0
    m.mark_parameter_as_no_weight_decay = m.mark_parameter_as_mup_learning_rate = lambda parameter: parameter
    m._apply_mask_to_padding_states = lambda x, mask: x
    sizes = {"hidden_size": WIDTH, "ssm_state_size": K, "ssm_intermediate_size": 4 * V, "ssm_num_heads": 4}
    sizes |= {"conv_kernel_size": 4, "time_step_limit": (0.0, float("inf")), "num_groups": 1, "chunk_size": 8}
    rest = {"add_bias": False, "use_conv_bias": True, "ssm_activation_function": "silu", "layer_norm_epsilon": 1e-6}
    return m.Mamba2(
        **sizes, **rest, initializer_range=1, m_width=1, init_method="normal", num_layers=1, layer_idx=0
    ).eval()


@case(DOLOMITE, DOLOMITE_MAMBA, "simple_gla", only=_MAMBA)
def dolomite_prompt(m: Any) -> Program:
    return _dolomite(m)._torch_forward, (normal(B, 20, WIDTH),)


@case(DOLOMITE, DOLOMITE_MAMBA, "simple_gla", only=_MAMBA)
def dolomite_step(m: Any) -> Program:
    layer = _dolomite(m)

    def step(x: Tensor, conv: Tensor, state: Tensor) -> Any:
        held = {"conv_state": conv, "ssm_state": state}

        def update(**new: Any) -> None:
            held.update({name: value for name, value in new.items() if name in held})

        cache = SimpleNamespace(get_cache=lambda _: (held["conv_state"], held["ssm_state"]), update=update)
        return layer._torch_forward(x, cache), held

    return step, (normal(B, 1, WIDTH), normal(B, 4 * V + 2 * K, 4), normal(B, 4, V, K))


@case(FURIOUS, "grad_test.py", only=("forward_lin",))
def furious_masked_scores(m: Any) -> Program:
    """The mask is an argument: with another it is another function."""
    q, k, v = bhtd(TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return lambda q, k, v: m.forward_lin(q, k, v, mask), (q, k, v)


@case(FURIOUS, "grad_test.py", only=("forward_lin_sm_norm",))
def furious_weights_that_add_up(m: Any) -> Program:
    """The same, divided by the sum of each row without an eps."""
    q, k, v = bhtd(TOKENS)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return lambda q, k, v: m.forward_lin_sm_norm(q, k, v, mask), (q.abs(), k.abs(), v)


@case(YINGRET, "model.py", "retention", only=("Retention",))
def yingret_parallel(m: Any) -> Program:
    """Powers of learned decays with the distance's absolute value; the norm left out, which takes one length."""
    layer = m.Retention(WIDTH, HEADS)
    layer.group_norm = nn.Identity()
    return layer.forward_parallel, (normal(B, TOKENS, WIDTH), normal(B, TOKENS, WIDTH), normal(B, TOKENS, 2 * WIDTH))


@case(KSTERX, "retnet/modeling_retnet.py", only=("MultiScaleRetention",))
def ksterx_parallel(m: Any) -> Program:
    """Scores are divided by sums of their absolute values, which no state carries."""
    layer = SimpleNamespace(decay_proj=None, training=False)
    mask = (0.9 ** (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).clamp(min=0)).tril().expand(1, H, -1, -1)
    q, k, v = bhtd(TOKENS)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
        return m.MultiScaleRetention.parallel_retention(layer, q, k, v, (mask, mask[:, :, -1], None))[:2]

    return run, (q, k, v, mask.clone())


@case(KSTERX, "retnet/modeling_retnet.py", "simple_gla", only=("MultiScaleRetention",))
def ksterx_step(m: Any) -> Program:
    """The state is kept divided by a running scale; NaN are taken out of what is written."""
    q, k, v = bhtd(1)

    def step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, scale: Tensor) -> Any:
        past = {"prev_key_value": state, "scale": scale}
        return m.MultiScaleRetention.recurrent_retention(None, q, k, v, decay, past)

    return step, (q, k, v, unit(1, H, 1, 1), normal(B, H, V, K), unit(1, H, 1, 1) + 1)


@case(MYXYY, "src/retnet.py", only=("Retention",))
def myxyy_complex(m: Any) -> Program:
    """Decays are complex."""
    layer = m.Retention(WIDTH, 8, HEADS, torch.float32, out_weight=True)
    layer.is_refresh = False
    return layer, (normal(B, TOKENS, WIDTH),)
