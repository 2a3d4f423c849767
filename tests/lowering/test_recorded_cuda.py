"""Remembered calls on a GPU: the same bits as calls that nothing is remembered of, wherever they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.cuda import choose, choose_attention
from kdacompile.ops.dispatch import Shortcut
from kdacompile.ops.fused import FusedAttention, FusedKernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Outputs = tuple[Tensor, ...]
KDA: dict[str, Any] = {
    "scale": 128**-0.5, "delta": True, "gate": "channel", "gate_fn": "sigmoid", "gate_scale": -5.0,
    "sigmoid_beta": True, "qk_l2norm_eps": 1e-6, "out_dtype": None,
}  # fmt: skip


class Op:
    """An op's kernels twice, one of which remembers, and inputs for them by a seed."""

    def __init__(self, kernels: Callable[..., Any], method: str, options: dict[str, Any]) -> None:
        self.remembering = getattr(kernels(remember=True), method)
        self.plain = getattr(kernels(), method)
        self.options = options

    def same(self, operands: Callable[[int], list[Tensor | None]], seeds: range = range(4)) -> None:
        for seed in seeds:
            want = self.run(self.plain, operands(seed))
            have = self.run(self.remembering, operands(seed))
            assert all(same_bits(x, y) for x, y in zip(have, want, strict=True)), seed

    def run(self, kernel: Callable[..., Any], operands: list[Tensor | None]) -> Outputs:
        out = kernel(*operands, **self.options)
        return (*(out if isinstance(out, tuple) else (out,)), *(x for x in operands if x is not None))


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def linear(method: str, **options: Any) -> Op:
    return Op(lambda **given: FusedKernels(choose, **given), method, KDA | options)


def attention(**options: Any) -> Op:
    given: dict[str, Any] = {"scale": 192**-0.5, "causal": True, "form": "auto", "out_dtype": None}
    return Op(lambda **remember: FusedAttention(choose_attention, **remember), "attention", given | options)


