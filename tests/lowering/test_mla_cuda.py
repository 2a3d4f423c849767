"""MLA decode kernels on a GPU: FlashMLA's dense decode grid with its tolerances, caches, dtypes, graphs, no sync."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile import ops
from kdacompile.lowering.attention_calls import AttentionImplementation
from kdacompile.lowering.cuda import choose_attention
from kdacompile.lowering.hopper import HopperDecode
from kdacompile.lowering.recorded import Launch, Recorder
from kdacompile.lowering.run_attention import Attention, run_attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.triton import TritonDecode
from kdacompile.patterns.mla.oracle import latent_attention
from tests.lowering.verify import relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RANK, ROPE = 512, 64
HOPPER, PORTABLE = HopperDecode(), TritonDecode()
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
OPERANDS = ("q", "q_rope", "latent", "k_rope", "w_uk", "w_uv", "mask", "sinks", "lengths", "block_table")


def decode_call(
    lengths: list[int],
    *,
    tokens: int = 1,
    heads: int = 64,
    page: int = 64,
    rank: int = RANK,
    rope: int = ROPE,
    dtype: torch.dtype = torch.bfloat16,
    poison: bool = True,
    quiet: bool = False,
    seed: int = 0,
    **other: Any,
) -> Attention:
    """Requests of these lengths over one cache of ``rank + rope`` columns; NaN and garbage in all that is not theirs.

    ``page``: 0 for a contiguous cache. ``quiet``: small numbers, as FlashMLA's tests draw them.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, longest = len(lengths), max(1, *lengths)

    def normal(*shape: int, over: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=generator, device="cuda")
        return (x / over).clamp(-1, 1).to(dtype) if quiet else x.to(dtype)

    q = normal(batch, tokens, heads, rank + rope)
    owned = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    table = None
    if page:
        pages = -(-longest // page) + 1
        cache = normal(batch * pages, page, rank + rope, over=10)
        order = torch.randperm(batch * pages, generator=generator, device="cuda").view(batch, pages).int()
        used = torch.arange(pages, device="cuda") * page < owned[:, None]
        table = torch.where(used, order, 2**30 if poison else 0).int()
        slots = torch.arange(pages * page, device="cuda").view(pages, page)
        stale = slots >= owned[:, None, None]
        cache[order[stale.any(-1)].long()] = torch.where(
            stale[stale.any(-1)][..., None], torch.nan if poison else 0.0, cache[order[stale.any(-1)].long()]
        )
    else:
        cache = normal(batch, longest + 3, rank + rope, over=10)
        stale = torch.arange(longest + 3, device="cuda") >= owned[:, None]
        cache = torch.where(stale[..., None], torch.nan if poison else 0.0, cache)
    options: dict[str, Any] = {"mask": None, "sinks": None, "scale": (128 + rope) ** -0.5, "causal": True} | other
    return Attention(
        q=q[..., :rank], q_rope=q[..., rank:] if rope else None, latent=cache[..., :rank],
        k_rope=cache[..., rank:] if rope else None, w_uk=None, w_uv=None, lengths=owned, block_table=table,
        form="auto", out_dtype=dtype, **options,
    )  # fmt: skip


def expect(call: Attention) -> tuple[Tensor, Tensor]:
    """The oracle; the whole cache in fp64 at once, which indexes nothing a request does not own."""
    tensors = [getattr(call, name) for name in OPERANDS]
    return latent_attention(*tensors, scale=call.scale, causal=call.causal)


def check(kernels: AttentionImplementation, call: Attention, bound: float = 4e-3) -> None:
    assert kernels.declines(call) is None
    o, lse = kernels.run(call, Scratch(poison=True))
    want, want_lse = expect(call)
    assert o.dtype is call.out_dtype and o.is_contiguous() and lse.is_contiguous()
    assert relative_error(o, want) <= bound
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


def check_as_flash_mla(kernels: AttentionImplementation, call: Attention) -> None:
    """FlashMLA's tolerances: each element absolutely or relatively, the cosine, and lse."""
    o, lse = kernels.run(call, Scratch(poison=True))
    want, want_lse = expect(call)
    difference = (o.double() - want).abs()
    assert bool(((difference <= 8e-4) | (difference <= 2.01 / 128 * want.abs())).all())
    x, y = o.double().flatten(), want.flatten()
    squares = float(x.square().sum() + y.square().sum())
    assert squares == 0 or 1 - 2 * float(x @ y) / squares < 5e-6
    assert torch.equal(lse.isinf(), want_lse.isinf())
    finite = torch.where(want_lse.isinf(), 0.0, want_lse)
    error = (torch.where(lse.isinf(), 0.0, lse.double()) - finite).abs()
    assert bool(((error <= 1e-6) | (error <= 8.01 / 65536 * finite.abs())).all())


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("cached", [20, 140, 4096])
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2, 6, 64])
def test_flash_mla_s_grid(batch: int, tokens: int, cached: int, varlen: bool) -> None:
    """Through whichever kernel takes it on this GPU, and through the portable one."""
    draw = random.Random(batch + tokens + cached)
    lengths = [cached] * batch
    if varlen:
        lengths = [max(tokens, int(draw.normalvariate(cached, cached / 2))) for _ in lengths]
        lengths[0] = 0
    for heads in (1, 3, 9, 63, 64, 126, 128):
        call = decode_call(lengths, tokens=tokens, heads=heads, seed=heads, quiet=True, scale=(RANK + ROPE) ** -0.5)
        chosen = choose_attention(call)
        assert chosen is not None
        check_as_flash_mla(chosen, call)
        if chosen.name != "triton" and batch < 64:
            check_as_flash_mla(PORTABLE, call)


