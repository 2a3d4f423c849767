"""Validation of the ops' arguments: everything the schema does not already guarantee, checked once per call.

The same checks run in the kernels (real sizes) and in the fakes. In a fake a size may be symbolic, and comparing it
would put a guard on the user's graph: there only sizes that are plain integers are compared (``symbolic=True``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.gates import GATE_FUNCTIONS, KINDS
from kdacompile.lowering.operands import Operand, dimensions, operands
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops.errors import (
    CuSeqlensError,
    DeviceError,
    DtypeError,
    GateError,
    GateParameterError,
    HeadGroupError,
    LatentWeightsError,
    OperandError,
    OptionError,
    PagedCacheError,
    RankError,
    SizeError,
    StateError,
    StateIndicesError,
    StepLengthError,
)

Size = int | torch.SymInt


def check_number(name: str, value: object) -> None:
    """Raise where an option is neither a number nor None."""
    if value is not None and not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, Tensor)):
        raise OptionError(name=name, expected="a number", actual=value)


def check_sequence(call: Call, *, symbolic: bool = False) -> None:
    """Raise the typed error of the first argument of ``linear_attention`` that is wrong."""
    if call.chunk_size < 0:
        raise OptionError(name="chunk_size", expected="positive, or 0 for automatic", actual=call.chunk_size)
    bounds = call.cu_seqlens
    sizes: dict[str, Size] = {} if bounds is None or bounds.dim() != 1 else {"N": bounds.shape[0] - 1}
    _check_linear_attention(call, sizes, symbolic)
    if bounds is None:
        return
    if differ(call.q.shape[0], 1, symbolic):
        raise CuSeqlensError(problem=f"packs its sequences along T and needs B = 1, got B = {call.q.shape[0]}")
    if (not symbolic or type(bounds.shape[0]) is int) and bounds.shape[0] < 2:
        raise CuSeqlensError(problem="needs at least two entries, 0 and T")


def check_bounds(call: Call) -> None:
    """Raise the error of the first value of cu_seqlens that is wrong, where reading them costs no synchronisation."""
    if call.cu_seqlens is None or call.cu_seqlens.device.type != "cpu":
        return
    bounds, length = call.cu_seqlens.tolist(), call.q.shape[1]
    if bounds[0] != 0:
        raise CuSeqlensError(problem=f"must start at 0, starts at {bounds[0]}")
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise CuSeqlensError(problem=f"must not decrease, but entry {i + 1} is {end} after {start}")
    if bounds[-1] != length:
        raise CuSeqlensError(problem=f"must end at T = {length}, ends at {bounds[-1]}")


def check_step(call: Call, *, symbolic: bool = False, state_name: str = "initial_state") -> None:
    """Raise the typed error of the first argument of a step op that is wrong."""
    _check_linear_attention(call, {}, symbolic, state_name)
    length = call.q.shape[1]
    if differ(length, 1, symbolic):
        raise StepLengthError(length=length)


def check_writable(call: Call) -> None:
    """The in-place step needs one memory cell per element of the state, and a slot of a pool for each request."""
    assert call.initial_state is not None
    if call.state_indices is not None:
        _check_slots(call.state_indices, call.initial_state.shape[0])
    shape, strides = call.initial_state.shape, call.initial_state.stride()
    if 0 in strides and any(n > 1 and s == 0 for n, s in zip(shape, strides, strict=True)):
        raise StateError(problem=f"the state is written in place, but its strides {strides} make elements share memory")


def _check_slots(indices: Tensor, slots: int) -> None:
    """Raise the error of the first index that is wrong, where reading them costs no synchronisation."""
    if not slots:
        raise StateIndicesError(problem="the pool has no slots")
    if indices.device.type != "cpu":
        return
    found = [index for index in indices.tolist() if index >= 0]
    if found and max(found) >= slots:
        raise StateIndicesError(problem=f"must be below {slots}, the slots of the pool, found {max(found)}")
    if len(set(found)) < len(found):
        twice = next(index for index in found if found.count(index) > 1)
        raise StateIndicesError(problem=f"name slot {twice} more than once")


def check_layout(o_layout: str) -> None:
    """The order of o's dimensions in memory must name each of them once."""
    if sorted(o_layout) != sorted("BTHV"):
        raise OptionError(name="o_layout", expected="the letters of BTHV in any order", actual=o_layout)


