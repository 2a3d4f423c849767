"""Emitted kernels in Triton's interpreter, in fp32: ``python -m tests.lowering.interpreted PART ...``.

Run by ``test_triton.py`` with TRITON_INTERPRET=1. The interpreter is slow and its bf16 is wrong, so shapes are small
and fp32; 16-bit inputs are tested on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from kdacompile.lowering.gates import GATE_FUNCTIONS, log_decay, slopes
from kdacompile.lowering.linear_attention import ROWS
from kdacompile.lowering.scratch import Scratch
from kdacompile.lowering.triton import TritonKernels
from kdacompile.lowering.triton import run as launch
from kdacompile.lowering.triton.load import load_source
from tests.lowering.differentiated import call_of
from tests.lowering.planned import triton_scratch
from tests.lowering.verify import Case, as_implementation, relative_error, verify
from tests.ops import cases

KERNELS = TritonKernels()
TOLERANCE = 2e-6


def check(outputs: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: object) -> None:
    errors = [relative_error(*pair) for pair in zip(outputs, expected, strict=True)]
    if not max(errors) <= TOLERANCE:
        raise AssertionError(f"{what}: errors {errors}")


def rows() -> None:
    """Every row, with NaN in every scratch buffer, of which there is as much as planned; packed, strong gates."""
    implementation = as_implementation(KERNELS)
    for gate, delta in ROWS:
        cases = [Case(gate, delta, lengths=(19, 0, 33), heads=1)]
        for strength in ("strong", "reset") if gate != "none" else ():
            cases.append(Case(gate, delta, 40, batch=1, heads=1, strength=strength, gate_form="factor"))
        for case in cases:
            verify(implementation, case, tolerance=TOLERANCE, scratch_bytes=triton_scratch(case))


def preparations() -> None:
    """Every gate function, l2norm, sigmoid of beta, optional tensors."""
    for fn in cases.GATE_FNS:
        for gate in ("token", "channel"):
            case = cases.make_case(gate=gate, gate_fn=fn, length=20, batch=1, heads=1, key_dim=20, value_dim=18)
            check(KERNELS.run(call_of(case), Scratch(poison=True)), cases.oracle(case), (fn, gate))
    for missing in ("beta", "initial_state", "A_log", "dt_bias"):
        case = cases.make_case(gate_fn="softplus", length=17, batch=1, heads=1).with_tensors(**{missing: None})
        check(KERNELS.run(call_of(case)), cases.oracle(case), missing)


def bounds() -> None:
    """Gates that are known to be bounded, in blocks of a chunk's tokens or of half of them, also all at their bound."""
    for gate_scale in (-5.0, -8.0):
        for delta in (True, False):
            case = cases.make_case(
                gate_fn="sigmoid", delta=delta, length=50, batch=1, heads=1, key_dim=20, value_dim=18
            )
            case = case.with_options(gate_scale=gate_scale, chunk_size=32)
            check(KERNELS.run(call_of(case), Scratch(poison=True)), cases.oracle(case), gate_scale)
            strongest = case.with_tensors(g=torch.full_like(case.tensors["g"], 50.0))
            check(KERNELS.run(call_of(strongest)), cases.oracle(strongest), f"all at {gate_scale}")


@patch.object(launch, "_bounded_block", lambda call: 0)
def limits() -> None:
    """What bf16 takes where no bound is known, here in fp32: exact for mild gates, and for strong ones to 6e-5."""
    for delta in (True, False):
        case = cases.make_case(delta=delta, length=50, batch=1, heads=1, key_dim=20).with_options(chunk_size=32)
        check(KERNELS.run(call_of(case), Scratch(poison=True)), cases.oracle(case), "mild")
        strong = torch.where(torch.rand(case.tensors["g"].shape) < 0.2, -1000.0, case.tensors["g"])
        case = case.with_tensors(g=strong)
        for x, y in zip(KERNELS.run(call_of(case)), cases.oracle(case), strict=True):
            assert relative_error(x, y) < 2e-4