CACHES: dict[str, dict[str, Any]] = {
    "one": {"lengths": [700]},
    "one_long": {"lengths": [9000], "heads": 128},
    "uneven": {"lengths": [5000, 1, 0, 64, 65, 700]},
    "contiguous": {"lengths": [130, 64, 0, 1000], "page": 0},
    "two_pages_a_block": {"lengths": [300, 129], "page": 128},
    "large_pages": {"lengths": [1500, 129], "page": 512},
    "sinks": {"lengths": [300, 0, 4000], "sinks": True},
    "sinks_of_one": {"lengths": [4000], "sinks": True},
    "fp16": {"lengths": [300, 129], "dtype": torch.float16},
    "not_causal": {"lengths": [300, 129], "tokens": 3, "causal": False},
    "many_tokens": {"lengths": [300, 129, 40], "tokens": 100, "heads": 5},
    "more_queries_than_tokens": {"lengths": [3, 7], "tokens": 8, "heads": 20},
    "many_requests": {"lengths": list(range(0, 1500, 5))},
}


def build(label: str) -> Attention:
    variant: dict[str, Any] = {**CACHES[label], "sinks": None}
    call = decode_call(**variant)
    return replace(call, sinks=torch.randn(call.q.shape[2], device="cuda")) if "sinks" in CACHES[label] else call


@on_hopper
@pytest.mark.parametrize("label", CACHES)
def test_hopper(label: str) -> None:
    check(HOPPER, build(label))


@pytest.mark.parametrize("label", CACHES)
def test_portable(label: str) -> None:
    check(PORTABLE, build(label))


@on_hopper
def test_hopper_without_lengths_and_separate_caches() -> None:
    call = decode_call([640] * 3, poison=False)
    assert call.k_rope is not None
    for width in (640, 613):
        x = torch.randn(3, width, RANK, device="cuda").bfloat16(), torch.randn(3, width, ROPE, device="cuda").bfloat16()
        check(HOPPER, replace(call, latent=x[0], k_rope=x[1], lengths=None, block_table=None))
    check(HOPPER, replace(call, lengths=None, block_table=call.block_table[:, :10]))  # pyright: ignore[reportOptionalSubscript]