def _check_linear_attention(
    call: Call, sizes: dict[str, Size], symbolic: bool, state_name: str = "initial_state"
) -> None:
    has_g, has_A_log, has_dt_bias = (x is not None for x in (call.g, call.A_log, call.dt_bias))
    check_gate(has_g, has_A_log, has_dt_bias, call.gate, call.gate_fn, call.gate_scale)
    eps = call.qk_l2norm_eps
    if eps and not eps > 0.0:  # written so that NaN is refused too
        raise OptionError(name="qk_l2norm_eps", expected="0 (off) or positive", actual=eps)
    if call.q.dim() == call.v.dim() == 4:
        _check_heads(call.q.shape[2], call.v.shape[2], call.q.shape[1], symbolic)
    check_operands(call, sizes, symbolic, {"initial_state": state_name})


def _check_heads(heads: int, value_heads: int, length: Size, symbolic: bool) -> None:
    known = not symbolic or (type(heads) is int and type(value_heads) is int)
    if known and (heads < 1 or value_heads < 1 or value_heads % heads):
        hint = _HEAD_FIRST if value_heads == length else ""
        raise HeadGroupError(heads=heads, value_heads=value_heads, hint=hint)


def check_gate(has_g: bool, has_A_log: bool, has_dt_bias: bool, gate: str, gate_fn: str, gate_scale: float) -> None:
    """The gate's kind, function and parameters must fit together; no tensor is read."""
    if gate not in KINDS:
        raise GateError(problem=f"gate must be one of {', '.join(KINDS)}; got {gate!r}")
    function = GATE_FUNCTIONS.get(gate_fn)
    if function is None:
        raise GateError(problem=f"gate_fn must be one of {', '.join(GATE_FUNCTIONS)}; got {gate_fn!r}")
    if has_g == (gate == "none"):
        raise GateError(problem=f"gate={gate!r} {'takes no g' if has_g else 'needs a tensor g'}")
    if (has_A_log or has_dt_bias) and not (has_g and function.parametric):
        name = "A_log" if has_A_log else "dt_bias"
        reason = "does not read" if has_g else "has no g to apply to, and needs no"
        raise GateParameterError(gate_fn=gate_fn, problem=f"{reason} {name}")
    # A log decay above 0 would be growth: the scale's sign is what keeps these functions at or below 0.
    if function.scale == "lower bound" and not gate_scale <= 0.0:
        raise GateParameterError(gate_fn=gate_fn, problem=f"gate_scale is its lower bound, <= 0; got {gate_scale}")
    if function.scale == "factor" and not gate_scale >= 0.0:
        raise GateParameterError(gate_fn=gate_fn, problem=f"gate_scale must be >= 0, got {gate_scale}")


def check_operands(call: Any, sizes: dict[str, Size], symbolic: bool, names: Mapping[str, str] | None = None) -> None:
    """Dtype, device and shape of every operand, by the operand table.

    The first operand says the device, the first with a dimension its size, and those after it must agree; ``sizes``
    are known before, and completed. ``names``: what a message calls an operand if not by its own name.
    """
    declared = operands(type(call))
    device = getattr(call, declared[0].name).device
    for operand in declared:
        x: Tensor | None = getattr(call, operand.name)
        if x is None:
            continue
        layout = operand.text(call)
        dims, actual = dimensions(layout), x.shape
        right = x.dtype in operand.kind.dtypes and x.device == device and len(actual) == len(dims)
        expected = tuple(map(sizes.setdefault, dims, actual)) if right else ()
        if not right or symbolic or actual != expected:
            name = operand.name if names is None else names.get(operand.name, operand.name)
            _check_operand(operand, x, name, layout, expected, device, symbolic)


def _check_operand(
    operand: Operand,
    x: Tensor,
    name: str,
    layout: str,
    expected: Sequence[Size],
    device: torch.device,
    symbolic: bool,
) -> None:
    """Say what is wrong with an operand, if it is more than a size that is not known or may be 1."""
    if x.dtype not in operand.kind.dtypes:
        raise DtypeError(name=name, expected=operand.kind.described, actual=x.dtype)
    if x.device != device and not (operand.host and x.device.type == "cpu"):
        raise DeviceError(name=name, expected=f"{device} (or the CPU)" if operand.host else device, actual=x.device)
    dims, actual = dimensions(layout), x.shape
    if len(actual) != len(dims):
        raise RankError(name=name, expected=len(dims), layout=layout, actual=tuple(actual))
    if expected and not _fits(actual, expected, operand.broadcast, symbolic):
        hint = _HEAD_FIRST if _head_first(dims, actual, expected) else ""
        raise SizeError(name=name, expected=tuple(expected), layout=layout, actual=tuple(actual), hint=hint)


