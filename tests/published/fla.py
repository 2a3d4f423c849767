"""fla-org/flash-linear-attention: the naive references of its operators."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.published.draw import B, H, K, T, V, bhtd, bthd, gates, keys, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

FLA = Repository("fla-org/flash-linear-attention", "bc3b101dcb713ddc5bd8924b66754eb68b5ccf89")


@case(FLA, "fla/ops/kda/naive.py", "kda")
def kda_recurrent(m: Any) -> Program:
    q, k, v = bthd(9)
    state = normal(B, H, K, V)
    fn = partial(m.naive_recurrent_kda, output_final_state=True, initial_state=state)
    return fn, (q, k, v, gates(B, 9, H, K), unit(B, 9, H))


@case(FLA, "fla/ops/kda/naive.py", "kda")
def kda_chunk(m: Any) -> Program:
    q, k, v = bthd(32)
    fn = partial(m.naive_chunk_kda, chunk_size=16, output_final_state=True)
    return fn, (q, k, v, gates(B, 32, H, K), unit(B, 32, H))


@case(FLA, "fla/ops/gated_delta_rule/naive.py", "gated_delta_rule")
def gdn_recurrent(m: Any) -> Program:
    q, k, v = bthd(9)
    fn = partial(m.naive_recurrent_gated_delta_rule, output_final_state=True)
    return fn, (q, k, v, unit(B, 9, H), gates(B, 9, H))


@case(FLA, "fla/ops/gated_delta_rule/naive.py", "gated_delta_rule")
def gdn_chunk(m: Any) -> Program:
    fn = partial(m.naive_chunk_gated_delta_rule, chunk_size=16, output_final_state=True)
    return fn, (*bthd(40), gates(B, 40, H), unit(B, 40, H))


@case(FLA, "fla/ops/delta_rule/naive.py", "delta_rule")
def delta_recurrent(m: Any) -> Program:
    return m.delta_rule_recurrence, (*bhtd(9), unit(B, H, 9))


@case(FLA, "fla/ops/delta_rule/naive.py", "delta_rule")
def delta_chunk(m: Any) -> Program:
    return partial(m.delta_rule_chunkwise, chunk_size=16), (*bhtd(32), unit(B, H, 32))


@case(FLA, "fla/ops/delta_rule/naive.py", "delta_rule")
def delta_parallel(m: Any) -> Program:
    def output(*inputs: Any) -> Any:
        return m.delta_rule_parallel(*inputs, BM=16, BN=8)[0]

    return output, (*bhtd(32), unit(B, H, 32))


@case(FLA, "fla/ops/gla/naive.py", "gla")
def gla_recurrent(m: Any) -> Program:
    return partial(m.naive_recurrent_gla, output_final_state=True), (*bthd(9), gates(B, 9, H, K))


@case(FLA, "fla/ops/simple_gla/naive.py", "simple_gla")
def simple_gla_recurrent(m: Any) -> Program:
    return m.naive_recurrent_simple_gla, (*bthd(9), gates(B, 9, H))


@case(FLA, "fla/ops/simple_gla/naive.py", "simple_gla")
def simple_gla_chunk(m: Any) -> Program:
    return partial(m.naive_chunk_simple_gla, chunk_size=16), (*bthd(40), gates(B, 40, H))


@case(FLA, "fla/ops/simple_gla/naive.py", "simple_gla")
def simple_gla_parallel(m: Any) -> Program:
    def output(*inputs: Any) -> Any:
        return m.naive_parallel_simple_gla(*inputs)[0]

    return output, (*bthd(), gates(B, T, H))


@case(FLA, "fla/ops/retention/naive.py", "retention")
def retention(m: Any) -> Program:
    return m.naive_retention, bhtd()


@case(FLA, "fla/ops/linear_attn/naive.py", "linear_attention")
def linear_attention_recurrent(m: Any) -> Program:
    return partial(m.naive_recurrent_linear_attn, output_final_state=True), bthd(9)


@case(FLA, "fla/ops/linear_attn/naive.py", "linear_attention")
def linear_attention_chunk(m: Any) -> Program:
    return m.naive_chunk_linear_attn, bthd(128)


@case(FLA, "fla/ops/linear_attn/naive.py", "linear_attention")
def linear_attention_chunk_normalised(m: Any) -> Program:
    q, k, v = bthd(128)
    return partial(m.naive_chunk_linear_attn, normalize=True), (q.exp(), k.exp(), v)


@case(FLA, "fla/ops/rwkv6/recurrent_naive.py", "gla")
def rwkv6_recurrent(m: Any) -> Program:
    return m.naive_recurrent_rwkv6, (*bhtd(9), gates(B, H, 9, K), normal(H, K))


@case(FLA, "fla/ops/rwkv6/chunk_naive.py", "gla")
def rwkv6_chunk(m: Any) -> Program:
    return partial(m.naive_chunk_rwkv6, chunk_size=8), (*bhtd(32), gates(B, H, 32, K), normal(H, K))


@case(FLA, "fla/ops/gsa/naive.py", "gla")
def gsa_recurrent(m: Any) -> Program:
    """The second of its states. The first decays by columns of its values, which is no row of the family's table."""
    q, k, v = bthd(9)
    slots = 5
    return m.naive_recurrent_gsa, (q, k, v, normal(B, 9, H, slots), gates(B, 9, H, slots))


