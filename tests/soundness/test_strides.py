"""Results have eager's strides, gaps and repetitions included: what a caller does with a stride comes out the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.report.collect import collecting
from tests.compare import worst_error
from tests.lifting.conftest import fresh
from tests.lifting.test_soundness import compiled, lifted
from tests.soundness.programs import BOUND, explained
from tests.soundness.test_rows import attention

__all__ = ["fresh"]

Program = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def padded(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Computed on three tokens more, ``[B, H, T + 3, V]``."""
    more = [F.pad(x, (0,) * (2 * (x.dim() - 2)) + (0, 3)) for x in (q, k, v, g)]
    return attention(*more).transpose(1, 2)


def buffer(v: Tensor, o: Tensor, step: slice) -> Tensor:
    return v.new_zeros(*v.shape[:3], 2 * v.shape[3])[..., step].copy_(o)


RESULTS: dict[str, Program] = {
    "as it is": attention,
    "heads first": lambda q, k, v, g: attention(q, k, v, g).transpose(1, 2).contiguous(),
    "a slice of what was padded": lambda *x: padded(*x)[:, :, : x[0].shape[1]],
    "that, tokens first": lambda *x: padded(*x)[:, :, : x[0].shape[1]].transpose(1, 2),
    "of padded values": lambda q, k, v, g: attention(q, k, F.pad(v, (0, 5)), g)[..., : v.shape[-1]],
    "of a row of both": lambda q, k, v, g: torch.cat([attention(q, k, v, g), v], -1)[..., : v.shape[-1]],
    "channels first": lambda *x: attention(*x).permute(3, 0, 2, 1),
    "half a buffer": lambda q, k, v, g: buffer(v, attention(q, k, v, g), slice(0, v.shape[-1])),
    "every other place of a buffer": lambda q, k, v, g: buffer(v, attention(q, k, v, g), slice(None, None, 2)),
    "expanded": lambda *x: attention(*x)[:, :, None].expand(-1, -1, 3, -1, -1),
    "the last token": lambda *x: attention(*x)[:, -1:],
    "one request": lambda *x: attention(*x)[0],
}


def given(batch: int = 2, length: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, length, 3, width, generator=rng) for width in (4, 4, 6))
    return q, k, v, -torch.rand(batch, length, 3, generator=rng)


@pytest.mark.parametrize("batch", [2, 1])
@pytest.mark.parametrize("name", RESULTS)
def test_strides_are_eagers(name: str, batch: int) -> None:
    expected = RESULTS[name](*given(batch))
    report = explained(RESULTS[name], given(batch), **{"kda.inner": "eager"})
    assert len(report.matches) == 1, str(report)
    assert report.result.stride() == expected.stride()
    assert worst_error(report.result, expected) <= BOUND


OPEN = [name for name in RESULTS if name not in ("half a buffer", "every other place of a buffer")]


def chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """By chunks of 8, ``[B, H, T, V]``, cut from what was padded."""
    out, _ = chunked(q, k, v)
    return out.transpose(1, 2)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [*OPEN, "chunks", "chunks, tokens first"])
def test_strides_where_sizes_are_open(name: str, dynamic: bool | None) -> None:
    fn = {**RESULTS, "chunks": chunks, "chunks, tokens first": lambda *x: chunks(*x).transpose(1, 2)}[name]
    torch._dynamo.reset()
    run = torch.compile(fn, backend="kda", options={"kda.inner": "eager", "kda.lift": False}, dynamic=dynamic)
    with collecting() as report, torch.no_grad():
        for length in (13, 16, 21, 24, 40):
            have, want = run(*given(2, length)), fn(*given(2, length))
            assert have.stride() == want.stride(), f"{length}: {report}"
            assert worst_error(have, want) <= BOUND
    assert report.matches and (name not in OPEN or report.graph_count <= 2), str(report)


NEXT: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda o: o.roll(-1, -3),
    "cat": lambda o: torch.cat([o, o], 1),
    "clone": lambda o: o.clone(),
    "sum": lambda o: o + o[:, :1],
    "stack": lambda o: torch.stack([o, o]),
}


@pytest.mark.parametrize("sizes", [(1, 13, 3, 6), (1, 1, 3, 6), (2, 13, 1, 6), (1, 13, 1, 1), (2, 1, 3, 1)], ids=str)
@pytest.mark.parametrize("name", NEXT)
def test_strides_of_what_reads_a_result(name: str, sizes: tuple[int, ...]) -> None:
    """Tokens innermost, as some paths of einsum have them: whether that is an image decides how ``cat`` lays out."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        o = attention(q, k, v, g)
        batch, length, heads, width = o.shape
        steps = (length * heads * width if batch > 1 else 6, 1, length * width, length)
        return NEXT[name](torch.empty_strided(o.shape, steps, dtype=o.dtype).copy_(o))

    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*sizes[:3], width, generator=rng) for width in (4, 4, sizes[3]))
    inputs = q, k, v, -torch.rand(*sizes[:3], generator=rng)
    report = explained(fn, inputs, **{"kda.inner": "eager"})
    want = fn(*inputs)
    for size, own, theirs in zip(want.shape, report.result.stride(), want.stride(), strict=True):
        assert size == 1 or own == theirs, str(report)
    assert worst_error(report.result, want) <= BOUND


@pytest.mark.parametrize("name", ["a slice of what was padded", "every other place of a buffer", "expanded"])
def test_strides_through_inductor_and_gradients(name: str) -> None:
    """As Inductor alone has them, which need not be eager's where it makes buffers of its own."""
    torch._dynamo.reset()
    own, theirs = ([x.requires_grad_() for x in given()] for _ in range(2))
    plain = torch.compile(RESULTS[name])(*theirs)
    report = explained(RESULTS[name], tuple(own))
    assert len(report.matches) == 1, str(report)
    assert report.result.stride() == plain.stride()
    seed = torch.randn(plain.shape)
    have, want = torch.autograd.grad(report.result, own, seed), torch.autograd.grad(plain, theirs, seed)
    assert worst_error((report.result, have), (plain, want)) <= BOUND


