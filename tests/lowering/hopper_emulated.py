"""The hand-tuned kernels of the backward pass on torch tensors (``emulated.py``), beside float64, launched as on a GPU.

``python -m tests.lowering.hopper_emulated PART ...``; ``test_hopper_backward.py`` runs all. What Triton kernels do
between the hand-tuned ones is done with torch here.
"""

# pyright: basic

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.lowering import emulated

LANGUAGE = emulated.install()  # before any kernel is imported

from kdacompile.lowering.adjoint import GradientKernels, Gradients  # noqa: E402
from kdacompile.lowering.calls import Call  # noqa: E402
from kdacompile.lowering.hopper.backward_run import HopperBackward  # noqa: E402
from kdacompile.lowering.scratch import Scratch  # noqa: E402
from kdacompile.lowering.triton import backward_run  # noqa: E402
from tests.lowering import peer  # noqa: E402
from tests.lowering.differentiated import (  # noqa: E402
    BOTH,
    call_of,
    check,
    expected,
    given_betas,
    in_runs,
    later_is_ignored,
    plain,
    weights,
)
from tests.ops.cases import TENSORS, Case, make_case  # noqa: E402

PARAMETERS = ("A_log", "dt_bias", "initial_state")
STATE = 5
"""Where the initial state is among a call's operands."""
TOLERANCE = 8e-3


