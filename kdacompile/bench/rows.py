"""Rows of the family on a device: random arguments of the op, the recurrence in fp64, and who else computes the same.

Arguments are those of ``ops.linear_attention`` by name, and everything else is made of them: what is expected, and the
calls of contenders.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.patterns.recurrence.definition import token_recurrence

EPS, BOUND = 1e-6, -5.0
"""Of the norms of q and k, and the lower bound of a "sigmoid" gate."""
TOKENS = ("q", "k", "v", "g", "beta")
TRANSFORMERS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
"""Options of the functions of transformers."""
Given = dict[str, Any]
Output = tuple[Tensor, Tensor | None]

_FLA = {
    ("channel", True): "kda", ("token", True): "gated_delta_rule", ("none", True): "delta_rule",
    ("channel", False): "gla", ("token", False): "simple_gla",
}  # fmt: skip
_KIMI = "transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"
_QWEN = "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"


def random_arguments(
    kind: str,
    gate_fn: str,
    length: int,
    *,
    delta: bool = True,
    norm: str = "inside",
    sigmoid_beta: bool = False,
    batch: int = 1,
    heads: int = 32,
    value_heads: int = 32,
    width: int = 128,
    value_width: int = 128,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> Given:
    """A row in ``dtype``, its parameters and log gates in fp32.

    ``kind``: of gate, "channel", "token" or "none"; ``norm``: of q and k, "inside" the op, "outside" of it, or "none".
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    places = (batch, length, value_heads)
    q, k = (normal(batch, length, heads, width).to(dtype) for _ in range(2))
    if norm == "outside":
        q, k = (F.normalize(x, dim=-1) for x in (q, k))
    given: Given = {"q": q, "k": k, "v": normal(*places, value_width).to(dtype), "delta": delta}
    given["qk_l2norm"] = EPS if norm == "inside" else False
    if delta:
        beta = normal(*places).to(dtype)
        given |= {"beta": beta if sigmoid_beta else beta.sigmoid(), "sigmoid_beta": sigmoid_beta}
    if kind == "none":
        return given
    channels = (width,) if kind == "channel" else ()
    g = normal(*places, *channels)
    if gate_fn == "log":
        return given | {"g": -F.softplus(g - 2.0)}
    given |= {"g": g.to(dtype), "gate_fn": gate_fn}
    given |= {"A_log": 0.5 * normal(value_heads), "dt_bias": normal(value_heads, *channels) - 2.0}
    return given | ({"gate_scale": BOUND} if gate_fn == "sigmoid" else {})


def tensors_of(given: Given) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, Tensor)}


def parametric(given: Given) -> bool:
    """Whether the gate function has parameters, A_log and dt_bias."""
    return "A_log" in given


def tokens(given: Given, start: int, end: int) -> Given:
    """Some tokens, as one sequence."""
    some = {name: x[:, start:end] if name in TOKENS else x for name, x in given.items()}
    return {name: x for name, x in some.items() if name != "cu_seqlens"}


def first_tokens(given: Given, count: int) -> Given:
    """The first of all sequences."""
    first = tokens(given, 0, count)
    if "cu_seqlens" not in given:
        return first
    bounds = [bound for bound in given["cu_seqlens"].tolist() if bound < count]
    return first | {"cu_seqlens": torch.tensor([*bounds, count], device=first["q"].device)}


def sequences(given: Given) -> int:
    return len(given["cu_seqlens"]) - 1 if "cu_seqlens" in given else given["q"].shape[0]


def unavoidable_bytes(given: Given) -> int:
    """Every input read once, the output and the final states written once."""
    v, width = given["v"], given["k"].shape[3]
    inputs = sum(x.nbytes for x in tensors_of(given).values())
    return inputs + v.nbytes + 4 * sequences(given) * v.shape[2] * width * v.shape[3]


