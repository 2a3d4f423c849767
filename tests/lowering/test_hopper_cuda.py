"""The Hopper kernels on a GPU: numbers, shapes, strides, causality, determinism, scratch, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.hopper import HopperKernels, schedule
from kdacompile.lowering.run import l2norm
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.verify import relative_error
from kdacompile.ops import semantics
from kdacompile.patterns.recurrence import token_recurrence

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

KERNELS = HopperKernels()
TOLERANCE = 5e-3  # the project's bound on the RMSE ratio with 16-bit inputs


def make_call(
    batch: int = 1,
    length: int = 300,
    heads: int = 2,
    group: int = 1,
    *,
    spread: float = 3.0,
    seed: int = 0,
    **other: Any,
) -> Call:
    """Random KDA with everything fused; ``spread`` is the standard deviation of the gate before its function."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    values = heads * group
    options: dict[str, Any] = {
        "initial_state": normal(batch, values, 128, 128), "A_log": 0.5 * normal(values), "sigmoid_beta": True,
        "dt_bias": normal(values, 128) - 2, "beta": normal(batch, length, values).bfloat16(), "gate_scale": -5.0,
    } | other  # fmt: skip
    return Call(
        q=normal(batch, length, heads, 128).bfloat16(), k=normal(batch, length, heads, 128).bfloat16(),
        v=normal(batch, length, values, 128).bfloat16(), g=(spread * normal(batch, length, values, 128)).bfloat16(),
        cu_seqlens=None, scale=128**-0.5, delta=True, gate="channel", gate_fn="sigmoid", qk_l2norm_eps=1e-6,
        chunk_size=0, out_dtype=torch.bfloat16, **options,
    )  # fmt: skip


def expect(call: Call) -> tuple[Tensor, Tensor]:
    """The fp64 token recurrence."""
    q, k, v, g, beta, state, A_log, dt_bias = (None if x is None else x.double() for x in call.tensors)
    assert q is not None and k is not None and v is not None and g is not None
    q, k = l2norm(q, call.qk_l2norm_eps), l2norm(k, call.qk_l2norm_eps)
    gates = semantics.log_gate(g, A_log, dt_bias, gate=call.gate, gate_fn=call.gate_fn, gate_scale=call.gate_scale)
    if beta is not None and call.sigmoid_beta:
        beta = beta.sigmoid()
    return token_recurrence(
        q,
        k,
        v,
        (gates if call.gate == "channel" else gates.unsqueeze(-1)).exp(),
        beta,
        state,
        delta=True,
        scale=call.scale,
    )


def check(call: Call) -> None:
    assert KERNELS.declines(call) is None
    scratch = Scratch(poison=True)
    o, state = KERNELS.run(call, scratch)
    expected_o, expected_state = expect(call)
    assert relative_error(o, expected_o) <= TOLERANCE
    assert relative_error(state, expected_state) <= TOLERANCE
    lanes = call.v.shape[0] * call.v.shape[2]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    assert scratch.allocated_bytes == schedule(lanes, call.v.shape[1], multiprocessors).scratch_bytes(lanes)


@pytest.mark.parametrize("length", [128, 129, 191, 320, 1000])
@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 1, 1), (2, 3, 2), (3, 32, 1)])
def test_shapes(batch: int, heads: int, group: int, length: int) -> None:
    check(make_call(batch, length, heads, group))


def test_what_may_be_absent() -> None:
    call = make_call()
    check(replace(call, initial_state=None))
    check(replace(call, A_log=None))
    check(replace(call, dt_bias=None))
    check(replace(call, beta=None))


def test_gates() -> None:
    for spread in (0.1, 30.0):
        check(make_call(spread=spread))
    strongest = make_call()
    strongest.g.fill_(100.0)  # pyright: ignore[reportOptionalMemberAccess]
    check(strongest)  # every gate at its lower bound
    for gate_scale in (-0.01, -5.25):
        check(make_call(gate_scale=gate_scale))


def scalar(call: Call, gate_fn: str = "softplus", scale: float = 3.0) -> Call:
    """The gated delta rule on a call's tensors; a log gate is given in fp32."""
    assert call.g is not None and call.dt_bias is not None
    g = scale * call.g[..., 0] / 3
    if gate_fn == "log":
        return replace(call, gate="token", gate_fn="log", g=-g.float().abs(), A_log=None, dt_bias=None)
    return replace(call, gate="token", gate_fn="softplus", g=g, dt_bias=call.dt_bias[:, 0])


@pytest.mark.parametrize("length", [128, 191, 1000])
@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 1, 1), (2, 3, 2), (1, 16, 2)])
def test_gated_delta_rule(batch: int, heads: int, group: int, length: int) -> None:
    call = make_call(batch, length, heads, group)
    check(scalar(call))
    check(scalar(call, "log"))


def test_gates_per_token() -> None:
    call = make_call()
    for scale in (0.01, 100.0):
        check(scalar(call, scale=scale))
        check(scalar(call, "log", scale=scale))
    strong = scalar(call, "log", scale=0.1)
    assert strong.g is not None
    check(replace(strong, g=strong.g.masked_fill(torch.rand_like(strong.g) < 0.15, -1000.0)))
    check(replace(strong, g=strong.g.masked_fill(torch.rand_like(strong.g) < 0.15, -torch.inf)))
    check(replace(scalar(call), A_log=None, beta=None))
    check(replace(scalar(call), dt_bias=None, initial_state=None))


def test_beta_as_given() -> None:
    check(make_call(beta=torch.rand(1, 300, 2, device="cuda"), sigmoid_beta=False))


def test_long() -> None:
    check(make_call(length=8192, heads=2, spread=1.0))


def test_runs_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdacompile.lowering.hopper.run.SCRATCH_LIMIT", 2**20)
    check(make_call(length=1000))


def test_strides() -> None:
    call = make_call(2, 260, 3)
    packed = torch.randn(2, 260, 3, 384, device="cuda").bfloat16()
    check(replace(call, q=packed[..., :128], k=packed[..., 128:256], v=packed[..., 256:]))
    unaligned = torch.randn(2, 260, 3, 131, device="cuda").bfloat16()
    check(replace(call, q=unaligned[..., 3:], k=unaligned[..., :128]))
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (call.q, call.k, call.v, call.g)]  # pyright: ignore[reportOptionalMemberAccess]
    check(replace(call, **dict(zip("qkvg", heads_first, strict=True))))


@pytest.mark.parametrize("gate", ["channel", "token"])
def test_causal_bit_for_bit(gate: str) -> None:
    call, other = make_call(length=640, spread=8.0), make_call(length=640, spread=8.0, seed=1)
    if gate == "token":
        call, other = scalar(call), scalar(other)
    o, _ = KERNELS.run(call)
    for cut in (1, 37, 64, 100, 333):
        mixed = {
            name: torch.cat([getattr(call, name)[:, :cut], getattr(other, name)[:, cut:]], 1)
            for name in ("q", "k", "v", "g", "beta")
        }
        changed, _ = KERNELS.run(replace(call, **mixed))
        assert torch.equal(changed[:, :cut], o[:, :cut])
        assert not torch.equal(changed[:, cut:], o[:, cut:])


@pytest.mark.parametrize("gate", ["channel", "token"])
def test_deterministic_and_capturable(gate: str) -> None:
    call = make_call(length=2048, heads=8)
    call = scalar(call) if gate == "token" else call
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, state = KERNELS.run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again, state_again = KERNELS.run(call)
    for _ in range(3):
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, again) and torch.equal(state, state_again)