@case(FLA, "fla/ops/gated_delta_product/naive.py", "gated_delta_rule")
def gated_delta_product(m: Any) -> Program:
    n, tokens = 2, 6
    q, _, _ = bthd(tokens)
    _, k, v = bthd(n * tokens)
    g, beta = gates(B, tokens, H), unit(B, n * tokens, H)
    return partial(m.naive_recurrent_gated_delta_product, num_householder=n), (q, k, v, g, beta, K**-0.5, None)


@case(FLA, "fla/ops/generalized_delta_rule/dplr/naive.py", "kda")
def dplr_recurrent_tied(m: Any) -> Program:
    """RWKV-7's recurrence with one key for reading and writing is KDA."""

    def tied(q: Any, k: Any, v: Any, gk: Any, beta: Any) -> Any:
        return m.dplr_recurrence(q, k * beta[..., None], v, -k * gk.exp(), k * beta[..., None], gk)

    return tied, (*bhtd(9), gates(B, H, 9, K), unit(B, H, 9))


@case(FLA, "fla/ops/based/naive.py")
def based_parallel(m: Any) -> Program:
    return m.naive_parallel_based, bhtd()


@case(FLA, "fla/ops/rebased/naive.py")
def rebased_parallel(m: Any) -> Program:
    return m.naive_parallel_rebased, bhtd()


@case(FLA, "fla/ops/generalized_delta_rule/dplr/naive.py")
def dplr_recurrent(m: Any) -> Program:
    q, k, v = bhtd(9)
    return m.dplr_recurrence, (q, k, v, 0.3 * keys(B, H, 9, K), keys(B, H, 9, K), gates(B, H, 9, K))


@case(FLA, "fla/ops/generalized_delta_rule/iplr/naive.py")
def iplr_chunk(m: Any) -> Program:
    q, k, v = bhtd(32)
    fn = partial(m.iplr_chunkwise, chunk_size=16)
    return fn, (q, k, v, 0.3 * keys(B, H, 32, K), keys(B, H, 32, K))


@case(FLA, "fla/ops/comba/naive.py")
def comba_recurrent(m: Any) -> Program:
    q, k, v = bthd(9)
    return m.naive_recurrent_comba, (q, k, v, keys(B, 9, H, K), unit(B, 9, H), gates(B, 9, H))


@case(FLA, "fla/ops/gdn2/naive.py")
def gdn2_recurrent(m: Any) -> Program:
    q, k, v = bthd(9)
    return m.naive_recurrent_gdn2, (q, k, v, gates(B, 9, H, K), unit(B, 9, H, K), unit(B, 9, H, V))


@case(FLA, "fla/ops/mesa_net/naive.py")
def mesa_step(m: Any) -> Program:
    q, k, v, state = normal(B, H, K), keys(B, H, K), normal(B, H, K), normal(B, H, K, K)
    definite = state @ state.mT
    inputs = (q, k, v, gates(B, H), unit(H, K), unit(B, H), definite, state)
    return partial(m.naive_mesa_net_decoding_one_step, max_CG_iteration=4), inputs


@case(FLA, "fla/ops/forgetting_attn/naive.py")
def forgetting_attention(m: Any) -> Program:
    return m.naive_forgetting_attn, (*bthd(), gates(B, T, H))
