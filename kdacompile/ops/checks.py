"""Validation of the ops' arguments: everything the schema does not already guarantee, checked once per call.

The same checks run in the kernels (real sizes) and in the fakes. In a fake a size may be symbolic, and comparing it
would put a guard on the user's graph: there only sizes that are plain integers are compared (``symbolic=True``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kdacompile.ops.errors import (
    CuSeqlensError,
    DeviceError,
    DtypeError,
    GateError,
    GateParameterError,
    HeadGroupError,
    OptionError,
    RankError,
    SizeError,
    StateError,
    StepLengthError,
)

GATES = ("none", "head", "token", "channel")
GATE_FNS = ("log", "factor", "softplus", "sigmoid", "logsigmoid")
PARAMETRIC_GATE_FNS = ("softplus", "sigmoid")  # those that read A_log and dt_bias

FLOATS = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
FLOAT_NAMES = "bfloat16, float16, float32 or float64"

Size = int | torch.SymInt
Shape = Sequence[Size]


def check_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    qk_l2norm_eps: float,
    chunk_size: int,
    symbolic: bool = False,
) -> None:
    """Raise the typed error of the first argument of ``linear_attention`` that is wrong."""
    if chunk_size < 0:
        raise OptionError(name="chunk_size", expected="positive, or 0 for automatic", actual=chunk_size)
    sequences: Size | None = None
    if cu_seqlens is not None:
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise DtypeError(name="cu_seqlens", expected="int32 or int64", actual=cu_seqlens.dtype)
        if cu_seqlens.dim() != 1:
            raise RankError(name="cu_seqlens", expected=1, layout="[N + 1]", actual=tuple(cu_seqlens.shape))
        sequences = cu_seqlens.shape[0] - 1
    _check_operands(
        q, k, v, g, beta, initial_state, A_log, dt_bias, "initial_state", sequences, gate, gate_fn, gate_scale,
        qk_l2norm_eps, symbolic,
    )  # fmt: skip
    if cu_seqlens is not None:
        _check_packing(cu_seqlens, q, symbolic)


def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    *,
    state_name: str = "initial_state",
    gate: str,
    gate_fn: str,
    gate_scale: float,
    qk_l2norm_eps: float,
    symbolic: bool = False,
) -> None:
    """Raise the typed error of the first argument of a step op that is wrong."""
    _check_operands(
        q, k, v, g, beta, state, A_log, dt_bias, state_name, None, gate, gate_fn, gate_scale, qk_l2norm_eps, symbolic
    )
    length = q.shape[1]
    if differ(length, 1, symbolic):
        raise StepLengthError(length=length)


def check_layout(o_layout: str) -> None:
    """The order of o's dimensions in memory must name each of them once."""
    if sorted(o_layout) != sorted("BTHV"):
        raise OptionError(name="o_layout", expected="the letters of BTHV in any order", actual=o_layout)


def check_writable(state: Tensor) -> None:
    """The in-place step needs one memory cell per element of the state."""
    strides = state.stride()
    if 0 in strides and any(n > 1 and s == 0 for n, s in zip(state.shape, strides, strict=True)):
        raise StateError(problem=f"the state is written in place, but its strides {strides} make elements share memory")


def _check_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state_name: str,
    sequences: Size | None,
    gate: str,
    gate_fn: str,
    gate_scale: float,
    qk_l2norm_eps: float,
    symbolic: bool,
) -> None:
    device = q.device
    if q.dim() != 4:
        raise RankError(name="q", expected=4, layout="[B, T, H, K]", actual=tuple(q.shape))
    if v.dim() != 4:
        raise RankError(name="v", expected=4, layout="[B, T, HV, V]", actual=tuple(v.shape))
    if q.dtype not in FLOATS:
        raise DtypeError(name="q", expected=FLOAT_NAMES, actual=q.dtype)
    batch, length, heads, key_dim = q.shape
    _, _, value_heads, value_dim = v.shape
    check_tensor(k, "k", (batch, length, heads, key_dim), "[B, T, H, K]", device, symbolic)
    check_tensor(v, "v", (batch, length, value_heads, value_dim), "[B, T, HV, V]", device, symbolic)
    known = not symbolic or (type(heads) is int and type(value_heads) is int)
    if known and (heads < 1 or value_heads < 1 or value_heads % heads):
        raise HeadGroupError(heads=heads, value_heads=value_heads)
    if beta is not None:
        check_tensor(beta, "beta", (batch, length, value_heads), "[B, T, HV]", device, symbolic)
    if state is not None:
        expected = (batch if sequences is None else sequences, value_heads, key_dim, value_dim)
        layout = "[B, HV, K, V]" if sequences is None else "[N, HV, K, V], N sequences in cu_seqlens"
        check_tensor(state, state_name, expected, layout, device, symbolic, any_float=True)
    check_gate(g is not None, A_log is not None, dt_bias is not None, gate, gate_fn, gate_scale)
    if qk_l2norm_eps and not qk_l2norm_eps > 0.0:  # written so that NaN is refused too
        raise OptionError(name="qk_l2norm_eps", expected="0 (off) or positive", actual=qk_l2norm_eps)
    if g is None:
        return
    if gate == "channel":
        check_tensor(g, "g", (batch, length, value_heads, key_dim), "[B, T, HV, K]", device, symbolic)
    elif gate == "token":
        check_tensor(g, "g", (batch, length, value_heads), "[B, T, HV]", device, symbolic)
    else:
        check_tensor(g, "g", (value_heads,), "[HV]", device, symbolic)
    if A_log is not None:
        check_tensor(A_log, "A_log", (value_heads,), "[HV]", device, symbolic)
    if dt_bias is not None:
        if gate == "channel":
            check_tensor(dt_bias, "dt_bias", (value_heads, key_dim), "[HV, K]", device, symbolic)
        else:
            check_tensor(dt_bias, "dt_bias", (value_heads,), "[HV]", device, symbolic)