class EmulatedScratch(Scratch):
    def launch(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
        def call(num_warps: int = 0, **given: Any) -> None:
            given = {name: x for name, x in given.items() if name not in ("maxnreg", "launch_pdl")}
            if isinstance(kernel, type(emulated.run)):
                emulated.run(LANGUAGE, kernel, grid, given)
            else:
                _IN_TORCH[kernel.fn.__name__](**{name: x for name, x in given.items() if name not in _OPTIONS})

        return call


_OPTIONS = ("num_stages", "arch")


def _inverse(a_buffer: Tensor, beta_buffer: Tensor, x_buffer: Tensor, BETA: bool, **_: Any) -> None:
    a = a_buffer.double().tril(-1)
    scaled = a * beta_buffer.double()[:, None] if BETA else a
    x_buffer.copy_(torch.linalg.solve(torch.eye(a.shape[-1], dtype=torch.float64) + scaled, a))


def _gather(
    x_ptr: Tensor, partial: Tensor, dx_ptr: Tensor, GROUP: int, L2NORM: bool, l2norm_eps: float, **_: Any
) -> None:
    dy = partial.float().unflatten(2, (-1, GROUP)).sum(3)
    if L2NORM:
        x = x_ptr.float()
        rate = torch.rsqrt((x * x).sum(-1, keepdim=True) + l2norm_eps)
        y = x * rate
        dy = rate * (dy - y * (y * dy).sum(-1, keepdim=True))
    dx_ptr.copy_(dy)


def _offsets(cu_seqlens: Tensor, chunk_offsets: Tensor, C: int, **_: Any) -> None:
    chunk_offsets[0] = 0
    chunk_offsets[1:] = ((cu_seqlens.diff() + C - 1) // C).cumsum(0)


def _add_chunks(
    parts_ptr: Tensor,
    total_ptr: Tensor,
    width: int,
    others_ptr: Tensor,
    other_total_ptr: Tensor,
    other_width: int,
    **_: Any,
) -> None:
    if width:
        total_ptr.copy_(parts_ptr.sum(0))
    if other_width:
        other_total_ptr.copy_(others_ptr.sum(0))


_IN_TORCH = {"inverse": _inverse, "gather": _gather, "add_chunks": _add_chunks, "chunk_offsets_kernel": _offsets}


class Emulated:
    name = "emulated"

    def declines(self, call: Call) -> str | None:
        return None

    def gradients(
        self, call: Call, grad_o: Tensor | None, grad_state: Tensor | None, scratch: Scratch | None = None
    ) -> Gradients:
        poison = scratch is not None and scratch.poison
        return HopperBackward(call, grad_o, grad_state, EmulatedScratch(poison=poison)).run()


KERNELS: GradientKernels = Emulated()


def case_of(length: int = 150, heads: int = 1, groups: int = 1, value_dim: int = 128, **options: Any) -> Case:
    case = make_case(length=length, heads=heads, groups=groups, key_dim=128, value_dim=value_dim, **options)
    return case.with_options(chunk_size=0, scale=128**-0.5)


def rounded(case: Case) -> Case:
    return case.to(torch.bfloat16).with_tensors(**{name: case.tensors[name] for name in PARAMETERS})


def compare(case: Case, used: tuple[str, ...] = BOTH, tolerance: float = TOLERANCE) -> None:
    check(rounded(case), tolerance, used, "cpu", KERNELS)


def gates() -> None:
    for fn in ("sigmoid", "softplus", "logsigmoid"):  # log gates are those of the other parts
        compare(case_of(batch=2, heads=2, length=100, gate_fn=fn))
    compare(case_of(delta=False))
    compare(plain(case_of(batch=1)))


def tokens() -> None:
    """A gate per token or head, or none: norms, V = 64, packed sequences, heads that share keys."""
    for gate, delta in (("token", True), ("head", True), ("none", True), ("token", False), ("none", False)):
        compare(case_of(batch=1, length=100, gate=gate, delta=delta))
        compare(plain(case_of(batch=1, length=70, gate=gate, delta=delta)))
        if gate == "head":
            compare(case_of(batch=1, length=100, gate=gate), ("o",))
    for fn in ("sigmoid", "softplus", "logsigmoid"):
        compare(case_of(batch=1, length=70, gate="token", gate_fn=fn))
    packed = case_of(length=213, batch=1, sequences=4, gate="token")
    compare(replace(packed, cu_seqlens=torch.tensor([0, 33, 33, 98, 213])))
    compare(case_of(length=70, batch=1, groups=2, gate="token", value_dim=64, delta=False))
    compare(case_of(length=70, batch=1, groups=2, gate="token", value_dim=64))


def shapes() -> None:
    """Packed sequences, one of them empty; heads that share keys; strides; no T that is a multiple of anything."""
    packed = case_of(length=213, batch=1, sequences=5)
    compare(replace(packed, cu_seqlens=torch.tensor([0, 33, 33, 98, 212, 213])))
    compare(case_of(length=100, batch=1, groups=2))
    case = case_of(length=70)
    compare(case.with_tensors(**{n: case.tensors[n].mT.contiguous().mT for n in ("q", "k", "v", "g")}))


def groups() -> None:
    """Heads one after the other, in the same buffers."""
    backward_run.LANES = backward_run.TILES = 2
    case = rounded(case_of(length=70, batch=2, heads=2))
    scratch = EmulatedScratch()
    HopperBackward(call_of(case), case.tensors["v"], None, scratch).run()
    backward_run.LANES = 100
    whole = EmulatedScratch()
    HopperBackward(call_of(case), case.tensors["v"], None, whole).run()
    squares = 2 * (8 * 64 * 64) * 2  # bytes of p and x, which lie in the gradients where all heads are one group
    assert 2 * scratch.allocated_bytes == whole.allocated_bytes + squares
    backward_run.LANES = 2
    compare(case)
    case = rounded(case_of(length=970, batch=1, heads=2))  # the first phase of one beside the gradients of the other
    (of_o, of_state), found = weights(case), list[Gradients]()
    for backward_run.LANES in (1, 100):
        found.append(KERNELS.gradients(call_of(case), of_o, of_state, EmulatedScratch(poison=True)))
    for x, y in zip(*found, strict=True):
        assert x is None or (y is not None and torch.equal(x, y))


def runs() -> None:
    """Long sequences by runs of chunks that share buffers, and heads one after the other."""
    in_runs(rounded(case_of(batch=1, length=330)), "cpu", KERNELS, TOLERANCE)
    in_runs(rounded(case_of(length=200, heads=2, gate_fn="softplus")), "cpu", KERNELS, TOLERANCE, groups=2)
    for gate, delta in (("token", True), ("none", False), ("none", True)):
        in_runs(rounded(case_of(batch=1, length=330, gate=gate, delta=delta)), "cpu", KERNELS, TOLERANCE)


def beside() -> None:
    """Gradients in the orders that begin beside the scan: the same bits."""
    for gate, length in (("channel", 1054), ("token", 1088), ("none", 1054)):
        case = rounded(case_of(batch=1, length=length, gate=gate))
        (of_o, of_state), found = weights(case), dict[str, Gradients]()
        for early in ("", "end", "middle"):
            with patch.object(HopperBackward, "_early", lambda self, heads, early=early: early):
                found[early] = KERNELS.gradients(call_of(case), of_o, of_state, EmulatedScratch(poison=True))
        for x, *others in zip(*found.values(), strict=True):
            assert x is None or all(y is not None and torch.equal(x, y) for y in others)
        assert HopperBackward(call_of(case), of_o, of_state, EmulatedScratch())._early(1) == "middle"


def extremes() -> None:
    random = torch.Generator().manual_seed(2)
    for gate, delta in (("channel", True), ("channel", False), ("token", True), ("token", False)):
        case = case_of(batch=1, delta=delta, gate=gate)
        g = case.tensors["g"]
        strong = torch.where(torch.rand(g.shape, generator=random) < 0.2, -1000.0, g)
        compare(case.with_tensors(g=torch.where(torch.rand(g.shape, generator=random) < 0.1, -torch.inf, strong)))
    case = case_of(batch=1, gate_fn="sigmoid").with_options(gate_scale=-5.0)
    compare(case.with_tensors(g=case.tensors["g"] + 20.0), ("o",), 1.5e-2)  # A_log's is next to nothing there
    case = plain(case_of(batch=1, length=100)).with_options(sigmoid_beta=False)
    beta = torch.rand(case.tensors["beta"].shape, generator=random)
    beta[:, ::3], beta[:, 1::3] = 0.0, 1.0
    compare(case.with_tensors(beta=beta))
    compare(case.with_tensors(beta=beta, k=case.tensors["k"][:, :1].expand_as(case.tensors["k"])))


def enlarging() -> None:
    """Normalised keys, and betas some of which enlarge what they meet: what comes before keeps its bits."""
    for gate in ("channel", "token", "none"):
        mild, steep = (rounded(case) for case in given_betas(gate))
        for case in (mild, steep):
            peers = {"g": peer.error_of_gates(case)} if gate == "token" else {}
            check(case, TOLERANCE, BOTH, "cpu", KERNELS, peers)
        of_o = mild.tensors["v"].clone()
        of_o[:, 40:] = 0.0
        steep = steep.with_tensors(initial_state=None)
        beta = steep.tensors["beta"].clone()
        beta[:, 40:44] = 0.5
        tame = steep.with_tensors(beta=beta)
        for x, y in zip(*(KERNELS.gradients(call_of(c), of_o, None) for c in (steep, tame)), strict=True):
            assert x is None or x.dim() < 3 or torch.equal(x[:, :40], y[:, :40])


def draws() -> None:
    """Few tokens, several draws: what all of them together are off by. Beta's gradient is one number a token, which may
    be next to nothing beside the terms it sums: one draw's error is that of its one or two largest."""

    def extreme(seed: int) -> Case:
        random = torch.Generator().manual_seed(seed)
        case = case_of(batch=1, seed=seed)
        g = case.tensors["g"]
        strong = torch.where(torch.rand(g.shape, generator=random) < 0.2, -1000.0, g)
        return case.with_tensors(g=torch.where(torch.rand(g.shape, generator=random) < 0.1, -torch.inf, strong))

    for of in (lambda seed: case_of(length=70, batch=1, groups=2, seed=seed), extreme):
        squares, sizes = dict.fromkeys(TENSORS, 0.0), dict.fromkeys(TENSORS, 1e-30)
        for seed in range(1, 7):
            case = rounded(of(seed))
            given = weights(case)
            want, norms = expected(case, given)
            found = KERNELS.gradients(call_of(case), given[0], given[1])
            for name, x in zip(TENSORS, found, strict=True):
                if x is not None:
                    squares[name] += float((x.double() - want[name]).square().sum())
                    sizes[name] += norms[name] ** 2
        assert max(squares[name] / sizes[name] for name in TENSORS) <= 5e-3**2, (squares, sizes)


def causality() -> None:
    """Earlier gradients do not depend on later tokens, bit for bit; one result alone."""
    for gate, fn in (("channel", "log"), ("channel", "sigmoid"), ("token", "log")):
        later_is_ignored(rounded(case_of(batch=1, length=130, gate=gate, gate_fn=fn)), "cpu", KERNELS)
    weak = case_of(batch=1, length=70)
    weak = weak.with_tensors(g=0.05 * weak.tensors["g"])
    for result in BOTH:
        compare(weak, (result,))


def two_passes() -> None:
    """What is asked of the initial states, then all gradients: those of one pass, bit for bit."""
    packed = replace(case_of(length=100, batch=1, sequences=2), cu_seqlens=torch.tensor([0, 33, 100]))
    for case in map(rounded, (case_of(length=100, batch=2), case_of(length=100, delta=False), packed)):
        call, grad_o = call_of(case), case.tensors["v"]
        assert call.initial_state is not None
        final = [torch.randn_like(call.initial_state.float()) for _ in range(2)]
        expected = [HopperBackward(call, grad_o, grad, EmulatedScratch(poison=True)).run() for grad in final]
        backward = HopperBackward(call, grad_o, None, EmulatedScratch(poison=True))
        backward.ready()
        asked = expected[0][STATE]
        assert asked is not None and torch.equal(backward.asked(final[0]), asked)
        for have, want in zip(backward.gradients(final[1]), expected[1], strict=True):
            assert have is want is None or (have is not None and want is not None and torch.equal(have, want))


PARTS = {
    part.__name__: part
    for part in (gates, tokens, shapes, groups, runs, beside, extremes, enlarging, draws, causality, two_passes)
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        PARTS[name]()