def tokens(seed: int, batch: int = 2, length: int = 1, heads: int = 4, state: bool = True) -> list[Tensor | None]:
    """q, k, v, g, beta, the state, A_log and dt_bias."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    rows = [normal(batch, length, heads, 128).bfloat16() for _ in range(4)]
    states = normal(batch, heads, 128, 128) if state else None
    return [*rows, normal(batch, length, heads).bfloat16(), states, normal(heads), normal(heads, 128)]


def latents(seed: int, *, page: int = 0, heads: int = 64, weights: bool = True, batch: int = 3) -> list[Tensor | None]:
    """q, q_rope, latent, k_rope, w_uk, w_uv, mask, sinks, lengths, block_table; 256 tokens a request."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    q = normal(batch, 1, heads, (128 if weights else 512) + 64)
    cache = normal(batch * 256 // page, page, 576) if page else normal(batch, 256, 576)
    pages = torch.randperm(batch * 256 // page, generator=generator, device="cuda") if page else None
    lengths = torch.randint(1, 257, (batch,), generator=generator, device="cuda", dtype=torch.int32)
    w = [normal(heads, 128, 512) / 11 if weights else None for _ in range(2)]
    table = None if pages is None else pages.view(batch, -1).int()
    return [q[..., :-64], q[..., -64:], cache[..., :512], cache[..., 512:], *w, None, normal(heads), lengths, table]


def test_steps() -> None:
    for method in ("step", "inplace_step"):
        for gate_fn in ("sigmoid", "softplus"):
            linear(method, gate_fn=gate_fn).same(tokens)


@pytest.mark.parametrize(("length", "heads"), [(40, 4), (200, 4), (2048, 32), (4096, 1)])
def test_sequences(length: int, heads: int) -> None:
    op = linear("sequence", chunk_size=0)
    op.same(lambda seed: [*tokens(seed, 1, length, heads, state=False), None])
    bounds = torch.tensor([0, 7, length], device="cuda")
    op.same(lambda seed: [*tokens(seed, 1, length, heads, state=False), bounds])


@pytest.mark.parametrize("page", [0, 64, 16])
@pytest.mark.parametrize(("heads", "weights"), [(64, True), (64, False), (8, True)])
def test_latents(page: int, heads: int, weights: bool) -> None:
    attention().same(lambda seed: latents(seed, page=page, heads=heads, weights=weights))


def test_operands_that_are_copied_first() -> None:
    """One length for all requests, parameters in steps, rows that the copy engine cannot address."""

    def one_length(seed: int) -> list[Tensor | None]:
        operands = latents(seed)
        lengths = operands[8]
        assert lengths is not None
        return [*operands[:8], lengths[:1].expand(3), None]

    def in_steps(seed: int) -> list[Tensor | None]:
        *others, A_log, dt_bias = tokens(seed, 1, 200, state=False)
        assert A_log is not None and dt_bias is not None
        return [*others, torch.stack([A_log, A_log], 1)[:, 0], dt_bias.mT.contiguous().mT, None]

    attention().same(one_length)
    linear("sequence", chunk_size=0).same(in_steps)


def test_addresses_that_are_not_aligned() -> None:
    """The same shapes and strides, elsewhere: other kernels, and back."""

    def shifted(seed: int) -> list[Tensor | None]:
        operands = tokens(seed)
        if seed % 2:
            q = operands[0]
            assert q is not None
            operands[0] = torch.cat([q.new_zeros(1), q.flatten()])[1:].view_as(q)
        return operands

    linear("step").same(shifted, range(6))


def test_a_state_that_an_input_shares() -> None:
    """Remembered for a state of its own; with v in the state's memory everything is read before it is written."""
    op = linear("inplace_step")
    op.same(tokens)

    def shared(seed: int) -> list[Tensor | None]:
        operands = tokens(seed)
        state = operands[5]
        assert state is not None
        state.copy_(state.bfloat16())  # its halves are finite numbers
        operands[2] = state.view(torch.bfloat16).flatten()[:1024].view(2, 1, 4, 128)
        return operands

    op.same(shared)


def test_streams_and_graphs() -> None:
    for op, operands in ((linear("inplace_step"), tokens), (attention(), latents)):
        op.same(operands)
        given = operands(7)
        want = op.run(op.plain, operands(7))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            beside = op.run(op.remembering, operands(7))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op.remembering(*given, **op.options)
        for x, fresh in zip(given, operands(7), strict=True):
            if x is not None and fresh is not None:
                x.copy_(fresh)
        graph.replay()
        replayed = (*(captured if isinstance(captured, tuple) else (captured,)), *(x for x in given if x is not None))
        for have in (beside, replayed):
            assert all(same_bits(x, y) for x, y in zip(have, want, strict=True))


def test_nothing_is_waited_for() -> None:
    for op, operands in ((linear("inplace_step"), tokens), (attention(), latents)):
        given = operands(0)
        op.same(operands, range(2))
        torch.cuda.set_sync_debug_mode("error")
        try:
            op.remembering(*given, **op.options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_step", "linear_attention_step_", "mla"])
def test_calls_known_by_one_look(name: str) -> None:
    """The ops themselves, on a stream of their own as well: after the first call nothing is chosen."""
    step, seeds = name.startswith("linear_attention_step"), range(3)
    method = {"linear_attention": "sequence", "mla": "attention"}.get(
        name, "inplace_step" if name[-1] == "_" else "step"
    )
    length = {"linear_attention": 208}.get(name, 1)

    def operands(seed: int) -> list[Tensor | None]:
        if name == "mla":
            return [*latents(seed, page=64, weights=bool(seed)), None]
        return [*tokens(seed, 2, length, state=step), *([] if name == "linear_attention_step" else [None])]

    op = attention() if name == "mla" else linear(method, **({} if step else {"chunk_size": 0}))
    served = getattr(torch.ops.kdacompile, name).default
    with patch.object(Shortcut, "kernel", autospec=True, side_effect=Shortcut.kernel) as asked:
        for seed in (*seeds, *seeds):
            want = op.run(op.plain, operands(seed))
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream() if seed == 2 else torch.cuda.current_stream()):
                have = op.run(served, operands(seed))
            torch.cuda.synchronize()
            assert all(same_bits(x, y) for x, y in zip(have, want, strict=True)), seed
        assert asked.call_count == (2 if name == "mla" else 1)
