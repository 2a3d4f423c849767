"""An op's signature, generated from the operand table of its calls: schemas, arguments, what has gradients.

The table is the dataclass itself (:class:`kdacompile.lowering.calls.Call`,
:class:`kdacompile.lowering.run_attention.Attention`, see :mod:`kdacompile.lowering.operands`). A :class:`Signature`
says what one op makes of it. The argument lists of an op and of its backward op are, in this order::

    op(operands, *, options)    op_backward(gradients of the results, [results,] operands, *, options, wanted)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from kdacompile.lowering.calls import Call
from kdacompile.lowering.operands import Operand, operands, options
from kdacompile.lowering.run_attention import Attention
from kdacompile.ops.checks import check_bounds, check_cache, check_mla, check_sequence, check_step, check_writable

OF_THE_OUTPUT = ("out_dtype", "o_layout")
"""Options that gradients do not depend on."""

O_DIMENSIONS = "BTHV"

MOST = 4096
"""Kinds of arguments known to be right, of one op, before they are forgotten."""


@dataclass(frozen=True)
class Signature:
    """One op over the calls of a dataclass.

    ``check`` raises the typed error of the first argument whose shape, dtype, device or option is wrong, with
    ``symbolic=True`` without comparing sizes that are not known; ``check_values`` does so for what else decides.
    ``result_layouts``: as those of operands. ``axes``: which dimensions are of the batch and of the heads, along which
    everything is independent. ``without``: fields of the call that the op does not have. ``written``: the operand that
    it overwrites, and what its schema calls that. ``o_layout``: whether it has the option of that name, see
    :func:`kdacompile.ops.kernels.in_layout`. ``kept``: the results that its backward op takes. ``unqueried``: those
    that do not depend on the first operand, the queries.
    """

    name: str
    call: type[Any]
    check: Callable[..., None]
    check_values: Callable[[Any], None] | None
    results: tuple[str, ...]
    result_layouts: tuple[str, ...]
    axes: Mapping[str, str]
    without: frozenset[str] = frozenset()
    written: tuple[str, str] | None = None
    o_layout: bool = False
    kept: tuple[str, ...] = ()
    unqueried: frozenset[str] = frozenset()

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in operands(self.call) if operand.name not in self.without)

    @cached_property
    def options(self) -> dict[str, str]:
        return {name: text for name, text in options(self.call).items() if name not in self.without}

    @cached_property
    def differentiable(self) -> int:
        """How many operands have gradients; those are the first ones."""
        flags = [operand.differentiable for operand in self.operands]
        count = sum(flags)
        assert all(flags[:count]), self.name
        return count

    @property
    def schema(self) -> str:
        """The text after the op's name in its definition."""
        layout = [f'str o_layout="{O_DIMENSIONS}"'] if self.o_layout else []
        named = [f"{text} {name}" for name, text in self.options.items()]
        results = ", ".join(f"Tensor {name}" for name in self.results)
        returned = f"({results})" if len(self.results) > 1 else "Tensor"
        return f"({', '.join([*self._tensors, '*', *named, *layout])}) -> {returned}"

    @property
    def backward_name(self) -> str:
        return f"{self.name}_backward"

    @property
    def backward_schema(self) -> str:
        grads = [f"Tensor? grad_{name}" for name in self.results]
        results = [f"Tensor {name}" for name in self.kept]
        named = [f"{text} {name}" for name, text in self.options.items() if name not in OF_THE_OUTPUT]
        return f"({', '.join([*grads, *results, *self._tensors, '*', *named, 'bool[] wanted'])}) -> Tensor[]"

    @property
    def _tensors(self) -> list[str]:
        written, alias = self.written or ("", "")
        plain = {operand.name: f"Tensor{'?' * operand.optional} {operand.name}" for operand in self.operands}
        return [f"Tensor(a!) {alias}" if name == written else text for name, text in plain.items()]

    @cached_property
    def writes(self) -> int | None:
        """The position of the operand that is overwritten."""
        if self.written is None:
            return None
        return [operand.name for operand in self.operands].index(self.written[0])

    def call_of(self, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> Any:
        """The call of an op's arguments; operands that the op does not have are left out."""
        return self.call(**dict(zip(self._names, tensors, strict=False)), **options)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands)

    def checked(self, tensors: Sequence[Tensor | None], options: Mapping[str, Any], *, symbolic: bool = False) -> Any:
        """The call of these arguments, which are right; else the typed error of the first that is not."""
        call = self.call_of(tensors, options)
        if symbolic:
            self.check(call, symbolic=True)
            return call
        # Checking takes four times what finding out does that the same was right before; decoding does it every step.
        key = (tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors]), *options.items())
        if key not in self._right:
            self.check(call)
            if len(self._right) >= MOST:
                self._right.clear()
            self._right.add(key)
        if self.check_values is not None:
            self.check_values(call)
        return call

    @cached_property
    def _right(self) -> set[Hashable]:
        """Kinds of arguments that passed ``check``."""
        return set()

    def of_backward(self, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The tensors of a backward op: gradients and, where it takes them, results; and operands."""
        count = len(self.results) + len(self.kept)
        return tensors[:count], tensors[count:]


LINEAR_ATTENTION = Signature(
    "linear_attention",
    Call,
    check_sequence,
    check_bounds,
    ("o", "final_state"),
    ("[B, T, HV, V]", "[N, HV, K, V]"),
    {"B": "batch", "N": "batch", "H": "heads", "HV": "heads"},
    frozenset({"state_indices"}),
    o_layout=True,
    unqueried=frozenset({"final_state"}),
)
LINEAR_ATTENTION_STEP = replace(
    LINEAR_ATTENTION,
    name="linear_attention_step",
    check=check_step,
    check_values=None,
    without=frozenset({"cu_seqlens", "state_indices", "chunk_size"}),
    o_layout=False,
)
LINEAR_ATTENTION_STEP_ = replace(
    LINEAR_ATTENTION_STEP,
    name="linear_attention_step_",
    check=partial(check_step, state_name="state"),
    check_values=check_writable,
    without=frozenset({"cu_seqlens", "chunk_size"}),
    results=("o",),
    written=("initial_state", "state"),
)
MLA = Signature(
    "mla",
    Attention,
    check_mla,
    check_cache,
    ("o", "lse"),
    ("[B, T, H, V]", "[B, H, T]"),
    {"B": "batch", "H": "heads"},
    kept=("o", "lse"),
)
