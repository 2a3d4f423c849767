"""Functions of kernel libraries at which torch.compile cuts a graph: replaced by their documented meaning.

The replacement of a call is written from its arguments (``fla``, ``mamba``) and compared once with what the library
itself returns, on the device at hand.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from kdacompile.capture import fla, mamba, verify
from kdacompile.capture.calls import Call, TensorArg
from kdacompile.capture.documented import Arguments, Documented
from kdacompile.capture.draft import bound
from kdacompile.capture.errors import Unliftable
from kdacompile.capture.store import Verdict
from kdacompile.capture.template import NAME
from kdacompile.report.findings import Match

_LIBRARIES = {"fla": fla.documented, "mamba_ssm": mamba.documented, "causal_conv1d": mamba.documented}

LENGTHS = (70, 130)
"""Lengths at which a library's function is compared: more than one chunk of 64, none of them whole."""


def of(fn: Callable[..., Any]) -> Documented | None:
    """What is documented about a library's function, None for any other function."""
    look_up = _LIBRARIES.get(str(getattr(fn, "__module__", "")).split(".")[0])
    return None if look_up is None else look_up(name_of(fn))


def open_dimensions(documented: Documented, call: Call) -> Call:
    """Batch and tokens stand where the library's signature says."""
    main, position = next(iter(documented.tokens.items()))
    shapes = {name.removeprefix("="): tensor.dims for name, tensor in call.tensors()}
    if len(shapes.get(main, ())) <= position:
        raise Unliftable(f"it is not called with {main}")
    batch, tokens = shapes[main][0], shapes[main][position]

    def with_axes(name: str, tensor: TensorArg) -> TensorArg:
        dims, at = list(tensor.dims), documented.tokens.get(name)
        if (at is not None or name in documented.states) and dims[0] == batch != 1:
            dims[0] = "B"
        if at is not None and len(dims) > at and dims[at] == tokens != 1:
            dims[at] = "T"
        return replace(tensor, dims=tuple(dims))

    opened = call.map_tensors(with_axes)
    if any(isinstance(dim, str) and dim not in ("B", "T") for _, tensor in opened.tensors() for dim in tensor.dims):
        raise Unliftable("a size besides batch and length is symbolic")
    return opened


def prove(
    fn: Callable[..., Any], documented: Documented, call: Call, load: Callable[[str], Callable[..., Any]]
) -> Verdict:
    """Compare the replacement with the library's own results; raises ``Unliftable`` where they differ."""
    arguments = Arguments.of(call)
    expression, roles = documented.write(arguments)
    tensors = ", ".join(f"x{index}" for index in range(len(arguments.tensors)))
    text = f"def {NAME}({tensors}):\n    return {expression}\n"
    original, other = bound(fn, call), load(text)
    tokens = any("T" in tensor.dims for tensor in arguments.tensors.values())
    lengths = _lengths(call) if tokens else (1,)
    errors = [verify.compare(original, other, call, roles, length, 2) for length in lengths]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        raise Unliftable("the library's own function does not run here, so there is nothing to compare with")
    if any(tensor.requires_grad for tensor in arguments.tensors.values()):
        verify.compare_gradients(original, other, call, roles, lengths[-1], 2)
    name, source, mode = name_of(fn), source_of(fn), "sequence" if tokens else "step"
    match = Match(documented.pattern, mode, source, {}, max(known), "kdacompile::linear_attention")
    main, position = next(iter(documented.tokens.items()))
    return Verdict(
        name,
        source,
        text,
        matches=(asdict(match),) if documented.pattern else (),
        lengths=lengths,
        max_error=max(known),
        tokens=(arguments.index[main], position),
    )


def _lengths(call: Call) -> tuple[int, ...]:
    """More than one chunk, where the call names a larger one."""
    chunks = sorted(number for number in call.numbers() if LENGTHS[-1] <= number <= verify.LARGEST_CHUNK)
    return (*LENGTHS, *(chunk + 3 for chunk in chunks))


def name_of(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", fn))


def source_of(fn: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else "unknown"


def version(fn: Callable[..., Any]) -> str:
    """What a verdict on the function is about: the versions of the libraries, which call each other."""
    loaded = [(name, sys.modules.get(name)) for name in _LIBRARIES]
    versions = {name: getattr(library, "__version__", "") for name, library in loaded if library is not None}
    return f"{fn.__module__}.{name_of(fn)} {versions}"
