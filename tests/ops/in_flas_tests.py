"""A pytest plugin: flash-linear-attention's own tests of its ops, with ours in the place of the functions under test.

    python -m pytest -p tests.ops.in_flas_tests -c /dev/null flash-linear-attention/tests/ops/test_kda.py

What a test holds a function against, FLA's naive or recurrent one, stays FLA's. Where a test compares two ways to call
one function, both calls are ours. ``TESTS`` are the tests that are kept of each file.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kdacompile.ops import linear_attention

Given = dict[str, Any]
Call = Callable[..., tuple[Any, Any]]

TESTS: Mapping[str, str] = {
    "test_kda": "test_fused_recurrent test_fused_recurrent_use_beta_sigmoid_in_kernel "
    "test_fused_recurrent_state_v_first test_fused_recurrent_gate_in_kernel test_chunk test_chunk_state_v_first "
    "test_chunk_use_beta_sigmoid_in_kernel test_chunk_varlen test_chunk_varlen_prefill",
    "test_gdn": "test_fused_recurrent test_fused_recurrent_state_v_first test_fused_recurrent_gate_in_kernel "
    "test_fused_recurrent_beta_sigmoid_in_kernel test_fused_recurrent_gate_in_kernel_varlen test_chunk "
    "test_chunk_with_chunk_size test_chunk_beta_sigmoid_in_kernel test_chunk_state_v_first test_chunk_varlen "
    "test_chunk_varlen_prefill test_chunk_gate_in_kernel test_chunk_gate_in_kernel_gqa "
    "test_chunk_gate_in_kernel_varlen",
    "test_delta": "test_chunk test_chunk_with_chunk_size test_chunk_varlen",
    "test_gla": "test_fused_recurrent test_fused_recurrent_state_v_first test_fused_recurrent_varlen test_chunk "
    "test_chunk_state_v_first test_chunk_varlen",
    "test_simple_gla": "test_fused_recurrent test_fused_recurrent_state_v_first test_fused_recurrent_varlen "
    "test_chunk test_chunk_with_chunk_size test_chunk_state_v_first test_chunk_varlen test_fused_chunk "
    "test_fused_chunk_varlen test_parallel test_parallel_varlen",
    "test_retention": "test_chunk test_chunk_with_chunk_size test_chunk_varlen test_fused_chunk "
    "test_fused_chunk_varlen test_parallel test_fused_recurrent_state_v_first",
    "test_linear_attn": "test_fused_recurrent test_chunk test_fused_chunk test_normalize_split_resume "
    "test_normalize_grad test_normalize_zinit_grad",
    "test_lightning_attn": "test_chunk_with_chunk_size",
}
"""Left out: backends, gate kernels and helpers, naive functions, pools of states, the states of all chunks."""

_RECURRENT, _CHUNKED = ("fused_recurrent_",), ("chunk_", "fused_chunk_", "parallel_")
_ROWS = "kda gated_delta_rule delta_rule gla simple_gla retention lightning_attn linear_attn".split()
_HOW = frozenset("cu_seqlens_cpu chunk_indices safe_gate disable_recompute head_first use_graph max_num_seqs".split())
"""Arguments that say how a result is computed, not what it is."""
_OFF = frozenset("reverse gv return_intermediate_states cp_context".split())
"""Arguments of something else, which these tests leave off."""


def in_place_of(fn: Callable[..., Any]) -> Call:
    """A call of our op with the arguments of FLA's ``fn``; those of which it has none are an error."""
    signature, name = inspect.signature(inspect.unwrap(fn)), fn.__name__

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if "transpose_state_layout" in kwargs:
            return fn(*args, **kwargs)  # FLA's own handling of an old name
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for key, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(key, {})
        on = [key for key in _OFF if given.pop(key, None) not in (None, False)]
        assert not on, f"{name} is called with {on}"
        q, k, scale = given["q"], given["k"], given.get("scale")
        maps, normalize = given.pop("output_attentions", False), given.pop("normalize", False)
        gate, sums = given.get("g"), None
        if normalize and isinstance(given["initial_state"], tuple):
            given["initial_state"], sums = given["initial_state"]
        packed = given.get("cu_seqlens")
        o, state = linear_attention(**_arguments(name, given))
        if maps:  # of which we have none
            with torch.no_grad():
                return o, fn(q, k, bound.arguments["v"], g=gate, scale=scale, output_attentions=True)[1]
        if normalize:
            divided = importlib.import_module("fla.ops.linear_attn.utils").normalize_with_z_state
            o, sums = divided(o, q, k, q.shape[-1] ** -0.5 if scale is None else scale, sums, False, packed)
            return o, (state, sums)
        return o, None if name.startswith("parallel_") else state

    return call