_HEAD_FIRST = "; the tokens come before the heads in every operand: transpose(1, 2) those that have the heads first"


def _head_first(dims: Sequence[str], actual: Sequence[Size], expected: Sequence[Size]) -> bool:
    """Whether the tokens are found where the heads should be."""
    heads = next((place for place, dim in enumerate(dims) if dim in ("H", "HV")), None)
    if heads is None or "T" not in dims:
        return False
    tokens = dims.index("T")
    return not differ(actual[heads], expected[tokens], True) and differ(actual[tokens], expected[tokens], True)


def check_tensors(required: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Raise for the first operand that is not a tensor; an optional one may be None."""
    for given, suffix in ((required, ""), (optional, " or None")):
        for name, x in given.items():
            if not isinstance(x, Tensor) and not (x is None and suffix):
                raise OperandError(name=name, optional=suffix, kind=type(x).__name__)


def _fits(actual: Sequence[Size], expected: Sequence[Size], broadcast: bool, symbolic: bool) -> bool:
    last = len(expected) - 1
    for place, (size, whole) in enumerate(zip(actual, expected, strict=True)):
        one = broadcast and place < last and not differ(size, 1, symbolic)
        if differ(size, whole, symbolic) and not one:
            return False
    return True


def differ(a: Size, b: Size, symbolic: bool) -> bool:
    return _static_mismatch(a, b) if symbolic else a != b


def _static_mismatch(a: Size, b: Size) -> bool:
    """True only for two plain integers that differ; a symbolic size is not compared, and so gets no guard."""
    return type(a) is int and type(b) is int and a != b


# -- latent attention -------------------------------------------------------------------------------------------------

FORMS = ("auto", "absorbed", "expanded")


def check_mla(call: Attention, *, symbolic: bool = False) -> None:
    """Raise the typed error of the first argument of ``mla`` that is wrong."""
    _check_pair(call, "q_rope", "k_rope", "queries and keys are rotated together")
    _check_pair(call, "w_uk", "w_uv", "keys and values are expanded together")
    q, latent, table = call.q, call.latent, call.block_table
    if call.w_uk is None and q.dim() == 4 and latent.dim() == 3 and differ(q.shape[3], latent.shape[2], symbolic):
        reason = f"only queries of the latent's rank {latent.shape[2]} need none"
        raise LatentWeightsError(given=f"q of width {q.shape[3]}", missing="w_uk", reason=reason)
    sizes: dict[str, Size] = {}
    if table is not None and table.dim() == 2 and latent.dim() == 3:
        sizes["S"] = table.shape[1] * latent.shape[1]
    check_operands(call, sizes, symbolic)
    if call.form not in FORMS:
        raise OptionError(name="form", expected=f"one of {', '.join(FORMS)}", actual=call.form)
    if call.form == "expanded" and call.w_uk is None:
        raise OptionError(name="form", expected='"auto" or "absorbed" without weights', actual=call.form)


def _check_pair(call: Attention, first: str, second: str, reason: str) -> None:
    given = [name for name in (first, second) if getattr(call, name) is not None]
    if len(given) == 1:
        (missing,) = {first, second} - set(given)
        raise LatentWeightsError(given=given[0], missing=missing, reason=reason)


def check_cache(call: Attention) -> None:
    """Raise the error of the first value of lengths and block_table that is wrong, where they lie on the CPU."""
    if call.q.device.type != "cpu":
        return
    if call.lengths is not None and call.lengths.numel():
        low, high = int(call.lengths.min()), int(call.lengths.max())
        if low < 0 or high > call.width:
            raise PagedCacheError(problem=f"lengths must be in 0 .. {call.width}, found {low if low < 0 else high}")
    if call.block_table is not None:
        _check_entries(call.block_table, call.lengths, pages=call.latent.shape[0], page=call.page)


def _check_entries(block_table: Tensor, lengths: Tensor | None, *, pages: int, page: int) -> None:
    """Entries that a request owns must be pages of the pool; what stands past its last page is never read."""
    entries = block_table
    if lengths is not None:
        owned = torch.arange(block_table.shape[1]) * page < lengths[:, None]
        entries = block_table[owned]
    if entries.numel():
        low, high = int(entries.min()), int(entries.max())
        if low < 0 or high >= pages:
            wrong = low if low < 0 else high
            raise PagedCacheError(problem=f"entries of block_table must be in 0 .. {pages - 1}, found {wrong}")