def steps() -> None:
    """The one-token kernel, into fresh memory and in place, in both layouts of the state."""
    for gate, fn in (("none", "log"), *((gate, fn) for gate in cases.GATES[1:] for fn in cases.GATE_FNS)):
        for delta in (True, False):
            case = cases.make_case(gate=gate, gate_fn=fn, delta=delta, length=1, key_dim=20, value_dim=18)
            expected = cases.oracle(case)
            check(KERNELS.step(call_of(case), None), expected, (gate, fn, delta))
    case = cases.make_case(length=1)
    state = case.tensors["initial_state"].mT.contiguous().mT
    call = call_of(case.with_tensors(initial_state=state))
    o, new_state = KERNELS.step(call, state)
    assert new_state is state
    check((o, state), cases.oracle(case), "in place")
    without = case.with_tensors(initial_state=None)
    check(KERNELS.step(call_of(without), None), cases.oracle(without), "no state")


def pools() -> None:
    """Steps on slots of a pool in both layouts: padding gives zeros, and what is not named stays as it is."""
    for gate, delta in (("channel", True), ("none", False)):
        for turned in (False, True):
            case = cases.make_case(gate=gate, delta=delta, length=1, batch=4, key_dim=20, value_dim=18)
            indices, live, places = torch.tensor([3, -1, 0, 7], dtype=torch.int32), [0, 2], [3, 0]
            pool = torch.full((6, *case.tensors["initial_state"].shape[1:]), 7.0)
            pool = pool.mT.contiguous().mT if turned else pool
            pool[places] = case.tensors["initial_state"][live]
            o, state = cases.oracle(case)
            case.tensors["v"][1] = float("nan")
            call = replace(call_of(case), initial_state=pool, state_indices=indices)
            found, _ = KERNELS.step(call, pool)
            check((found[live], pool[places]), (o[live], state[live]), (gate, turned))
            assert bool((found[[1, 3]] == 0).all()) and bool((pool[[1, 2, 4, 5]] == 7).all())


def shapes() -> None:
    """Widths that are no power of two, more than one block of K and V, grouped heads, strides, causality."""
    for width, columns in ((40, 72), (16, 80)):
        case = cases.make_case(length=35, batch=1, heads=1, groups=2, key_dim=width, value_dim=columns)
        check(KERNELS.run(call_of(case), Scratch(poison=True)), cases.oracle(case), (width, columns))
    case = cases.make_case(length=20)
    permuted = {n: case.tensors[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "g")}
    call = call_of(case.with_tensors(**permuted))
    o, state = KERNELS.run(call)
    check((o, state), cases.oracle(case), "strides")
    later = {n: torch.cat([case.tensors[n][:, :11], 9 * case.tensors[n][:, 11:]], 1) for n in ("q", "k", "v", "beta")}
    assert torch.equal(KERNELS.run(call_of(case.with_tensors(**later)))[0][:, :11], o[:, :11])


def gates() -> None:
    """Every gate function and its derivatives in Triton, against the table's formulas in float64."""
    from kdacompile.lowering.triton import macros

    kernel = load_source("gates_probe", PROBE).probe
    x, rate, scale = torch.linspace(-30.0, 30.0, 256), 1.3, {"lower bound": -4.0}
    for name, function in GATE_FUNCTIONS.items():
        at = x.sigmoid() if name == "factor" else x
        gate_scale = scale.get(function.scale, 0.4)
        out = [torch.full_like(x, float("nan")) for _ in range(3)]
        kernel[(1,)](at, *out, rate, gate_scale, FN=name, N=256)
        wide = at.double()
        want = (log_decay(wide, rate, name, gate_scale), *slopes(wide, rate, name, gate_scale))
        floor = float(macros.LOG_FLOOR.value)
        check((out[0], out[1]), (want[0].clamp(min=floor), want[1]), name)
        assert torch.allclose(out[2].double(), want[2], rtol=1e-4, atol=1e-6), name


PROBE = """
import triton
import triton.language as tl

from kdacompile.lowering.triton.macros import gate_slopes, log_gate


@triton.jit
def probe(x, d, by_x, by_rate, rate, gate_scale, FN: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = tl.load(x + i)
    tl.store(d + i, log_gate(at, rate, FN, gate_scale))
    first, second = gate_slopes(at, rate, FN, gate_scale)
    tl.store(by_x + i, first)
    tl.store(by_rate + i, second)
"""

PARTS = {
    "gates": gates,
    "rows": rows, "preparations": preparations, "bounds": bounds, "limits": limits, "steps": steps, "pools": pools,
    "shapes": shapes,
}  # fmt: skip

if __name__ == "__main__":
    for part in sys.argv[1:]:
        PARTS[part]()
