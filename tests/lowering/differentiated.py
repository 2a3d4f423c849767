"""Gradients of linear attention through a device's kernels, beside those of the float64 recurrence.

``python -m tests.lowering.differentiated PART ...`` runs them in Triton's interpreter, in fp32 (``test_backward.py``
does, with TRITON_INTERPRET=1); ``test_backward_cuda.py`` runs them on a GPU in every dtype.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.lowering.adjoint import GradientKernels
from kdacompile.lowering.calls import Call
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.triton import TritonGradients, backward_run
from kdacompile.lowering.triton.backward_run import Backward
from kdacompile.lowering.triton.backward_schedule import Schedule, schedule
from tests.ops import cases

KERNELS = TritonGradients()
BOTH = ("o", "final_state")


def call_of(case: cases.Case) -> Call:
    """An op's case as kernels receive it."""
    options = {name: value for name, value in case.options.items() if name != "out_dtype"}
    tensors = {name: case.tensors[name] for name in cases.TENSORS}
    return Call(**tensors, cu_seqlens=case.cu_seqlens, out_dtype=case.tensors["v"].dtype, **options)


def weights(case: cases.Case, used: tuple[str, ...] = BOTH) -> list[Tensor | None]:
    """Gradients of the results; None for one that is not used."""
    call, random = call_of(case), torch.Generator().manual_seed(99)
    found = [torch.randn(shape, generator=random).to(dtype) for shape, dtype in call.results]
    return [w if name in used else None for w, name in zip(found, BOTH, strict=True)]