def _arguments(name: str, given: Given) -> Given:
    """Of our op, from those of FLA's function; ``given`` is used up."""
    q, k, v = (given.pop(key) for key in "qkv")
    gate, beta = _log_gate(name, q, given), given.pop("beta", None)
    taken: Given = {
        "delta": name.endswith(("delta_rule", "kda")), "scale": given.pop("scale", None),
        "initial_state": given.pop("initial_state", None), "cu_seqlens": given.pop("cu_seqlens", None),
        "output_final_state": given.pop("output_final_state", False), "chunk_size": given.pop("chunk_size", None),
        "qk_l2norm": given.pop("use_qk_l2norm_in_kernel", False),
        "sigmoid_beta": given.pop("use_beta_sigmoid_in_kernel", False),
        "state_layout": "VK" if given.pop("state_v_first", False) else "KV",
    }  # fmt: skip
    if given.pop("allow_neg_eigval", False):
        beta = beta.float()  # as FLA's kernels take it
        beta, taken["sigmoid_beta"] = 2 * (beta.sigmoid() if taken["sigmoid_beta"] else beta), False
    rates, bias, bound = (given.pop(key, None) for key in ("A_log", "dt_bias", "lower_bound"))
    if given.pop("use_gate_in_kernel", False):
        assert gate is not None
        heads = v.shape[2]
        taken["A_log"] = torch.zeros(heads, device=v.device) if rates is None else rates.reshape(-1)
        taken["gate_fn"] = "softplus" if bound is None else "sigmoid"
        taken |= {} if bound is None else {"gate_scale": bound}
        taken |= {} if bias is None else {"dt_bias": bias.reshape(heads, *gate.shape[3:])}
    unknown = given.keys() - _HOW
    assert not unknown, f"{name} has arguments that have no counterpart: {sorted(unknown)}"
    return {"q": q, "k": k, "v": v, "g": gate, "beta": beta} | taken


def _log_gate(name: str, q: Tensor, given: Given) -> Tensor | None:
    """Whichever of FLA's three arguments is given, or what its function makes of nothing but the heads."""
    gates = [x for x in (given.pop(key, None) for key in ("g", "gk", "g_gamma")) if x is not None]
    heads = torch.arange(q.shape[2], device=q.device, dtype=torch.float32)
    if name.endswith("retention"):
        gates.append((1 - torch.exp2(-5 - heads)).log())
    if name.endswith("lightning_attn"):
        gates.append(-(8 / q.shape[2] * (1 - given.pop("layer_idx") / given.pop("num_layers"))) * heads)
    assert len(gates) <= 1, f"{name} has several gates"
    return gates[0] if gates else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """``TESTS`` alone, with ours among the functions that a test is parametrised by."""
    kept = [item for item in items if item.function.__name__ in TESTS.get(_file(item), "").split()]
    for item in kept:
        given = cast("Given", item.callspec.params if hasattr(item, "callspec") else {})
        if "fn" in given:
            given["fn"] = in_place_of(given["fn"])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _file(item: pytest.Function) -> str:
    return item.path.stem


@pytest.fixture(autouse=True)
def ours_are_tested(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that a test names by what it is called itself are ours in its module."""
    recurrent = request.function.__name__.startswith("test_fused_recurrent")
    for prefix in _RECURRENT if recurrent else _CHUNKED:
        for name in (prefix + row for row in _ROWS):
            if callable(fn := getattr(request.module, name, None)):
                monkeypatch.setattr(request.module, name, in_place_of(fn))
