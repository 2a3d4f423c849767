"""References that kernels are tested against: AMD, FlashMLA, Ascend, ThunderKittens, Bi-Mamba2, a contest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.published.draw import B, H, K, V, bthd, gates, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

AITER = Repository("ROCm/aiter", "e4048607a535ace3a2b51ded31b1c8c2d45c0879")
FLASHMLA = Repository("deepseek-ai/FlashMLA", "9241ae3ef9bac614dd25e45e507e089f888280e0")
NPU = Repository("flashserve/flash-linear-attention-npu", "17e24fddc6afa399f47026739984dfc11831424d")
KITTENS = Repository("HazyResearch/ThunderKittens", "0b55588d2769dde0c7a9a606ffc015b0ca7a9551")
BIMAMBA = Repository("Hprairie/Bi-Mamba2", "08b3cd3cf6d60ee2f4e712f6efecebe86ec15f92", roots=("src",))
CONTEST = Repository("KuangjuX/gated-delta-network", "a916a663c9cb1f2eb155374ad7ee692392c1e0f9")

TOKENS, RANK, ROPE, HEADS = 40, 16, 8, 4
AITER_DELTA, AITER_PREPARE, AITER_MLA = (
    f"op_tests/test_{name}.py" for name in ("gated_delta_rule", "gdn_prepare", "mla")
)
NPU_GOLDEN = "fla/ops/ascendc/gdn/recurrent_gdn/recurrent_gated_delta_rule/tests/pta/golden.py"
NPU_EXAMPLE = "examples/flash_gated_delta_rule.py"


def _delta(tokens: int = TOKENS) -> tuple[Tensor, ...]:
    """q, k, v, beta and log gates."""
    return *bthd(tokens), unit(B, tokens, H), gates(B, tokens, H)


@case(AITER, AITER_DELTA, "gated_delta_rule", only=("recurrent_gated_delta_rule_ref",))
def aiter_tokens(m: Any) -> Program:
    run = m.recurrent_gated_delta_rule_ref
    return lambda *args: run(*args[:5], initial_state=args[5], output_final_state=True), (*_delta(), normal(B, H, K, V))


@case(AITER, AITER_DELTA, "gated_delta_rule", only=("chunk_gated_delta_rule_ref",))
def aiter_chunks(m: Any) -> Program:
    """The length is no multiple of the chunk's."""
    q, k, v, beta, g = _delta()
    return lambda *args: m.chunk_gated_delta_rule_ref(*args, chunk_size=16, output_final_state=True), (q, k, v, g, beta)


@case(AITER, AITER_PREPARE, "gated_delta_rule", only=("_run_torch_recurrent",))
def aiter_grouped_tokens(m: Any) -> Program:
    """Two value heads a key head, and a state that is kept transposed."""
    q, k, _, _, _ = _delta(12)
    wide = (normal(B, 12, 2 * H, V), gates(B, 12, 2 * H), unit(B, 12, 2 * H), normal(B, 2 * H, V, K))
    return lambda q, k, *rest: m._run_torch_recurrent(q, k, *rest, K**-0.5), (q, k, *wide)


@case(AITER, AITER_PREPARE, *("gated_delta_rule",) * 2, only=("_run_torch_recurrent", "run_torch_gdn_pipeline"))
def aiter_packed_tokens(m: Any) -> Program:
    """Sequences behind each other, each with its own state."""
    from types import SimpleNamespace

    shape = SimpleNamespace(k=K, seq_lens=(5, 7), active_seq_lens=(5, 7))
    names = ("q", "k", "v", "g", "beta", "initial_state")

    def run(*args: Tensor) -> Any:
        return m.run_torch_gdn_pipeline(dict(zip(names, args, strict=True)), shape)

    q, k, v = (normal(1, 12, H, size) for size in (K, K, V))
    return run, (q, torch.nn.functional.normalize(k, dim=-1), v, gates(1, 12, H), unit(1, 12, H), normal(2, H, V, K))


def _aiter_mla(m: Any, queries: int) -> Program:
    """Requests of a pool, of several lengths; lse beside o."""
    pool, chosen = normal(64, 1, RANK + ROPE), torch.randperm(64)[:21]
    q = normal(2 * queries, HEADS, RANK + ROPE)
    starts, kept = torch.tensor([0, queries, 2 * queries]), torch.tensor([0, 9, 21])

    def run(q: Tensor, pool: Tensor, starts: Tensor, kept: Tensor, chosen: Tensor) -> Any:
        return m.torch_mla_extend(q, pool, starts, kept, chosen, 0.2, RANK, ROPE, torch.float32)

    return run, (q, pool, starts, kept, chosen)


_AITER_MLA = ("ref_masked_attention", "torch_mla_extend")


@case(AITER, AITER_MLA, "mla", "mla", only=_AITER_MLA)
def aiter_requests_step(m: Any) -> Program:
    """Lengths are read from tensors (``tolist``)."""
    return _aiter_mla(m, 1)


@case(AITER, AITER_MLA, "mla", "mla", only=_AITER_MLA)
def aiter_requests_chunk(m: Any) -> Program:
    return _aiter_mla(m, 4)


