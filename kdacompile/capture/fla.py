"""flash-linear-attention's functions, which it marks ``torch.compiler.disable``: each is a row of the family.

A model that calls them falls into many graphs with nothing left to recognise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdacompile.capture.documented import Arguments, Documented
from kdacompile.capture.errors import Unliftable

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
_PREFIXES = ("chunk_", "fused_recurrent_")
_TOKENS: Mapping[str, int] = {"q": 1, "k": 1, "v": 1, "g": 1, "gk": 1, "beta": 1}
_COMMON = frozenset(
    "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
    "use_gate_in_kernel A_log dt_bias lower_bound state_v_first cu_seqlens".split()
)
_HARMLESS = frozenset("cu_seqlens_cpu chunk_indices safe_gate disable_recompute chunk_size".split())
"""Arguments that change how a result is computed, not what it is."""

_NORMALIZES = frozenset({"chunk_linear_attn"})
"""Functions whose ``normalize`` is on unless it is given."""


@functools.cache
def documented(name: str) -> Documented | None:
    """The function of this name, None if it is no row of the family."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    row = ROWS.get(name.removeprefix(prefix)) if prefix is not None else None
    if row is None:
        return None
    return Documented(row.pattern, _TOKENS, ("initial_state",), functools.partial(_write, name, row))


def _write(name: str, row: Row, arguments: Arguments) -> tuple[str, dict[int, str]]:
    given = arguments.source
    _refuse_the_rest(name, row, arguments)
    gate = next((given[gate] for gate in row.gates if given.get(gate) not in (None, "None")), None)
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
        **_activation(given),
    }
    written = ", ".join(f"{option}={text}" for option, text in options.items() if text not in (None, "None"))
    operands = ", ".join(given[operand] for operand in ("q", "k", "v"))
    return f"ops.linear_attention({operands}, {written})", _roles(arguments.index, row, options)


def _refuse_the_rest(name: str, row: Row, arguments: Arguments) -> None:
    """Arguments beyond the recurrence must be off."""
    given = arguments.source
    if given.get("normalize", str(name in _NORMALIZES)) != "False":
        raise Unliftable("it normalises by the sum of its weights")
    arguments.refuse(frozenset({*_COMMON, *_HARMLESS, *row.gates, *row.own, "normalize"}))
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