def log_gate(given: Given) -> Tensor:
    """g with the gate function applied, as models write it."""
    g, gate_fn = given["g"], given.get("gate_fn", "log")
    if gate_fn == "log":
        return g
    rate = given["A_log"].exp()
    rate, x = rate[:, None] if g.dim() == 4 else rate, g + given["dt_bias"]
    return -rate * F.softplus(x) if gate_fn == "softplus" else BOUND * torch.sigmoid(rate * x)


def beta_of(given: Given) -> Tensor | None:
    return given["beta"].sigmoid() if given.get("sigmoid_beta") else given.get("beta")


def oracle(given: Given) -> tuple[Tensor, Tensor]:
    """The recurrence in fp64."""
    if "cu_seqlens" in given:
        parts = [oracle(tokens(given, *span)) for span in pairwise(given["cu_seqlens"].tolist())]
        return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])
    double = given | {name: x.double() for name, x in tensors_of(given).items()}
    q, k = double["q"], double["k"]
    if given["qk_l2norm"]:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS) for x in (q, k))
    decay = log_gate(double).exp() if "g" in given else None
    decay = decay if decay is None or decay.dim() == 4 else decay.unsqueeze(-1)
    state, options = double.get("initial_state"), {"delta": given["delta"], "scale": q.shape[-1] ** -0.5}
    return token_recurrence(q, k, double["v"], decay, beta_of(double), state, **options)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """RMS of the difference over RMS of the reference."""
    return float((x.double() - reference).norm() / reference.norm())


def ours(given: Given) -> Callable[[], Output]:
    """The op; of one token with a state the step, which overwrites it."""
    from kdacompile import ops

    if "initial_state" not in given:
        return lambda: ops.linear_attention(**given)
    rest = {name: x for name, x in given.items() if name not in ("initial_state", "output_final_state")}
    return lambda: ops.linear_attention_step(**rest, state=given["initial_state"], inplace=True)


def plain(given: Given, backend: str = "eager") -> Callable[[], Output]:
    """The delta rule by the functions that models of transformers call, gates before it, as ``backend`` compiles both;
    "eager": as they are.
    """
    module, name = _QWEN if given["g"].dim() == 3 else _KIMI
    name = "recurrent_kimi_delta_attention" if "initial_state" in given else name
    function = getattr(importlib.import_module(module), name)

    def call(given: Given) -> Output:
        gates = {"g": log_gate(given), "beta": beta_of(given), "initial_state": given.get("initial_state")}
        return function(given["q"], given["k"], given["v"], **gates, **TRANSFORMERS)

    called = call if backend == "eager" else torch.compile(call, backend=backend, dynamic=False)
    return lambda: called(given)


def fla(given: Given) -> Callable[[], Output] | None:
    """FLA's operator on the same arguments; None where it has none for the row or for the gate function."""
    q, k, v = (cast("Tensor", given[name]) for name in "qkv")
    kind = {3: "token", 4: "channel"}[given["g"].dim()] if "g" in given else "none"
    module = _FLA.get((kind, given["delta"]))
    if module is None or (parametric(given) and module != "kda"):
        return None
    name, options = f"chunk_{module}", {"output_final_state": given.get("output_final_state", False)}
    if given["delta"]:
        options["use_qk_l2norm_in_kernel"] = bool(given["qk_l2norm"])
    if module == "kda":
        options |= {key: given[key] for key in ("initial_state", "cu_seqlens") if key in given}
        options |= {"use_beta_sigmoid_in_kernel": True} if given["sigmoid_beta"] else {}
        if parametric(given):
            options |= {"use_gate_in_kernel": True, "A_log": given["A_log"], "dt_bias": given["dt_bias"].flatten()}
        if given.get("gate_fn") == "sigmoid":
            options |= {"lower_bound": BOUND} | ({} if "initial_state" in given else {"safe_gate": True})
        name = "fused_recurrent_kda" if "initial_state" in given else name
    function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    operands = [given[key] for key in ("g", "beta") if key in given]

    def call() -> Output:
        own = (q, k)
        if not given["delta"] and q.shape[2] != v.shape[2]:
            own = (x.expand(-1, -1, v.shape[2], -1).contiguous() for x in own)
        return function(*own, v, *operands, **options)

    return call