def check_gate(has_g: bool, has_A_log: bool, has_dt_bias: bool, gate: str, gate_fn: str, gate_scale: float) -> None:
    """The gate's kind, function and parameters must fit together; no tensor is read."""
    if gate not in GATES:
        raise GateError(problem=f"gate must be one of {', '.join(GATES)}; got {gate!r}")
    if gate_fn not in GATE_FNS:
        raise GateError(problem=f"gate_fn must be one of {', '.join(GATE_FNS)}; got {gate_fn!r}")
    if has_g == (gate == "none"):
        raise GateError(problem=f"gate={gate!r} {'takes no g' if has_g else 'needs a tensor g'}")
    if (has_A_log or has_dt_bias) and not (has_g and gate_fn in PARAMETRIC_GATE_FNS):
        name = "A_log" if has_A_log else "dt_bias"
        reason = "does not read" if has_g else "has no g to apply to, and needs no"
        raise GateParameterError(gate_fn=gate_fn, problem=f"{reason} {name}")
    # A log decay above 0 would be growth: the scale's sign is what keeps these two functions at or below 0.
    if gate_fn == "sigmoid" and not gate_scale <= 0.0:
        raise GateParameterError(gate_fn=gate_fn, problem=f"gate_scale is its lower bound, <= 0; got {gate_scale}")
    if gate_fn == "logsigmoid" and not gate_scale >= 0.0:
        raise GateParameterError(gate_fn=gate_fn, problem=f"gate_scale must be >= 0, got {gate_scale}")


def check_tensor(
    x: Tensor,
    name: str,
    expected: Shape,
    layout: str,
    device: torch.device,
    symbolic: bool,
    any_float: bool = False,
) -> None:
    """Dtype, device and shape of one tensor."""
    if x.dtype not in FLOATS and not (any_float and x.dtype.is_floating_point):
        raise DtypeError(name=name, expected="floating point" if any_float else FLOAT_NAMES, actual=x.dtype)
    if x.device != device:
        raise DeviceError(name=name, expected=device, actual=x.device)
    if symbolic:
        wrong = x.dim() != len(expected) or any(map(_static_mismatch, x.shape, expected))
    else:
        wrong = x.shape != expected
    if wrong:
        actual = tuple(x.shape)
        if len(actual) != len(expected):
            raise RankError(name=name, expected=len(expected), layout=layout, actual=actual)
        raise SizeError(name=name, expected=tuple(expected), layout=layout, actual=actual)


def _check_packing(cu_seqlens: Tensor, q: Tensor, symbolic: bool) -> None:
    """Sizes always; the values where reading them costs no synchronisation, that is on the CPU."""
    batch, length = q.shape[:2]
    if differ(batch, 1, symbolic):
        raise CuSeqlensError(problem=f"packs its sequences along T and needs B = 1, got B = {batch}")
    on_cpu = cu_seqlens.device.type == "cpu"
    if not on_cpu and cu_seqlens.device != q.device:
        raise DeviceError(name="cu_seqlens", expected=f"{q.device} (or the CPU)", actual=cu_seqlens.device)
    if symbolic:
        if type(cu_seqlens.shape[0]) is int and cu_seqlens.shape[0] < 2:
            raise CuSeqlensError(problem="needs at least two entries, 0 and T")
        return
    if cu_seqlens.shape[0] < 2:
        raise CuSeqlensError(problem="needs at least two entries, 0 and T")
    if not on_cpu:
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise CuSeqlensError(problem=f"must start at 0, starts at {bounds[0]}")
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise CuSeqlensError(problem=f"must not decrease, but entry {i + 1} is {end} after {start}")
    if bounds[-1] != length:
        raise CuSeqlensError(problem=f"must end at T = {length}, ends at {bounds[-1]}")


def differ(a: Size, b: Size, symbolic: bool) -> bool:
    return _static_mismatch(a, b) if symbolic else a != b


def _static_mismatch(a: Size, b: Size) -> bool:
    """True only for two plain integers that differ; a symbolic size is not compared, and so gets no guard."""
    return type(a) is int and type(b) is int and a != b