def _flashmla(m: Any, queries: int) -> Program:
    """Pages of a pool; rows that see nothing are filled, and NaN of unused places taken out."""
    vars(m)["kk"] = type("kk", (), {"cdiv": staticmethod(lambda a, b: -(-a // b))})
    pool, lengths = normal(8, 4, 1, RANK + ROPE), torch.tensor([9, 12], dtype=torch.int32)
    table = torch.randperm(8)[:6].view(2, 3)
    return lambda *args: m.reference_torch(*args, RANK, True), (
        lengths,
        table,
        normal(2, queries, HEADS, RANK + ROPE),
        pool,
    )


@case(FLASHMLA, "tests/test_flash_mla_dense_decoding.py", "mla", "mla", only=("reference_torch",))
def flashmla_step(m: Any) -> Program:
    return _flashmla(m, 1)


@case(FLASHMLA, "tests/test_flash_mla_dense_decoding.py", "mla", "mla", only=("reference_torch",))
def flashmla_chunk(m: Any) -> Program:
    return _flashmla(m, 3)


@case(NPU, NPU_EXAMPLE, "gated_delta_rule", only=("_naive_recurrent_gated_delta_rule_cpu",))
def npu_tokens(m: Any) -> Program:
    return lambda *args: m._naive_recurrent_gated_delta_rule_cpu(*args, scale=K**-0.5), _delta()


@case(NPU, NPU_GOLDEN, *("gated_delta_rule",) * 2, only=("recurrent_gated_delta_rule_golden",))
def npu_requests(m: Any) -> Program:
    """Requests and heads one by one over a pool of states, one a token, whose places are read from tensors."""
    total = 7
    q, k, v = (normal(total, 1, K), torch.nn.functional.normalize(normal(total, 1, K), dim=-1), normal(total, 2, V))
    rest = (normal(total, 2, V, K), unit(total, 2), torch.tensor([0, 3, 4]), torch.arange(total), gates(total, 2))

    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor, beta: Tensor, ends: Tensor, at: Tensor, g: Tensor) -> Any:
        return m.recurrent_gated_delta_rule_golden(q, k, v, state, beta, 0.3, ends, at, g=g)

    return run, (q, k, v, *rest)


@case(KITTENS, "kernels/linear_attention/gentests.py", "retention", only=("get_mask", "get_full_mask", "linear_attn"))
def kittens_lightning(m: Any) -> Program:
    """Slopes by ``.item()``, a mask written row by row."""
    q, k, v = (normal(B, H, 16, size) for size in (K, K, V))
    return m.linear_attn, (q, k, v, torch.rand(H))


@case(KITTENS, "kernels/mamba2/baselines/ssd_minimal.py", "simple_gla", only=("segsum", "ssd_minimal_discrete"))
def kittens_ssd(m: Any) -> Program:
    x, a = normal(B, 32, H, V), gates(B, 32, H)
    return lambda *args: m.ssd_minimal_discrete(*args, 8), (x, a, normal(B, 32, H, K), normal(B, 32, H, K))


@case(KITTENS, "kernels/based/gentests.py", "linear_attention", only=("pytorch_test",))
def kittens_based(m: Any) -> Program:
    """Terms of a series; the first is linear attention, the second takes squares of scores."""
    q, k, v = (normal(1, 2, 12, size) for size in (4, 4, 6))
    return m.pytorch_test, (q, k, v)


BIMAMBA_SSD = "src/ssd/uni/ssd_combined.py"


@case(BIMAMBA, BIMAMBA_SSD, "simple_gla")
def bimamba_reference(m: Any) -> Program:
    x, dt, a = normal(B, 32, H, V), normal(B, 32, H), -unit(H)
    rest = (normal(B, 32, 1, K), normal(B, 32, 1, K), normal(H), normal(H))

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor) -> Any:
        return m.ssd_chunk_scan_combined_ref(x, dt, a, b, c, 8, D=d, dt_bias=bias, dt_softplus=True)

    return run, (x, dt, a, *rest)


def _contest(tokens: tuple[int, ...]) -> tuple[Tensor, ...]:
    q, k = normal(*tokens, 4, 128), torch.nn.functional.normalize(normal(*tokens, 4, 128), dim=-1)
    return q, k, normal(*tokens, 8, 128)


@case(CONTEST, "reference/gdn_decode_ref.py", "gated_delta_rule")
def contest_step(m: Any) -> Program:
    """Requests and heads one by one; what is removed and what is written are two products. One op for all heads."""
    rest = (normal(1, 8, 128, 128), normal(8), normal(1, 1, 8), normal(8), normal(1, 1, 8))
    return lambda *args: m.run(*args, None), (*_contest((1, 1)), *rest)


@case(CONTEST, "reference/gdn_prefill_ref.py", "gated_delta_rule", "gated_delta_rule")
def contest_prompt(m: Any) -> Program:
    """Sequences whose bounds are read by ``.item()``."""
    rest = (normal(2, 8, 128, 128), normal(8), normal(5, 8), normal(8), normal(5, 8), torch.tensor([0, 2, 5]))
    return lambda *args: m.run(*args, None), (*_contest((5,)), *rest)
