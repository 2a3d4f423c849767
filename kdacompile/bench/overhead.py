"""``python -m kdacompile overhead``: what the backend costs a program that has nothing for it.

Compile time: everything of ours between Dynamo and Inductor and inside Inductor (the pass, its identity for the caches,
the look at calls that Dynamo inlines, and at functions with loops), beside the time the whole first call takes. Some of
the programs are loops that look like linear attention until they are searched. Run time: what the backend gives Dynamo
is the very function Inductor made, so that a call costs nothing more.

``python -m kdacompile overhead lstm`` measures the programs whose names begin so.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdacompile import backend, compat
from kdacompile.bench import record
from kdacompile.capture import hook
from kdacompile.errors import BenchError
from kdacompile.settings import Settings

MOST = 0.05  # of the first call
_HEADER = f"{'program':<26}{'graph nodes':>12}{'first call':>12}{'ours':>12}{'share':>8}  compiled function"


class Attention(nn.Module):
    """Causal attention written out: its products of activations are what the backend takes a closer look at."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return self.output(((scores + mask).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A transformer layer around ``Attention``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        first, second = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(first) * second)


def pointwise(x: Tensor) -> Tensor:
    return (x + 1).relu()


def _torch_layers() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _convolutions() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*blocks)


class Lstm(nn.Module):
    """A cell over 64 tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, rows = None, list[Tensor]()
        for token in x.unbind(1):
            state = self.cell(token, state)
            rows.append(state[0])
        return torch.stack(rows, 1)


def bent_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A loop over tokens like linear attention's, with a tanh on the state; [B, T, H, D]."""
    state = q.new_zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        state = torch.tanh(state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2))
        rows.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(rows, 1)


def normed_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with the state divided by its norm."""
    state = q.new_zeros(q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    rows: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        state = state / state.norm(dim=(-2, -1), keepdim=True).clamp(min=1)
        rows.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(rows, 1)


def bent_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 8) -> Tensor:
    """Chunks of linear attention with a tanh on the state between them; [B, H, T, D]."""
    state = q.new_zeros(*q.shape[:2], k.shape[3], v.shape[3])
    out: list[Tensor] = []
    for start in range(0, q.shape[2], chunk):
        reads, keys, values = (x[:, :, start : start + chunk] for x in (q, k, v))
        out.append(reads @ state + (reads @ keys.mT).tril() @ values)
        state = torch.tanh(state + keys.mT @ values)
    return torch.cat(out, 2)


def softmax_blocks(q: Tensor, k: Tensor, v: Tensor, chunk: int = 8) -> Tensor:
    """Attention block by block with a running softmax; [B, H, T, D]."""
    out: list[Tensor] = []
    for start in range(0, q.shape[2], chunk):
        most, total, mean = (q.new_full((*q.shape[:2], chunk, 1), fill) for fill in (-torch.inf, 0.0, 0.0))
        for first in range(0, start + 1, chunk):
            scores = q[:, :, start : start + chunk] @ k[:, :, first : first + chunk].mT
            larger = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, rest = (scores - larger).exp(), (most - larger).exp()
            total = total * rest + weights.sum(-1, keepdim=True)
            mean = mean * rest + weights @ v[:, :, first : first + chunk]
            most = larger
        out.append(mean / total)
    return torch.cat(out, 2)


def _called(fn: Callable[..., Tensor], layout: tuple[int, ...]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A program that calls ``fn``, so that it is looked at as a function before its loop is unrolled."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fn(q, k, v) * 2

    return program, tuple(torch.randn(layout) for _ in range(3))


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...]]]] = {
    "pointwise": lambda: (pointwise, (torch.randn(8),)),
    "convolutions": lambda: (_convolutions().eval(), (torch.randn(1, 8, 16, 16),)),
    "torch transformer layers": lambda: (_torch_layers().train(), (torch.randn(2, 12, 64),)),
    "attention written out": lambda: (nn.Sequential(*(Layer(64, 4) for _ in range(4))), (torch.randn(2, 12, 64),)),
    "lstm cell, 64 tokens": lambda: (Lstm(32), (torch.randn(2, 64, 32),)),
    "tanh on the state": lambda: _called(bent_state, (2, 64, 2, 16)),
    "norm of the state": lambda: _called(normed_state, (2, 64, 2, 16)),
    "tanh between chunks": lambda: _called(bent_chunks, (2, 2, 64, 16)),
    "softmax block by block": lambda: _called(softmax_blocks, (2, 2, 64, 16)),
}


@dataclass
class Stopwatch:
    """Adds up the time spent in the functions it wraps."""

    seconds: float = 0.0

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


@dataclass(frozen=True)
class Figures:
    """One program: seconds of the first call and of ours in it, and whether Inductor's function came back as it is."""

    nodes: int
    first_call: float
    ours: float
    same_function: bool

    @property
    def fine(self) -> bool:
        return self.ours <= MOST * self.first_call and self.same_function


