"""mamba_ssm's and causal_conv1d's functions at which Dynamo cuts a graph, and what replaces each (``ssd``).

``causal_conv1d_fn`` and ``mamba_split_conv1d_scan_combined`` write into a strided ``out``, which Dynamo refuses;
``mamba_chunk_scan_combined`` reads the autotuner's ``best_config`` in its backward. The libraries' other functions, and
that one in inference, are captured as they are and stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kdacompile.capture.documented import Arguments, Documented
from kdacompile.capture.errors import Unliftable


@dataclass(frozen=True)
class Signature:
    """A documented function. Its arguments have the names that the replacement has."""

    replacement: str
    tokens: Mapping[str, int]
    arguments: str
    """Those that the replacement takes; any other has to be off."""

    pattern: str = "simple_gla"
    states: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tensors that cannot be just any numbers (``probes.make``)."""

    harmless: str = ""
    """Arguments that change how a result is computed, not what it is."""

    check: Callable[[Arguments], None] = lambda arguments: None
    """Raises ``Unliftable`` for calls that the replacement does not cover, or that need none."""


def _only_in_training(arguments: Arguments) -> None:
    if not any(tensor.requires_grad for tensor in arguments.tensors.values()):
        raise Unliftable("without gradients it does not cut the graph")


def _no_other_columns(arguments: Arguments) -> None:
    """A gated MLP's columns may stand in front of the layer's."""
    sizes = {name: tensor.dims for name, tensor in arguments.tensors.items()}
    heads = sizes["D"][0]
    size = sizes["D"][1] if len(sizes["D"]) == 2 else int(arguments.source.get("headdim", "0"))
    if sizes["zxbcdt"][-1] != int(heads) * int(size) + int(sizes["conv1d_weight"][0]) + int(heads):
        raise Unliftable("its projection holds more than this layer's columns")


SIGNATURES: Mapping[str, Signature] = {
    "mamba_chunk_scan_combined": Signature(
        "chunk_scan",
        {"x": 1, "dt": 1, "B": 1, "C": 1, "z": 1},
        "x dt A B C D z dt_bias initial_states dt_softplus dt_limit return_final_states",
        states=("initial_states",),
        roles={"A": "g:log", "B": "k", "C": "q"},
        harmless="chunk_size cu_seqlens",  # cu_seqlens only says which states return_varlen_states asks for
        check=_only_in_training,
    ),
    "mamba_split_conv1d_scan_combined": Signature(
        "split_conv1d_scan",
        {"zxbcdt": 1},
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D initial_states dt_limit return_final_states activation "
        "rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate",
        states=("initial_states",),
        roles={"A": "g:log"},
        harmless="chunk_size",
        check=_no_other_columns,
    ),
    "causal_conv1d_fn": Signature("causal_conv1d", {"x": 2}, "x weight bias activation", pattern=""),
}


@functools.cache
def documented(name: str) -> Documented | None:
    """The function of this name, None if it does not cut a graph."""
    signature = SIGNATURES.get(name)
    if signature is None:
        return None
    write = functools.partial(_write, signature)
    return Documented(signature.pattern, signature.tokens, signature.states, write)


def _write(signature: Signature, arguments: Arguments) -> tuple[str, dict[int, str]]:
    taken = signature.arguments.split()
    arguments.refuse(frozenset([*taken, *signature.harmless.split()]))
    signature.check(arguments)
    written = ", ".join(f"{name}={arguments.source[name]}" for name in taken if name in arguments.source)
    roles = {index: signature.roles.get(name, name) for name, index in arguments.index.items()}
    return f"ssd.{signature.replacement}({written})", roles