# -- lifted functions -------------------------------------------------------------------------------------------------


def chunked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Linear attention by chunks of 8, ``[B, T, H, D]``; the output is cut from what was padded."""
    length = q.shape[1]
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, (8 - length % 8) % 8)) for x in (q, k, v))
    out, state = v.new_zeros(v.shape), q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    for start in range(0, q.shape[2], 8):
        a, b, c = (x[:, :, start : start + 8] for x in (q, k, v))
        out[:, :, start : start + 8] = a @ state + (a @ b.mT).tril() @ c
        state = state + b.mT @ c
    return out[:, :, :length].transpose(1, 2), state


def turned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Linear attention token by token; the output is laid out as ``v`` is, the state the other way round."""
    out, state = torch.empty_like(v), q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    for t in range(q.shape[1]):
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        out[:, t] = (q[:, t, :, None] @ state)[:, :, 0]
    return out, state.mT.contiguous().mT


def steps(x: Tensor) -> list[int]:
    """Strides of the dimensions that have more than one entry."""
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


def rounded(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """KDA by chunks of 8. Its keys are rounded once they are padded, so its graphs are alike at whole chunks only."""
    length, outs, rows = q.shape[1], list[Tensor](), torch.arange(8)
    q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, -length % 8)) for x in (q, k, v, g))
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    for start in range(0, length, 8):
        here = slice(start, start + 8)
        a, b, c, d = (x[:, here].transpose(1, 2) for x in (q, k.to(torch.bfloat16).to(k.dtype), v, g))
        d = d.cumsum(2)
        gap = (d[:, :, :, None] - d[:, :, None]).masked_fill((rows[:, None] < rows)[..., None], -math.inf).exp()
        scores, gram = (torch.einsum("bhik,bhjk,bhijk->bhij", x, b, gap) for x in (a, b))
        rhs = torch.cat([c, b * d.exp()], -1)
        solved = torch.linalg.solve_triangular(gram.tril(-1), rhs, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], q.shape[-1]], -1)
        new, last = u - w @ state, d[:, :, -1:]
        outs.append(a * d.exp() @ state + scores @ new)
        state = state * last.exp().mT + (b * (last - d).exp()).mT @ new
    return torch.cat(outs, 2)[:, :, :length].transpose(1, 2), state


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("order", [Tensor.contiguous, heads_first], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("sizes", [(2, 3), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("fn", [chunked, turned, rounded])
def test_strides_of_what_a_lifted_function_returns(
    fn: Callable[..., tuple[Tensor, Tensor]], sizes: tuple[int, int], order: Callable[[Tensor], Tensor]
) -> None:
    batch, heads = sizes
    run = compiled(fn)
    with torch.no_grad():
        for length in (80, 83, 21, 8, 5):
            q, k, v, g = (order(torch.randn(batch, length, heads, width)) for width in (4, 4, 6, 4))
            args = (q, F.normalize(k, dim=-1), v, -g.abs())[: len(inspect.signature(fn).parameters)]
            for have, want in zip(run(*args), fn(*args), strict=True):
                assert steps(have) == steps(want)
                assert worst_error(have, want) <= BOUND
    assert fn.__name__ in lifted()


def column_major(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention by chunks of 8, whose rows lie column by column: those of one chunk are flattened as they are,
    those of several are copied.
    """
    if q is k:  # so that it is not lifted
        return q
    length = q.shape[1]
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, -length % 8)).unflatten(2, (-1, 8)) for x in (q, k, v))
    written = k.mT @ v
    before = written.cumsum(2) - written
    within = v.mT @ (q @ k.mT).tril().mT
    for out in ((within + before.mT @ q.mT).mT,):
        q = out.flatten(2, 3)
    return q[:, :, :length].transpose(1, 2)


@pytest.mark.parametrize("lengths", [(5, 6)], ids=str)
def test_strides_of_one_chunk_where_nothing_is_lifted(lengths: tuple[int, ...]) -> None:
    """A region captured further was not told apart by its count of chunks: one chunk got the strides of several."""
    run = compiled(column_major)
    with torch.no_grad():
        for length in lengths:
            q, k, v = (torch.randn(1, length, 1, width) for width in (4, 4, 6))
            args = q, F.normalize(k, dim=-1), v
            have, want = run(*args), column_major(*args)
            assert steps(have) == steps(want)
            assert worst_error(have, want) <= BOUND
    assert column_major.__name__ not in lifted()