class Clock:
    """Our own time: of the backend without Inductor inside it, of the pass, of looking at inlined calls and of trying
    functions out.
    """

    def __init__(self) -> None:
        self.whole, self.inductor, self.inside = Stopwatch(), Stopwatch(), Stopwatch()
        self.from_inductor: list[Any] = []

    @property
    def seconds(self) -> float:
        return self.whole.seconds - self.inductor.seconds + self.inside.seconds

    @contextmanager
    def running(self) -> Generator[None]:
        run, compile_fx = self.inside.wrap(backend.KdaPass.__call__), self.inductor.wrap(compat.compile_fx)

        def keep(*args: Any, **kwargs: Any) -> Any:
            self.from_inductor.append(compile_fx(*args, **kwargs))
            return self.from_inductor[-1]

        with (
            patch.object(compat, "compile_fx", keep),
            patch.object(backend.KdaPass, "__call__", lambda self, graph: run(self, graph)),
            patch.object(hook, "_plausible", self.inside.wrap(hook._plausible)),
            patch.object(hook, "_find", self.inside.wrap(hook._find)),
        ):
            yield


def measure(fn: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Figures:
    """Compile and run one program, caches off."""
    clock, nodes, returned = Clock(), list[int](), list[Any]()

    def timed(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nodes.append(len(gm.graph.nodes))
        returned.append(clock.whole.wrap(backend.kda)(gm, inputs))
        return returned[-1]

    marked: Any = timed
    marked.kdacompile_settings = Settings()  # Dynamo's calls are looked at as they are for the backend itself
    compiler: Any = torch.compiler.config  # its fields are installed at run time
    torch.compiler.reset()
    with torch.no_grad(), clock.running(), compiler.patch(force_disable_caches=True):
        start = time.perf_counter()
        torch.compile(fn, backend=timed)(*arguments)
        first_call = time.perf_counter() - start
    same = len(returned) == len(clock.from_inductor) and all(map(operator.is_, returned, clock.from_inductor))
    return Figures(sum(nodes), first_call, clock.seconds, same)


def main(only: str = "", json_path: Path | None = None) -> int:
    """Measure the programs whose names begin so; the table, and the JSON. Exit status 1 where a mark is missed."""
    chosen = {name: make for name, make in PROGRAMS.items() if name.startswith(only)}
    if not chosen:
        raise BenchError(detail=f"no program begins with {only!r}; there are {', '.join(PROGRAMS)}")
    print(_HEADER)
    missed, cases = 0, list[record.Figures]()
    # Once a process, the backend reads its own sources for the caches' keys; the first program pays for that.
    for name, make in chosen.items():
        torch.manual_seed(0)
        figures = measure(*make())
        function = "Inductor's own" if figures.same_function else "WRAPPED"
        print(
            f"{name:<26}{figures.nodes:>12}{figures.first_call:>10.2f} s{1000 * figures.ours:>9.1f} ms"
            f"{figures.ours / figures.first_call:>8.1%}  {function}",
            flush=True,
        )
        missed += not figures.fine
        parts = {"first call": figures.first_call, "kda": figures.ours}
        cases.append({"name": name, "results": {part: {"run_seconds": seconds} for part, seconds in parts.items()}})
        if json_path is not None:
            record.write(json_path, "overhead", cases, title="First calls, and what the backend takes of them")
    print(f"marks: at most {MOST:.0%} of the first call, and no function around Inductor's")
    return 1 if missed else 0
