"""MLA decoding on a CUDA device: our op beside the portable kernel alone, the absorbed form in PyTorch as our backend
and as Inductor compile it, and the floor.

One query token a request over a paged bf16 cache (pages in random order, 512 + 64 columns), weights absorbed by the
caller. The table gives device time (replays of a CUDA graph over caches that together exceed the L2), the error
against fp64, and the goal; a JSON file has the same figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdacompile.backend import kda
from kdacompile.bench import device_clock, record, rows
from kdacompile.bench.record import Figures, Results
from kdacompile.errors import KdaError
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.triton import TritonDecode
from kdacompile.ops import mla_decode
from kdacompile.patterns.mla.oracle import latent_attention

RANK, ROPE = 512, 64
SCALE = (128 + ROPE) ** -0.5
CONTENDERS = ("ours", "portable", "matched", "inductor")
_ROTATED = 2**28  # bytes of caches, all together: several times an L2
_CHECKED = 4  # requests of the numerical check


@dataclass(frozen=True)
class Case:
    """``cached`` tokens a request; ``uneven``: that on average, from none to twice as many. ``goal``: microseconds;
    ``page``: tokens of a page.
    """

    name: str
    batch: int
    cached: int
    heads: int
    goal: float | None = None
    uneven: bool = False
    page: int = 64


CASES = (
    Case("b128-s4096-h16", 128, 4096, 16, 155),
    Case("b128-s8192-h16", 128, 8192, 16, 290),
    Case("b32-s4096-h64", 32, 4096, 64, 60),
    Case("b1-s32768-h128", 1, 32768, 128, 34),
    Case("b1-s8192-h16", 1, 8192, 16, 17),
    Case("b128-s4096-h128", 128, 4096, 128, 260),
    Case("b128-s8192-h128", 128, 8192, 128, 530),
    Case("b128-uneven-h16", 128, 4096, 16, uneven=True),
    Case("b128-uneven-h128", 128, 4096, 128, uneven=True),
    Case("b67-s4096-h128", 67, 4096, 128),
    Case("b128-s4096-h32", 128, 4096, 32),
    Case("b128-s4096-h16-page1", 128, 4096, 16, page=1),
    Case("b128-s4096-h16-page16", 128, 4096, 16, page=16),
)


@dataclass(frozen=True)
class Inputs:
    """q ``[B, 1, H, 576]``, cache ``[pages, page, 576]``, table ``[B, pages]`` and lengths ``[B]``."""

    q: Tensor
    cache: Tensor
    table: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, case: Case, seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        lengths = torch.full((case.batch,), case.cached, device="cuda", dtype=torch.int32)
        if case.uneven:
            steps = torch.linspace(0, 2 * case.cached, case.batch, device="cuda")
            lengths = steps[torch.randperm(case.batch, generator=generator, device="cuda")].int()
        pages = -(-case.cached * (2 if case.uneven else 1) // case.page)
        order = torch.randperm(case.batch * pages, generator=generator, device="cuda")
        q = normal(case.batch, 1, case.heads, RANK + ROPE)
        cache = normal(case.batch * pages, case.page, RANK + ROPE)
        return cls(q, cache, order.view(case.batch, pages).int(), lengths)

    @property
    def bytes(self) -> int:
        """What has to move: the requests' tokens once, queries and results."""
        columns = self.cache.shape[-1]
        return 2 * (int(self.lengths.sum()) * columns + self.q.numel() + self.q[..., :RANK].numel())

    @property
    def operations(self) -> int:
        return 2 * int(self.lengths.sum()) * self.q.shape[2] * (2 * RANK + ROPE)


def ours(x: Inputs) -> Tensor:
    o = mla_decode(x.q, x.cache, rank=RANK, scale=SCALE, lengths=x.lengths, block_table=x.table)
    assert isinstance(o, Tensor)
    return o


def portable(x: Inputs) -> Tensor:
    call = Attention(
        x.q[..., :RANK], x.q[..., RANK:], x.cache[..., :RANK], x.cache[..., RANK:], None, None, None, None, x.lengths,
        x.table, scale=SCALE, causal=True, form="auto", out_dtype=x.q.dtype,
    )  # fmt: skip
    return TritonDecode().run(call)[0]


