"""Random operands for every member of the family, and the float64 answer the ops must give for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.lowering.gates import GATE_FUNCTIONS
from kdacompile.patterns.recurrence.definition import token_recurrence

GATES = ("none", "head", "token", "channel")
GATE_FNS = tuple(GATE_FUNCTIONS)
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


@dataclass(frozen=True)
class Case:
    """The tensors of one call and its options, named as in the op's schema."""

    tensors: dict[str, Any]  # each a Tensor, or None where the op allows it
    options: dict[str, Any]
    cu_seqlens: Tensor | None = None

    def with_tensors(self, **tensors: Tensor | None) -> Case:
        return replace(self, tensors={**self.tensors, **tensors})

    def with_options(self, **options: Any) -> Case:
        return replace(self, options={**self.options, **options})

    def to(self, dtype: torch.dtype) -> Case:
        return replace(self, tensors={n: None if x is None else x.to(dtype) for n, x in self.tensors.items()})

    @property
    def positional(self) -> tuple[Any, ...]:
        return tuple(self.tensors[name] for name in TENSORS)

    def run(self) -> tuple[Tensor, Tensor]:
        return torch.ops.kdacompile.linear_attention(*self.positional, self.cu_seqlens, **self.options)

    def run_step(self) -> tuple[Tensor, Tensor]:
        options = {name: value for name, value in self.options.items() if name != "chunk_size"}
        return torch.ops.kdacompile.linear_attention_step(*self.positional, **options)


def make_case(
    *,
    gate: str = "channel",
    gate_fn: str = "log",
    delta: bool = True,
    batch: int = 2,
    length: int = 7,
    heads: int = 2,
    groups: int = 2,
    key_dim: int = 5,
    value_dim: int = 3,
    sequences: int | None = None,
    seed: int = 0,
) -> Case:
    """A case with every optional tensor the gate allows; float32, values of unit size, keys normalised by the op."""
    random = torch.Generator().manual_seed(seed)
    value_heads = heads * groups

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    shapes = {"head": (), "token": (batch, length), "channel": (batch, length)}
    tail = (value_heads, key_dim) if gate == "channel" else (value_heads,)
    g = None if gate == "none" else normal(*shapes[gate], *tail)
    if g is not None and gate_fn == "log":
        g = -g.abs()
    if g is not None and gate_fn == "factor":
        g = torch.sigmoid(g)
    parametric = gate != "none" and GATE_FUNCTIONS[gate_fn].parametric
    return Case(
        {
            "q": normal(batch, length, heads, key_dim),
            "k": normal(batch, length, heads, key_dim),
            "v": normal(batch, length, value_heads, value_dim),
            "g": g,
            "beta": normal(batch, length, value_heads),
            "initial_state": normal(sequences or batch, value_heads, key_dim, value_dim),
            "A_log": 0.3 * normal(value_heads) if parametric else None,
            "dt_bias": normal(*tail) if parametric else None,
        },
        {
            "scale": 0.7,
            "delta": delta,
            "gate": gate,
            "gate_fn": gate_fn,
            "gate_scale": -2.0 if GATE_FUNCTIONS[gate_fn].scale == "lower bound" else 0.25,
            "sigmoid_beta": True,
            "qk_l2norm_eps": 1e-6,
            "out_dtype": None,
            "chunk_size": 16,
        },
    )


def decay_factor(case: Case) -> Tensor | None:
    """exp of the log decay in float64, broadcastable to ``[B, T, HV, K]``."""
    g, A_log, dt_bias = (_double(case.tensors[name]) for name in ("g", "A_log", "dt_bias"))
    if g is None:
        return None
    per_channel = case.options["gate"] == "channel"
    rate = torch.ones((), dtype=torch.float64) if A_log is None else A_log.exp()
    if per_channel and A_log is not None:
        rate = rate[..., None]
    shifted = g if dt_bias is None else g + dt_bias
    gate_scale = case.options["gate_scale"]
    factor = {
        "log": lambda: g.exp(),
        "factor": lambda: g,
        "softplus": lambda: torch.exp(-rate * torch.log1p(shifted.exp())),
        "sigmoid": lambda: torch.exp(gate_scale * torch.sigmoid(rate * shifted)),
        "logsigmoid": lambda: torch.sigmoid(g) ** gate_scale,
    }[case.options["gate_fn"]]()
    return factor if per_channel else factor[..., None]


def oracle(case: Case) -> tuple[Tensor, Tensor]:
    """The float64 token recurrence on the case, sequence by sequence where it is packed; differentiable."""
    q, k, v, beta, state = (_double(case.tensors[name]) for name in ("q", "k", "v", "beta", "initial_state"))
    eps = case.options["qk_l2norm_eps"]
    if eps:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps) for x in (q, k))
    if beta is not None and case.options["sigmoid_beta"]:
        beta = torch.sigmoid(beta)
    decay = decay_factor(case)
    length = q.shape[1]
    bounds = [0, length] if case.cu_seqlens is None else case.cu_seqlens.tolist()
    outputs, states = [], []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        own_state = state if state is None or case.cu_seqlens is None else state[i : i + 1]
        o, final = token_recurrence(
            q[:, start:end],
            k[:, start:end],
            v[:, start:end],
            _tokens(decay, start, end),
            None if beta is None else beta[:, start:end],
            own_state,
            delta=case.options["delta"],
            scale=case.options["scale"],
        )
        outputs.append(o)
        states.append(final)
    return torch.cat(outputs, dim=1), torch.cat(states, dim=0)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|."""
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], bound: float) -> None:
    errors = [relative_error(a.detach(), e.detach()) for a, e in zip(actual, expected, strict=True)]
    assert all(error <= bound for error in errors), f"relative errors {errors} exceed {bound}"


def gelu_mix(x: Tensor) -> Tensor:
    """Something for a compiler to fuse around an op."""
    return F.gelu(x) + x


def _double(x: Any) -> Any:
    return None if x is None else x.double()


def _tokens(decay: Tensor | None, start: int, end: int) -> Tensor | None:
    return decay[:, start:end] if decay is not None and decay.dim() == 4 else decay
