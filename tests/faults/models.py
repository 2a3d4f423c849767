"""The three models faults are injected into, and how one of them is compiled from nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kdacompile.capture import hook, lifting
from kdacompile.patterns.mla.spec import LATENT_ATTENTION
from kdacompile.patterns.recurrence.spec import CALLS, RECURRENCE
from kdacompile.report import refusals
from kdacompile.report.collect import collecting
from kdacompile.report.report import Report
from tests.backend.layers import Layer, gated_delta_loop, gated_linear_parallel
from tests.backend.test_module_tables import HEADS, SIZE, Lightning
from tests.compare import tensors
from tests.mla.spellings import RANK, ROPE, WIDTH, Naive


class Layers(nn.Module):
    """Two layers of one graph: a loop, which is lifted before it is captured, and a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(gated_delta_loop)
        self.second = Layer(lambda q, k, v, g, beta: gated_linear_parallel(q, k, v * beta.unsqueeze(-1), g))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Cached(nn.Module):
    """A step that writes its state into a buffer of the caller's, after attention by blocks with decays from tables."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Lightning(block=4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, state = self.blocks(q, k, v)
        update = k[:, :, -1:].transpose(-1, -2) * v[:, :, -1:]
        cache.copy_(cache * 0.9 + update)
        return out, state, q[:, :, -1:] @ cache


def layers() -> tuple[nn.Module, list[Tensor]]:
    return Layers(), [torch.randn(2, 12, 12)]


def latent() -> tuple[nn.Module, list[Tensor]]:
    return Naive(), [torch.randn(2, 6, size) for size in (WIDTH, RANK, ROPE)]


def cached() -> tuple[nn.Module, list[Tensor]]:
    width = 12  # another one than the keys': fewer readings to refute
    q, k, v = (torch.randn(1, HEADS, 6, size) for size in (SIZE, SIZE, width))
    return Cached(), [q, k, v, torch.randn(1, HEADS, SIZE, width)]


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]]]] = {"layers": layers, "latent": latent, "cached": cached}


def forget() -> None:
    """Everything that a process remembers from one compilation to the next, but for torch's own modules."""
    torch._dynamo.reset()
    hook.lifts = lifting.Lifts()
    hook._identities = WeakKeyDictionary()
    refusals._left.clear()
    for spec in (RECURRENCE, CALLS, LATENT_ATTENTION):
        spec.verdicts.known.clear()


class Case:
    """A model with its arguments, and what compiling it without this package gives."""

    def __init__(self, name: str, inner: str) -> None:
        torch.manual_seed(0)
        self.inner = inner
        self.model, self.arguments = MODELS[name]()
        self.want = self._results(torch.compile(self.model, backend=inner))

    def _results(self, compiled: Callable[..., Any]) -> list[Tensor]:
        """What it returns, and what it leaves in its arguments."""
        given = [x.clone() for x in self.arguments]
        with torch.no_grad():
            return [*tensors(compiled(*given)), *given]

    def compile(self) -> tuple[list[Tensor], Report]:
        """The results of two calls, since a fault may show in the second; compiled by this package from nothing."""
        forget()
        # Under a watch compiling takes longer than a user would wait.
        options: Any = {"kda.inner": self.inner, "kda.deadline": 3600.0}
        compiled = torch.compile(self.model, backend="kda", options=options)
        with collecting() as report:
            results = self._results(compiled)
        return [*results, *self._results(compiled)], report

    def agrees(self, results: list[Tensor], report: Report) -> bool:
        """Bit by bit where nothing was rewritten, and up to the order of sums where something was."""
        bound: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if report.matches else {"rtol": 0.0, "atol": 0.0}
        wanted = [*self.want, *self.want]
        return all(
            torch.allclose(one, other, equal_nan=True, **bound) for one, other in zip(results, wanted, strict=True)
        )
