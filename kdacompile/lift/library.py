"""Functions of kernel libraries that torch.compile may not enter: replaced by their documented meaning.

flash-linear-attention marks its functions ``torch.compiler.disable``, so a model that calls them falls into many graphs
with nothing left to recognise. Each is a row of the family, and its signature says which: the replacement is written
from the arguments and compared once with what the library itself returns, on the device at hand.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kdacompile.lift import verify
from kdacompile.lift.calls import Call, Group, TensorArg
from kdacompile.lift.capture import bound
from kdacompile.lift.errors import Unliftable
from kdacompile.lift.store import Verdict
from kdacompile.lift.template import NAME
from kdacompile.report.findings import Match

LENGTHS = (70, 130)
"""Lengths at which a library's function is compared: more than one chunk, none of them whole."""

_RETENTION = "(1 - torch.exp2(-5 - torch.arange({q}.size(2), device={q}.device, dtype=torch.float32))).log()"
_LIGHTNING = (
    "-(8 / {q}.size(2) * (1 - {layer_idx} / {num_layers}))"
    " * torch.arange({q}.size(2), device={q}.device, dtype=torch.float32)"
)


@dataclass(frozen=True)
class Row:
    """What a function computes: the delta rule or not, and the argument (or expression) that is the log gate."""

    pattern: str
    delta: bool = False
    gates: tuple[str, ...] = ()
    gate: str = ""
    own: tuple[str, ...] = ()
    """Arguments only the expression reads."""


ROWS: Mapping[str, Row] = {
    "kda": Row("kda", delta=True, gates=("g",)),
    "gated_delta_rule": Row("gated_delta_rule", delta=True, gates=("g", "gk")),
    "delta_rule": Row("delta_rule", delta=True),
    "gla": Row("gla", gates=("g", "gk")),
    "simple_gla": Row("simple_gla", gates=("g", "g_gamma")),
    "retention": Row("retention", gate=_RETENTION),
    "lightning_attn": Row("retention", gate=_LIGHTNING, own=("layer_idx", "num_layers")),
    "linear_attn": Row("linear_attention"),
}
_PER_TOKEN = frozenset({"q", "k", "v", "g", "gk", "beta"})
_PREFIXES = ("chunk_", "fused_recurrent_")
_COMMON = frozenset(
    "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "use_gate_in_kernel A_log dt_bias lower_bound state_v_first cu_seqlens".split()
)
_HARMLESS = frozenset("cu_seqlens_cpu chunk_indices safe_gate disable_recompute chunk_size".split())
"""Arguments that change how a result is computed, not what it is."""

_NORMALIZES = frozenset({"chunk_linear_attn"})
"""Functions whose ``normalize`` is on unless it is given."""


def row_of(fn: Callable[..., Any]) -> Row | None:
    """The family's row a library function is documented to compute, None for any other function."""
    name = name_of(fn)
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    if prefix is None or str(getattr(fn, "__module__", "")).split(".")[0] != "fla":
        return None
    return ROWS.get(name.removeprefix(prefix))


def open_dimensions(call: Call) -> Call:
    """Batch and tokens stand where the library's signature says."""
    shapes = {name.removeprefix("="): tensor.dims for name, tensor in call.tensors()}
    if "q" not in shapes or len(shapes["q"]) != 4:
        raise Unliftable("it is not called with q")
    batch, tokens = shapes["q"][:2]
    packed = "cu_seqlens" in shapes

    def letters(name: str, tensor: TensorArg) -> TensorArg:
        dims = list(tensor.dims)
        rows = name in _PER_TOKEN
        if (rows or (name == "initial_state" and not packed)) and dims[0] == batch != 1:
            dims[0] = "B"
        if rows and len(dims) > 1 and dims[1] == tokens != 1:
            dims[1] = "T"
        return replace(tensor, dims=tuple(dims))

    arguments = tuple(
        (name, letters(name.removeprefix("="), item) if isinstance(item, TensorArg) else item)
        for name, item in call.arguments
    )
    opened = Call(arguments)
    if any(isinstance(dim, str) and dim not in ("B", "T") for _, tensor in opened.tensors() for dim in tensor.dims):
        raise Unliftable("a size besides batch and length is symbolic")
    return opened


