"""A cache that was empty comes out of a compiled prompt as it does in eager mode, strides and all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kdacompile.report.collect import collecting
from tests.compare import relative_error
from tests.lifting.functions import recurrent_gla
from tests.lifting.test_lift import arguments


def prompt(q: Tensor, k: Tensor, v: Tensor, g: Tensor, keys: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    """A recurrence, and a cache with heads before tokens."""
    return recurrent_gla(q, k, v, g), torch.cat([empty, (keys + 1).transpose(1, 2)], dim=2)


def nothing_to_match(q: Tensor, k: Tensor, v: Tensor, g: Tensor, keys: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
    return q + k, torch.cat([empty, (keys + 1).transpose(1, 2)], dim=2)


def test_strides_are_those_of_eager_mode() -> None:
    """Of one head and of several, and where the keys have no width at all."""
    for heads, width in ((1, 4), (2, 4), (2, 0)):
        torch._dynamo.reset()
        run = torch.compile(prompt, backend="kda")
        with torch.no_grad(), collecting() as report:
            for length in (20, 31):
                args = [*arguments(length), torch.randn(1, length, heads, width), torch.tensor([])]
                have, want = run(*args), prompt(*args)
                assert relative_error(have[0], want[0]) < 1e-5
                assert torch.equal(have[1], want[1])
                assert have[1].stride() == want[1].stride(), (heads, width, length)
        assert len(report.matches) == len(report.graphs) > 0


def test_a_cache_that_is_not_empty_or_has_nothing_to_match_beside_it_is_inductors() -> None:
    for fn, cache in ((prompt, torch.randn(1, 2, 5, 4)), (nothing_to_match, torch.tensor([]))):
        torch._dynamo.reset()
        given = [*arguments(20), torch.randn(1, 20, 2, 4), cache]
        results: list[Any] = []
        for backend in ("kda", "inductor"):
            with torch.no_grad():
                options: Any = {"kda.lift": False} if backend == "kda" else None
                results.append(torch.compile(fn, backend=backend, options=options)(*given)[1])
        assert torch.equal(*results)
        assert results[0].stride() == results[1].stride()
