"""The portable MLA decode kernels in Triton's interpreter, in fp32: ``python -m tests.lowering.interpreted_mla``.

Run by ``test_mla_kernels.py`` with TRITON_INTERPRET=1. Caches hold NaN, tables garbage, in all that no request owns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.triton import TritonDecode
from kdacompile.lowering.triton.mla_run import cut, table_rows
from tests.lowering.verify import relative_error
from tests.ops.mla_cases import MlaCase, make_mla

KERNELS = TritonDecode()
TOLERANCE = 1e-6


def call_of(case: MlaCase) -> Attention:
    """An op's case as kernels receive it."""
    return Attention(*case.positional, **{**case.options, "out_dtype": torch.float32})


def check(label: object, **variant: Any) -> None:
    options: dict[str, Any] = {"form": "absorbed", **variant}
    case = make_mla(dtype=torch.float32, **options)
    call = call_of(case)
    reason = KERNELS.declines(call)
    assert reason is None, reason
    o, lse = KERNELS.run(call, Scratch(poison=True))
    want, want_lse = case.oracle()
    errors = relative_error(o, want), relative_error(finite(lse).double(), finite(want_lse))
    if not max(errors) <= TOLERANCE or not torch.equal(lse.isinf(), want_lse.isinf()):
        raise AssertionError(f"{label}: errors {errors}")


def finite(lse: Tensor) -> Tensor:
    return torch.where(lse.isinf(), 0.0, lse)


def caches() -> None:
    """Contiguous and paged, lengths that end anywhere in a block or at its edge, requests without tokens."""
    check("all of it", cached=130)
    check("weights absorbed by the caller", form="auto", weights=False, lengths=(9, 70), causal=True)
    check("no positions", rope=0, lengths=(64, 1))
    for page in (1, 16, 64, 100):
        for lengths in ((0, 129), (64, 200)):
            check((page, lengths), page=page, cached=200, lengths=lengths, causal=True, tokens=2)
    check("many requests", page=16, batch=9, cached=130, lengths=(0, 130, 1, 64, 65, 0, 7, 128, 129), tokens=1)


def masks() -> None:
    """Causality for several queries, also where some see nothing; masks, sinks."""
    check("causal", causal=True, tokens=5)
    check("more queries than tokens", causal=True, tokens=9, cached=4)
    check("more queries than lengths", causal=True, tokens=9, cached=70, lengths=(2, 70))
    check("bool", mask="bool", causal=True)
    check("float", mask="float", sinks=True)
    check("sinks", sinks=True, lengths=(0, 33))
    hidden = make_mla(dtype=torch.float32, tokens=3, cached=9, form="absorbed")
    mask = torch.zeros(2, 1, 3, 9)
    mask[0, :, 1] = torch.finfo(torch.float32).min  # a row that is hidden as a whole is an average
    o, _ = KERNELS.run(call_of(hidden.with_tensors(mask=mask)))
    values = torch.einsum("hvr,sr->hsv", hidden.tensors["w_uv"].double(), hidden.tensors["latent"][0].double())
    assert relative_error(o[0, 1], values.mean(1)) <= TOLERANCE


def shapes() -> None:
    """Widths that are no powers of two, more than one tile of rows, one head, many splits."""
    check("wide", rank=40, rope=20, heads=7, nope=9, value=5)
    check("tiles", heads=11, tokens=7, cached=200, causal=True)
    check("one head", heads=1, tokens=1, batch=1, cached=1000)
    check("splits of one request", batch=1, tokens=1, cached=1500, lengths=(1300,), sinks=True, page=64)


def cuts() -> None:
    """The device's cut covers every request once, in order, and is never longer than the table."""
    generator = torch.Generator().manual_seed(0)
    for batch, workers, longest in ((2, 66, 40), (67, 66, 64), (128, 66, 64), (130, 264, 200), (5, 3, 1)):
        lengths = torch.randint(0, 64 * longest, (batch,), generator=generator, dtype=torch.int32)
        for x in (lengths, torch.full_like(lengths, 64 * longest), torch.where(lengths > 100, 0, lengths)):
            for stay in (False, True):
                _check_cut(x, workers, 64 * longest, stay=stay)

    for batch, cached, workers, longest, most in (
        (16, 1000, 66, 4, 64),
        (3, 50000, 132, 18, 132),
        (67, 4096, 66, 64, 66 + 16),  # the one that is left over, in parts of four blocks
        (200, 700, 132, 11, 200),
    ):
        made = torch.empty(2 * batch + workers, 4, dtype=torch.int32)
        cut(torch.full((batch,), cached, dtype=torch.int32), made, cached, workers, Scratch(), chained=False)
        sizes = [high - low for request, low, high, _ in made[: batch + workers].tolist() if request >= 0]
        assert max(sizes) <= longest and len(sizes) <= most


def _check_cut(lengths: Tensor, workers: int, width: int, *, stay: bool) -> None:
    batch = lengths.shape[0]
    most = batch + workers
    size = table_rows(batch, workers, stay=stay)
    made = torch.full((size + 1, 4), -7, dtype=torch.int32)
    cut(lengths, made[:-1], width, workers, Scratch(), chained=False, stay=stay)
    table = made[:most]
    plan = {request: (first, parts) for first, parts, request, _ in made[most : most + int(made[most, 3])].tolist()}
    assert (made[-1] == -7).all()
    items = [item for item in table.tolist() if item[0] >= 0]
    assert all(item[0] == -1 for item in table.tolist() if item not in items)
    slots: set[int] = set()
    for request, length in enumerate(lengths.tolist()):
        own = sorted(item for item in items if item[0] == request)
        bounds = [0, *(high for _, _, high, _ in own)]
        assert [low for _, low, _, _ in own] == bounds[:-1] and bounds[-1] == -(-length // 64)
        first, parts = plan.get(request, (-1, 1))
        assert parts == len(own) and (parts > 1) == (request in plan)
        assert parts == 1 or all(low < high for _, low, high, _ in own)
        assert [slot for *_, slot in own] == ([-1] if parts == 1 else list(range(first, first + parts)))
        used = [] if parts == 1 else range(first, first + parts)
        assert not slots.intersection(used) and all(0 <= slot < most for slot in used)
        slots.update(used)
    if stay:
        starts = made[most + batch :].flatten()[: workers + 1].tolist()
        assert starts == sorted(starts) and (starts[0], starts[-1]) == (0, len(items))
    work = sum(-(-length // 64) for length in lengths.tolist())
    assert max(high - low for _, low, high, _ in items) <= -(-(work + 5 * batch) // workers) + 8


if __name__ == "__main__":
    for part in (caches, masks, shapes, cuts):
        part()