def write(fn: Callable[..., Any], call: Call) -> tuple[str, dict[int, str]]:
    """Source of the replacement, and the role of each tensor argument; raises ``Unliftable`` for other options."""
    row = row_of(fn)
    assert row is not None
    given, named = _arguments(call)
    _refuse_the_rest(fn, row, given)
    gate = next((given[name] for name in row.gates if given.get(name) not in (None, "None")), None)
    activation = _activation(given)
    options = {
        "g": row.gate.format(**given) if row.gate else gate,
        "beta": given.get("beta"),
        "delta": str(row.delta),
        "scale": given.get("scale"),
        "initial_state": given.get("initial_state"),
        "output_final_state": given.get("output_final_state", "False"),
        "cu_seqlens": given.get("cu_seqlens"),
        "qk_l2norm": given.get("use_qk_l2norm_in_kernel", "False"),
        "sigmoid_beta": given.get("use_beta_sigmoid_in_kernel", "False"),
        "state_layout": '"VK"' if given.get("state_v_first") == "True" else '"KV"',
        **activation,
    }
    written = ", ".join(f"{name}={text}" for name, text in options.items() if text not in (None, "None"))
    tensors = ", ".join(f"x{index}" for index in range(len(call.tensors())))
    operands = ", ".join(given[name] for name in ("q", "k", "v"))
    text = f"def {NAME}({tensors}):\n    return ops.linear_attention({operands}, {written})\n"
    return text, _roles(named, row, options)


def prove(fn: Callable[..., Any], call: Call, load: Callable[[str], Callable[..., Any]]) -> Verdict:
    """Compare the replacement with the library's own results; raises ``Unliftable`` where they differ."""
    text, roles = write(fn, call)
    original, other = bound(fn, call), load(text)
    tokens = any("T" in tensor.dims for _, tensor in call.tensors())
    lengths = LENGTHS if tokens else (1,)
    errors = [verify.compare(original, other, call, roles, length, 2) for length in lengths]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        raise Unliftable("the library's own function does not run here, so there is nothing to compare with")
    if any(tensor.requires_grad for _, tensor in call.tensors()):
        verify.compare_gradients(original, other, call, roles, lengths[0], 2)
    name = name_of(fn)
    row, mode = row_of(fn), "sequence" if tokens else "step"
    pattern = row.pattern if row is not None else name
    match = Match(pattern, mode, source_of(fn), {}, max(known), "kdacompile::linear_attention")
    return Verdict(name, source_of(fn), text, matches=(asdict(match),), lengths=tuple(lengths), max_error=max(known))


def name_of(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__name__", fn))


def source_of(fn: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else "unknown"


def version(fn: Callable[..., Any]) -> str:
    """What the verdict on the function is about: a library's function is told apart by the library's version."""
    package = importlib.import_module(str(fn.__module__).split(".")[0])
    return f"{fn.__module__}.{name_of(fn)} {getattr(package, '__version__', '')}"


def _arguments(call: Call) -> tuple[dict[str, str], dict[str, int]]:
    """Every argument as text, and the index of each that is a tensor."""
    given: dict[str, str] = {}
    named: dict[str, int] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, TensorArg):
            named[name] = len(named)
            given[name] = f"x{named[name]}"
        elif isinstance(item, (torch.dtype, torch.device, torch.memory_format)):
            raise Unliftable(f"{name} is not an argument of linear attention")
        else:
            given[name] = repr(item)

    for name, item in call.arguments:
        if isinstance(item, Group):
            for key, part in zip(item.names, item.items, strict=True):
                add(key, part)
        else:
            add(name.removeprefix("="), item)
    return given, named


def _refuse_the_rest(fn: Callable[..., Any], row: Row, given: Mapping[str, str]) -> None:
    """Arguments beyond the recurrence must be off."""
    if given.get("normalize", str(name_of(fn) in _NORMALIZES)) != "False":
        raise Unliftable("it normalises by the sum of its weights")
    known = {*_COMMON, *_HARMLESS, *row.gates, *row.own, "normalize"}
    for argument, text in given.items():
        if argument not in known and text not in ("None", "False"):
            raise Unliftable(f"{argument} is not an option of linear attention")
    if sum(given.get(gate, "None") != "None" for gate in row.gates) > 1:
        raise Unliftable("it is given two gates")


def _activation(given: Mapping[str, str]) -> dict[str, str]:
    """The gate activation that ``use_gate_in_kernel`` asks for."""
    if given.get("use_gate_in_kernel", "False") == "False":
        return {}
    bound_text = given.get("lower_bound", "None")
    options = {"gate_fn": '"softplus"' if bound_text == "None" else '"sigmoid"', "A_log": given.get("A_log", "None")}
    if bound_text != "None":
        options["gate_scale"] = bound_text
    if given.get("dt_bias", "None") != "None":
        options["dt_bias"] = f"{given['dt_bias']}.view({given['v']}.size(2), *{given['g']}.shape[3:])"
    if options["A_log"] == "None":
        raise Unliftable("its gate has no A_log")
    return options


def _roles(named: Mapping[str, int], row: Row, options: Mapping[str, Any]) -> dict[int, str]:
    form = "logit" if "gate_fn" in options else "log"
    roles = {index: name for name, index in named.items()}
    for name, index in named.items():
        if name in row.gates:
            roles[index] = f"g:{form}"
        elif name == "beta":
            roles[index] = "beta:logit" if options["sigmoid_beta"] == "True" else "beta:factor"
    return roles