def eager(x: Inputs) -> Tensor:
    """The absorbed form as people write it: the pages gathered, scores in bf16, softmax in fp32, a mask of lengths."""
    keys = x.cache[x.table].flatten(1, 2)
    scores = (x.q.squeeze(1) @ keys.mT).float() * SCALE
    positions = torch.arange(keys.shape[1], device=keys.device)
    scores = scores.masked_fill(positions >= x.lengths[:, None, None], -torch.inf)
    return (scores.softmax(-1).to(x.q.dtype) @ keys[..., :RANK]).unsqueeze(1)


def error(o: Tensor, x: Inputs) -> float:
    """Of a few requests, against fp64."""
    some = slice(0, _CHECKED)
    want, _ = latent_attention(
        x.q[some, :, :, :RANK], x.q[some, :, :, RANK:], x.cache[..., :RANK], x.cache[..., RANK:], None, None,
        lengths=x.lengths[some], block_table=x.table[some], scale=SCALE,
    )  # fmt: skip
    return rows.relative_error(o[some], want)


def measured(case: Case, contenders: Sequence[str]) -> dict[str, Figures]:
    """Figures of every contender on one case, one after the other in this process."""
    first = Inputs.random(case, 0)
    inputs = [first, *(Inputs.random(case, seed) for seed in range(1, max(1, _ROTATED // first.cache.nbytes)))]
    torch.compiler.reset()  # one function for all cases: Dynamo would stop compiling it
    expect: Any = {"kda.expect": {"mla": 1}}
    calls: dict[str, Callable[[Inputs], Tensor]] = {
        "ours": ours,
        "portable": portable,
        "matched": torch.compile(eager, dynamic=False, backend=kda, options=expect),
        "inductor": torch.compile(eager, dynamic=False),
    }
    found: dict[str, Figures] = {}
    for name in contenders:
        call = calls[name]
        try:
            figures = {
                "error": error(call(first), first),
                "device_us": device_clock.device_microseconds(*(partial(call, x) for x in inputs)),
            }
        except (RuntimeError, KdaError) as failure:
            figures = {"failure": str(failure).splitlines()[0]}
        figures |= {"bytes": first.bytes, "operations": first.operations}
        found[name] = figures
    return found


def table(results: Results) -> str:
    """One row a contender; a goal stands beside ours."""
    goals = {case.name: case.goal for case in CASES}
    rows = [("case", "contender", "device", "goal", "TB/s", "TFLOP/s", "error")]
    for name, found in results.items():
        for contender, figures in found.items():
            if "failure" in figures:
                rows.append((name, contender, f"- {figures['failure'][:60]}", "", "", "", ""))
                continue
            us, goal = figures["device_us"], goals[name] if contender == "ours" else None
            said = "" if goal is None else f"{goal:g} us {'met' if us <= goal else 'MISSED'}"
            rates = (f"{figures['bytes'] / us / 1e6:.2f}", f"{figures['operations'] / us / 1e6:.0f}")
            rows.append((name, contender, f"{us:.1f} us", said, *rates, f"{figures['error']:.1e}"))
    return record.aligned(rows)


def main(only: Sequence[str] | None, json_path: Path, contenders: Sequence[str] = CONTENDERS) -> int:
    """Run, print the table, write the JSON. Exit status 1 where our op failed."""
    device, names = record.cuda_device("mla"), record.chosen([case.name for case in CASES], only)
    cases = [case for case in CASES if case.name in names]
    results: Results = {}
    for case in cases:
        results[case.name] = measured(case, contenders)
        print(f"{case.name}: {results[case.name]}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        done = [{**asdict(one), "results": results[one.name]} for one in cases if one.name in results]
        record.write(json_path, "mla", done, device=device)  # what is there when somebody stops it
    print(table(results))
    print(f"\nwritten to {json_path}")
    return 1 if any("failure" in found["ours"] for found in results.values() if "ours" in found) else 0
