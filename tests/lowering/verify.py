"""One way to check an implementation: the executor, an emitted kernel or a hand-tuned stage alike.

The implementation runs with every scratch buffer filled with NaN, so that a read before a write reaches the result; its
outputs are compared with the fp64 token recurrence, which shares no code with any implementation; and what it allocated
is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.calls import Implementation as Kernels
from kdacompile.lowering.run import choose_chunk, run_executor
from kdacompile.lowering.scratch import Scratch
from kdacompile.patterns.recurrence.definition import token_recurrence

Implementation = Callable[[Call, Scratch], tuple[Tensor, Tensor]]


class VerificationError(AssertionError):
    """An implementation failed :func:`verify`."""


@dataclass(frozen=True)
class Case:
    """One input of the family.

    ``strength``: "mild"; "strong" mixes gates of -1000 in; "reset" mixes decays of exactly 0 in. ``lengths`` packs
    sequences of these lengths into one batch entry (their sum replaces ``length``).
    """

    gate: str
    delta: bool
    length: int = 100
    batch: int = 2
    heads: int = 2
    value_heads: int = 2
    key_width: int = 32
    value_width: int = 32
    dtype: torch.dtype = torch.float32
    gate_form: str = "log"
    strength: str = "mild"
    beta: bool = True
    initial_state: bool = True
    lengths: tuple[int, ...] | None = None
    chunk_size: int = 0
    scale: float = 0.25
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Verdict:
    """Relative RMS errors against the oracle, and the bytes of scratch the implementation asked for."""

    output_error: float
    state_error: float
    scratch_bytes: int


def make_inputs(case: Case) -> Call:
    """A call with random operands: unit keys, gates of the case's strength, on the case's device."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, length = (1, sum(case.lengths)) if case.lengths is not None else (case.batch, case.length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def ready(x: Tensor) -> Tensor:
        return x.to(device=case.device, dtype=case.dtype)

    keys = torch.nn.functional.normalize(normal(batch, length, case.heads, case.key_width), dim=-1)
    cu_seqlens, sequences = None, batch
    if case.lengths is not None:
        sequences = len(case.lengths)
        cu_seqlens = torch.tensor([0, *case.lengths], device=case.device).cumsum(0)
    state = normal(sequences, case.value_heads, case.key_width, case.value_width)
    g = _gates(case, batch, length, generator)
    return Call(
        ready(normal(batch, length, case.heads, case.key_width)),
        ready(keys),
        ready(normal(batch, length, case.value_heads, case.value_width)),
        None if g is None else ready(g.exp() if case.gate_form == "factor" else g),
        ready(torch.rand(batch, length, case.value_heads, generator=generator)) if case.beta else None,
        ready(state) if case.initial_state else None,
        cu_seqlens=cu_seqlens,
        scale=case.scale,
        delta=case.delta,
        gate=case.gate,
        gate_fn=case.gate_form,
        chunk_size=case.chunk_size,
    )


def _gates(case: Case, batch: int, length: int, generator: torch.Generator) -> Tensor | None:
    if case.gate == "none":
        return None
    per_token = (batch, length, case.value_heads)
    shapes = {"head": (case.value_heads,), "token": per_token, "channel": (*per_token, case.key_width)}
    shape = shapes[case.gate]
    g = -0.1 * torch.rand(shape, generator=generator, dtype=torch.float64)
    if case.strength != "mild":
        hit = torch.rand(shape, generator=generator) < 0.15
        g = g.masked_fill(hit, -1000.0 if case.strength == "strong" else -torch.inf)
    return g


def oracle(case: Case, inputs: Call) -> tuple[Tensor, Tensor]:
    """The fp64 token recurrence on a case's inputs."""
    decay = inputs.g
    if decay is not None:
        decay = decay.double() if case.gate_form == "factor" else decay.double().exp()
        decay = decay if case.gate == "channel" else decay.unsqueeze(-1)
    if case.lengths is None:
        return token_recurrence(
            inputs.q, inputs.k, inputs.v, decay, inputs.beta, inputs.initial_state, delta=case.delta, scale=case.scale
        )
    outputs, states = [], []
    start = 0
    for i, length in enumerate(case.lengths):
        span = slice(start, start + length)
        q, k, v = (x[:, span] for x in (inputs.q, inputs.k, inputs.v))
        local = decay if decay is None or case.gate == "head" else decay[:, span]
        beta = None if inputs.beta is None else inputs.beta[:, span]
        init = None if inputs.initial_state is None else inputs.initial_state[i : i + 1]
        o, state = token_recurrence(q, k, v, local, beta, init, delta=case.delta, scale=case.scale)
        outputs.append(o)
        states.append(state)
        start += length
    return torch.cat(outputs, 1), torch.cat(states)


def as_implementation(kernels: Kernels) -> Implementation:
    """A device's kernels in the form that :func:`verify` calls."""

    def implementation(call: Call, scratch: Scratch) -> tuple[Tensor, Tensor]:
        reason = kernels.declines(call)
        if reason is not None:
            raise VerificationError(f"{kernels.name} declines: {reason}")
        return kernels.run(call, scratch)

    return implementation


def executor(call: Call, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """The torch executor, which allocates through torch alone."""
    return run_executor(call, choose_chunk(call.chunk_size, call.q.shape[1], call.q.device))


def relative_error(x: Tensor, reference: Tensor) -> float:
    """Relative RMS error; the absolute one where the reference is zero."""
    difference = (x.double() - reference).square().sum().sqrt().item()
    norm = reference.square().sum().sqrt().item()
    return difference / norm if norm else difference


def verify(
    implementation: Implementation, case: Case, *, tolerance: float, scratch_bytes: int | None = None
) -> Verdict:
    """Run ``implementation`` (such as ``executor``) on a case; a :class:`VerificationError` if it fails.

    ``scratch_bytes`` is the plan's figure, compared exactly when given: a plan that kernels do not follow is a defect.
    """
    inputs = make_inputs(case)
    scratch = Scratch(poison=True)
    o, state = implementation(inputs, scratch)
    expected_o, expected_state = oracle(case, inputs)
    if o.shape != expected_o.shape or state.shape != expected_state.shape:
        raise VerificationError(f"shapes {tuple(o.shape)}, {tuple(state.shape)} are wrong for {case}")
    verdict = Verdict(relative_error(o, expected_o), relative_error(state, expected_state), scratch.allocated_bytes)
    worst = max(verdict.output_error, verdict.state_error)
    if not worst <= tolerance:  # NaN fails too
        raise VerificationError(f"error {worst:.3g} above {tolerance:.3g} for {case}")
    if scratch_bytes is not None and verdict.scratch_bytes != scratch_bytes:
        raise VerificationError(f"{verdict.scratch_bytes} bytes of scratch, the plan says {scratch_bytes}")
    return verdict