def expected(case: cases.Case, given: list[Tensor | None]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """By autograd of the recurrence in float64, zeros where nothing depends on a tensor; and what errors count against.

    That is a gradient's norm. One number a head (A_log, a gate per head) is a sum over all tokens that may cancel to
    nothing: there it is at least the norm of what is summed. A gate per head beside a gradient of the final state, 10^4
    random numbers of which decay leaves a part in 10^3, counts against its gradient without decay.
    """
    leaves = {n: None if x is None else x.double() for n, x in case.tensors.items()}
    tokens = case.tensors["v"].shape[:2]
    summed = [n for n in ("A_log", "g") if (x := leaves[n]) is not None and x.dim() == 1]
    leaves |= {n: x.expand(*tokens, -1).contiguous() for n in summed if (x := leaves[n]) is not None}
    present = {n: x.requires_grad_() for n, x in leaves.items() if x is not None}
    results = cases.oracle(replace(case, tensors=leaves))
    loss = sum((x * w.double()).sum() for x, w in zip(results, given, strict=True) if w is not None)
    found = torch.autograd.grad(loss, list(present.values()), allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
    terms = dict(zip(present, found, strict=True))
    want = {n: x.sum((0, 1)) if n in summed else x for n, x in terms.items()}
    sizes = {n: max(float(want[n].norm()), float(terms[n].norm())) for n in want}
    if "g" in summed and given[1] is not None and case.tensors["g"].any():
        still = case.with_tensors(g=torch.zeros_like(case.tensors["g"]))
        sizes["g"] = expected(still, given)[1]["g"]
    return want, sizes


def check(
    case: cases.Case,
    tolerance: float = 2e-6,
    used: tuple[str, ...] = BOTH,
    device: str = "cpu",
    kernels: GradientKernels = KERNELS,
    peers: dict[str, float] | None = None,
) -> dict[str, Tensor]:
    """The kernels' gradients, NaN in every buffer: as float64 has them; on a GPU, whose blocks run in any order, the
    same bits twice. ``peers``: errors of others on the same inputs, below which ours may be too."""
    given = weights(case, used)
    want, sizes = expected(case, given)
    there = replace(
        case,
        tensors={n: None if x is None else x.to(device) for n, x in case.tensors.items()},
        cu_seqlens=None if case.cu_seqlens is None else case.cu_seqlens.to(device),
    )
    of_o, of_state = (None if w is None else w.to(device) for w in given)
    found = kernels.gradients(call_of(there), of_o, of_state, Scratch(poison=True))
    again = found if device == "cpu" else kernels.gradients(call_of(there), of_o, of_state)
    have: dict[str, Tensor] = {}
    for name, x, same in zip(cases.TENSORS, found, again, strict=True):
        if case.tensors[name] is None:
            assert x is None, name
            continue
        assert x is not None and same is not None, name
        assert x.dtype == case.tensors[name].dtype and x.is_contiguous() and torch.equal(x, same), name
        difference = float((x.cpu().double() - want[name]).norm())
        error = difference / (sizes[name] or 1.0)
        assert error <= max(tolerance, (peers or {}).get(name, 0.0)), (name, error, case.options)
        have[name] = x.cpu()
    return have


def plain(case: cases.Case) -> cases.Case:
    """The case with keys that are normalised before the op."""
    keys = F.normalize(case.tensors["k"], dim=-1)
    return case.with_tensors(k=keys).with_options(qk_l2norm_eps=0.0)


def given_betas(gate: str) -> list[cases.Case]:
    """70 tokens, keys normalised by the op and betas as they are: below 1, and some that enlarge what they meet.

    With a gate per token most of g's gradient comes from that of the final state, whose terms nearly cancel in the
    first of these draws: beside ungated ones, which count 2000, it is 1.7 (4 to 19 in others). There errors count
    against those of FLA's kernels.
    """
    case = cases.make_case(batch=1, length=70, heads=1, key_dim=128, value_dim=128, gate=gate)
    case = case.with_options(chunk_size=0, scale=128**-0.5, sigmoid_beta=False)
    mild = torch.rand(case.tensors["beta"].shape, generator=torch.Generator().manual_seed(3))
    steep = mild.clone()
    steep[:, 40:44], steep[:, 66] = 2.5, -1.0
    return [case.with_tensors(beta=beta) for beta in (mild, steep)]


def rows() -> None:
    """Every row; packed, with an empty sequence; one result alone."""
    for gate, delta in ROWS:
        check(cases.make_case(gate=gate, delta=delta, length=37, batch=1, heads=1))
    case = cases.make_case(batch=1, length=36, sequences=3, heads=1)
    check(replace(case, cu_seqlens=torch.tensor([0, 17, 17, 36])))
    # Weaker gates: what comes through all tokens is the exponential of their sum, whose rounding grows with it.
    case = cases.make_case(length=19, batch=1, heads=1)
    case = case.with_tensors(g=case.tensors["g"] / 4)
    for result in BOTH:
        check(case, 5e-6, (result,))


def preparations() -> None:
    """Every gate function, optional tensors, and keys as they come."""
    for fn in cases.GATE_FNS:
        for gate in ("token", "channel"):
            check(cases.make_case(gate=gate, gate_fn=fn, length=19, batch=1, heads=1, groups=1, key_dim=20))
    for missing in ("beta", "initial_state", "A_log", "dt_bias"):
        check(cases.make_case(gate_fn="softplus", length=17, batch=1, heads=1).with_tensors(**{missing: None}))
    check(plain(cases.make_case(length=17, heads=2, groups=1)).with_options(sigmoid_beta=False))


def extremes() -> None:
    """beta = 0 and 1, equal keys, gates of -1000 and -inf, factors of 0: gradients are there, right and finite."""
    case = plain(cases.make_case(length=35, heads=1)).with_options(sigmoid_beta=False, chunk_size=32)
    beta = torch.rand(case.tensors["beta"].shape)
    beta[:, ::3], beta[:, 1::3] = 0.0, 1.0
    equal = case.tensors["k"][:, :1].expand_as(case.tensors["k"])
    check(case.with_tensors(beta=beta))
    check(case.with_tensors(beta=beta, k=equal), 5e-6)
    random = torch.Generator().manual_seed(1)
    for gate in ("channel", "token"):
        case = cases.make_case(gate=gate, length=35, heads=1).with_options(chunk_size=32)
        g = case.tensors["g"]
        strong = torch.where(torch.rand(g.shape, generator=random) < 0.2, -1000.0, g)
        check(case.with_tensors(g=torch.where(torch.rand(g.shape, generator=random) < 0.1, -torch.inf, strong)))
        case = cases.make_case(gate=gate, gate_fn="factor", length=35, heads=1).with_options(chunk_size=32)
        g = case.tensors["g"]
        check(case.with_tensors(g=torch.where(torch.rand(g.shape, generator=random) < 0.15, 0.0, g)))


def _as_of_bf16(key_width: int, value_width: int, length: int, item: int, **options: Any) -> Schedule:
    return schedule(key_width, value_width, length, 2, **options)


@patch.object(Backward, "_exact", lambda self: self._call.gate_fn == "factor")
@patch.object(backward_run, "schedule", _as_of_bf16)
def blocks() -> None:
    """What bf16 takes with a gate per channel, here in fp32 and in its chunks: exact for mild gates, and for strong
    ones to what a log gate counts as inside of 16 tokens at least, 2e-4 of an undecayed term."""

    def made(**options: Any) -> cases.Case:
        given: dict[str, Any] = {"batch": 1, "heads": 1, "key_dim": 32} | options
        return cases.make_case(**given).with_options(chunk_size=0)

    for fn, length in (("sigmoid", 70), ("softplus", 70), ("sigmoid", 10), ("sigmoid", 25), ("log", 25)):
        check(made(gate_fn=fn, length=length), 2e-5)
    check(made(gate_fn="sigmoid", length=40).with_options(gate_scale=-8.0), 2e-5)  # a bound over 16 tokens, not over 32
    check(made(delta=False, gate_fn="logsigmoid", length=70, key_dim=40), 2e-5)
    random = torch.Generator().manual_seed(1)
    case = made(gate_fn="log", length=70)
    g = case.tensors["g"]
    strong = torch.where(torch.rand(g.shape, generator=random) < 0.2, -1000.0, g)
    check(case.with_tensors(g=torch.where(torch.rand(g.shape, generator=random) < 0.1, -torch.inf, strong)), 2e-4)
    later_is_ignored(made(gate_fn="softplus", length=70), "cpu")


def shapes() -> None:
    """Widths that are no power of two, grouped heads, strides, expanded gradients, causality."""
    for width, columns in ((40, 72), (16, 80)):
        check(cases.make_case(length=35, batch=1, heads=1, groups=2, key_dim=width, value_dim=columns))
    case = cases.make_case(length=20)
    permuted = {n: case.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "g")}
    check(case.with_tensors(**permuted))
    call = call_of(case)
    ones = torch.ones(()).expand(call.v.shape)
    for x, y in zip(KERNELS.gradients(call, ones, None), KERNELS.gradients(call, ones.clone(), None), strict=True):
        assert x is None or (y is not None and torch.equal(x, y))
    later_is_ignored(case, "cpu")


def later_is_ignored(case: cases.Case, device: str, kernels: GradientKernels = KERNELS) -> None:
    """Gradients of a prefix, whose loss reads no later token, do not depend on what comes later, bit for bit."""
    length = case.tensors["q"].shape[1]
    seen = length // 2 + 1
    names = ("q", "k", "v", "g", "beta")
    weight, _ = weights(case)
    assert weight is not None
    weight = torch.cat([weight[:, :seen], torch.zeros_like(weight[:, seen:])], 1).to(device)
    here = case.with_tensors(**{n: None if x is None else x.to(device) for n, x in case.tensors.items()})
    moved = {n: torch.cat([x[:, :seen], 3 * x[:, seen:]], 1) for n in names if (x := here.tensors[n]) is not None}
    some, others = (kernels.gradients(call_of(c), weight, None) for c in (here, here.with_tensors(**moved)))
    for x, y in zip(some[:5], others[:5], strict=True):
        assert x is None or (y is not None and torch.equal(x[:, :seen], y[:, :seen]))


def runs() -> None:
    """Long sequences by runs of chunks that share buffers, and heads one after the other."""
    in_runs(cases.make_case(batch=1, length=75, heads=1), "cpu")
    in_runs(cases.make_case(gate="token", length=40, heads=1).with_tensors(initial_state=None), "cpu")
    in_runs(cases.make_case(gate="head", delta=False, length=40, heads=2, groups=1), "cpu", groups=2)


def in_runs(
    case: cases.Case, device: str, kernels: GradientKernels = KERNELS, tolerance: float = 2e-6, groups: int = 1
) -> None:
    """Gradients by runs of two chunks, which are made ready once or twice: right, and the bits of those at once.

    What is summed over the chunks of several sequences is so in another order.
    """
    of_o, of_state = (None if w is None else w.to(device) for w in weights(case))
    call = call_of(case.with_tensors(**{n: None if x is None else x.to(device) for n, x in case.tensors.items()}))
    summed = [(x is not None and x.dim() == 1) or n == "dt_bias" for n, x in case.tensors.items()]
    for given in ((of_o, of_state), (of_o, None), (None, of_state)):
        at_once = kernels.gradients(call, *given, Scratch(poison=True))
        for room in (2**40, 0):
            cut = patch.object(Backward, "_cut", lambda self: (self._heads // groups, 2))
            with cut, patch.object(backward_run, "MOST", room):
                found = kernels.gradients(call, *given, Scratch(poison=True))
                if given[0] is not None and given[1] is not None and room:
                    check(case, tolerance, device=device, kernels=kernels)
            for x, y, over in zip(found, at_once, summed, strict=True):
                if x is not None and y is not None and over and case.tensors["q"].shape[0] > 1:
                    assert torch.allclose(x, y, rtol=1e-4, atol=1e-4 * float(y.abs().max()))
                else:
                    assert x is y is None or (x is not None and y is not None and torch.equal(x, y))


def a_long_sequence(kernels: GradientKernels, tolerance: float) -> None:
    """65,536 tokens of 32 heads of 128, on a GPU: documents that gates of -1000 cut off have the gradients they have
    alone, by the float64 recurrence, and buffers take 1 GiB at most."""
    alone, length = 128, 65536
    case = cases.make_case(batch=1, length=alone, heads=32, groups=1, key_dim=128, value_dim=128)
    case = plain(case).with_options(chunk_size=0, scale=128**-0.5).with_tensors(initial_state=None)
    random = torch.Generator("cuda").manual_seed(1)
    names = [n for n, x in case.tensors.items() if x is not None]
    long = {n: torch.empty(1, length, *case.tensors[n].shape[2:], device="cuda").bfloat16() for n in names}
    for x in long.values():
        x.normal_(generator=random)
    long["k"], long["g"] = F.normalize(long["k"], dim=-1), -0.05 * long["g"].abs()
    long["g"][:, ::alone] = -1000.0
    weight = torch.empty_like(long["v"]).normal_(generator=random)
    call = call_of(case.with_tensors(**long))
    kernels.gradients(call, weight, None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Tensor | None] = dict(zip(cases.TENSORS, kernels.gradients(call, weight, None), strict=True))
    kept = sum(x.nbytes for x in found.values() if x is not None)
    assert torch.cuda.max_memory_allocated() - before - kept <= 2**30
    for start in (0, length // 2 - alone, length - alone):
        part = {n: x[:, start : start + alone].cpu() for n, x in long.items()}
        want, sizes = expected(case.with_tensors(**part), [weight[:, start : start + alone].cpu(), None])
        for name in names:
            x = found[name]
            assert x is not None
            difference = float((x[:, start : start + alone].cpu().double() - want[name]).norm())
            assert difference <= tolerance * sizes[name], (name, start, difference / sizes[name])


SIXTEEN = (1, 2, 5, 0, 16, 17, 31, 64, 65, 100, 3, 127, 128, 129, 200, 12)
"""Lengths of packed sequences, 900 tokens."""


def packed(case: cases.Case) -> cases.Case:
    """A case of as many tokens and states as ``SIXTEEN`` says."""
    return replace(case, cu_seqlens=torch.tensor([0, *accumulate(SIXTEEN)]))


PARTS = {
    "rows": rows, "preparations": preparations, "extremes": extremes, "blocks": blocks, "shapes": shapes, "runs": runs,
}  # fmt: skip

if __name__ == "__main__":
    for part in sys.argv[1:]:
        PARTS[part]()