@pytest.mark.parametrize(
    "change",
    [
        {"page": 1}, {"page": 16}, {"page": 100}, {"page": 7, "heads": 16}, {"rank": 256, "rope": 32},
        {"rank": 384, "rope": 0}, {"rank": 96, "rope": 48, "heads": 5}, {"rank": 300, "rope": 0, "heads": 8},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 6e-4), (torch.float32, 3e-6)], ids=str
)
def test_portable_shapes(change: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    for heads in (16, 40):
        options: dict[str, Any] = {"heads": heads, "dtype": dtype, "tokens": 2, **change}
        check(PORTABLE, decode_call([300, 0, 129], **options), bound)


@on_hopper
@pytest.mark.parametrize("page", [0, 64])
def test_hopper_masks_of_tokens(page: int) -> None:
    """As a static cache's: of each request or of all, tokens that do not lie together."""
    for lengths in ([300, 77], [4000]):
        call = decode_call(lengths, page=page, tokens=2)
        noise = torch.randn(len(lengths), 1, 1, 2 * call.width, device="cuda")[..., ::2]
        check(HOPPER, replace(call, mask=noise > -1))
        check(HOPPER, replace(call, mask=noise[:1] > 1))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_portable_masks(kind: str) -> None:
    call = decode_call([300, 300], page=0, tokens=2, heads=20, poison=False)
    shape = (2, 1, 2, 303) if kind == "bool" else (1, 20, 1, 303)
    noise = torch.randn(shape, device="cuda")
    check(PORTABLE, replace(call, mask=noise > 0 if kind == "bool" else noise))


def test_the_weights_around() -> None:
    """Errors no worse than the model's own: keys, values and weights of the softmax rounded to bf16."""
    call = decode_call([4096, 1000], heads=32)
    w_uk, w_uv = (torch.randn(32, 128, RANK, device="cuda").bfloat16() * RANK**-0.5 for _ in range(2))
    call = replace(call, q=torch.randn(2, 1, 32, 128, device="cuda").bfloat16(), w_uk=w_uk, w_uv=w_uv)
    chosen = choose_attention(call)
    assert chosen is not None
    check(chosen, call, 8e-3)
    assert choose_attention(replace(call, form="expanded")) is None


@pytest.mark.parametrize("lengths", [[4096], [4096, 7, 1000, 0]])
@pytest.mark.parametrize("heads", [16, 128])
def test_no_host_sync_same_bits_and_cuda_graphs(heads: int, lengths: list[int]) -> None:
    """A captured call follows the lengths that are on the device when it is replayed."""
    call = decode_call(lengths, heads=heads, poison=False)
    chosen = choose_attention(call)
    assert chosen is not None
    o, lse = chosen.run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again, _ = chosen.run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(o, again)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_lse = chosen.run(call)
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, o) and torch.equal(captured_lse, lse)
    assert call.lengths is not None
    call.lengths.copy_(call.lengths // 3)
    graph.replay()
    assert torch.equal(captured, chosen.run(call)[0]) and not torch.equal(captured, o)


def test_what_no_kernel_takes_is_the_executor_s() -> None:
    call = decode_call([70, 3], heads=2, dtype=torch.float64)
    assert choose_attention(call) is None
    assert relative_error(run_attention(call)[0], expect(call)[0]) < 1e-12


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("lengths", [[4096, 7, 1000, 0], [700] * 40, list(range(1, 4000, 61))], ids=len)
def test_a_schedule_for_all_layers(lengths: list[int], heads: int) -> None:
    """A schedule made beforehand changes not a bit; one of another size is not read."""
    call = decode_call(lengths, heads=heads, poison=False)
    assert call.lengths is not None
    made = ops.mla_schedule(call.lengths, rows=heads, width=call.width)
    assert made.numel() and made.dtype is torch.int32
    o, lse = HOPPER.run(call)
    scratch = Recorder(())
    shared, shared_lse = HOPPER.run(replace(call, schedule=made), scratch)
    assert torch.equal(o, shared) and torch.equal(lse, shared_lse)
    names = [step.kernel.name for step in scratch.steps if isinstance(step, Launch)]
    assert "attend" in names and "schedule" not in names
    other = torch.full_like(ops.mla_schedule(call.lengths[1:], rows=heads, width=call.width), -1)
    assert torch.equal(HOPPER.run(replace(call, schedule=other))[0], o)
