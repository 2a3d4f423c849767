"""FLA's own naive references, where ``fla-core`` is installed (the ``fla`` test extra); none of their text is copied.

The files are loaded by path, because importing ``fla`` itself wants Triton. They need torch and einops only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.spellings.near_misses import near_miss
from tests.spellings.registry import spelling

FP32 = (torch.float32,)  # the references compute in fp32 whatever they are given
SHORT = (7, 1, 33)


def reference(op: str) -> ModuleType | None:
    """``fla/ops/<op>/naive.py``, or None without FLA."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("einops") is None:
        return None
    path = Path(package.submodule_search_locations[0], "ops", op, "naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{op}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks up the globals of inlined functions by module name
    spec.loader.exec_module(module)
    return module


def _first(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    return fn(*args, **kwargs)[0]


def _with_state(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The last argument is the initial state; both results are wanted."""
    return fn(*args[:-1], initial_state=args[-1], output_final_state=True, **kwargs)


def _add(name: str, pattern: str, takes: str, fn: Callable[..., Any], **traits: Any) -> None:
    spelling(pattern, takes, name=f"fla_{name}", dtypes=FP32, **traits)(fn)


def _add_delta() -> None:
    if (kda := reference("kda")) is not None:
        recurrent, chunk = kda.naive_recurrent_kda, kda.naive_chunk_kda
        _add("kda_recurrent", "kda", "q k v g beta", partial(_first, recurrent), lengths=SHORT)
        _add("kda_recurrent_grouped", "kda", "q k v g beta", partial(_first, recurrent), groups=2, lengths=SHORT)
        stated = partial(_with_state, recurrent)
        _add("kda_recurrent_state", "kda", "q k v g beta state", stated, returns_state=True, lengths=SHORT)
        small = partial(_first, chunk, chunk_size=16)
        _add("kda_chunk16", "kda", "q k v g beta", small, multiple=16, lengths=(32, 16, 80))
        stated = partial(_with_state, chunk, chunk_size=16)
        traits: dict[str, Any] = {"returns_state": True, "multiple": 16, "lengths": (32,)}
        _add("kda_chunk16_state", "kda", "q k v g beta state", stated, **traits)
        _add("kda_chunk64", "kda", "q k v g beta", partial(_first, chunk), multiple=64, lengths=(128, 64))
    if (gdn := reference("gated_delta_rule")) is not None:
        pattern = "gated_delta_rule"
        recurrent, chunk = gdn.naive_recurrent_gated_delta_rule, gdn.naive_chunk_gated_delta_rule
        _add("gdn_recurrent", pattern, "q k v beta g", partial(_first, recurrent), lengths=SHORT)
        stated = partial(_with_state, recurrent)
        _add("gdn_recurrent_state", pattern, "q k v beta g state", stated, returns_state=True, lengths=SHORT)
        _add("gdn_chunk64", pattern, "q k v g beta", partial(_first, chunk), lengths=(100, 64))
        stated = partial(_with_state, chunk, chunk_size=16)
        _add("gdn_chunk16_state", pattern, "q k v g beta state", stated, returns_state=True, lengths=(24, 16, 69))
    if (delta := reference("delta_rule")) is not None:
        heads: dict[str, Any] = {"layout": "bhtd", "returns_state": True}
        _add("delta_recurrent", "delta_rule", "q k v beta", delta.delta_rule_recurrence, lengths=SHORT, **heads)
        chunkwise = delta.delta_rule_chunkwise
        _add("delta_chunk32", "delta_rule", "q k v beta", chunkwise, multiple=32, lengths=(64, 32, 160), **heads)


def _add_plain() -> None:
    if (gla := reference("gla")) is not None:
        recurrent = gla.naive_recurrent_gla
        _add("gla_recurrent", "gla", "q k v g", partial(_first, recurrent), lengths=SHORT)
        stated = partial(_with_state, recurrent)
        _add("gla_recurrent_state", "gla", "q k v g state", stated, returns_state=True, lengths=SHORT)
    if (simple := reference("simple_gla")) is not None:
        recurrent, chunk = simple.naive_recurrent_simple_gla, simple.naive_chunk_simple_gla
        stated = partial(_with_state, recurrent)
        _add("simple_gla_recurrent", "simple_gla", "q k v g state", stated, returns_state=True, lengths=SHORT)
        _add("simple_gla_chunk64", "simple_gla", "q k v g", partial(_first, chunk), lengths=(100, 64))
        stated = partial(_with_state, chunk, chunk_size=16)
        traits: dict[str, Any] = {"returns_state": True, "lengths": (24, 16, 69)}
        _add("simple_gla_chunk16_state", "simple_gla", "q k v g state", stated, **traits)
        _add("simple_gla_parallel", "simple_gla", "q k v g", partial(_first, simple.naive_parallel_simple_gla))
    if (linear := reference("linear_attn")) is not None:
        recurrent = linear.naive_recurrent_linear_attn
        _add("linear_recurrent", "linear_attention", "q k v", partial(_first, recurrent), lengths=SHORT)
        stated = partial(_with_state, recurrent)
        _add("linear_recurrent_state", "linear_attention", "q k v state", stated, returns_state=True, lengths=SHORT)
        chunk = linear.naive_chunk_linear_attn
        _add("linear_chunk64", "linear_attention", "q k v", chunk, multiple=64, lengths=(128, 64))
    if (retention := reference("retention")) is not None:
        gammas = tuple(1 - 2.0 ** (-5 - h) for h in range(3))
        traits = {"layout": "bhtd", "constant_decay": gammas, "lengths": (17, 40)}
        _add("retention_parallel", "retention", "q k v", retention.naive_retention, **traits)


def _add_near_misses() -> None:
    """Forms whose score matrix is a second output, or whose output has a denominator."""
    if (simple := reference("simple_gla")) is not None:

        def fla_simple_gla_scores_escape(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            return simple.naive_parallel_simple_gla(q, k, v, g)

        near_miss("simple_gla", "q k v g", expect="either", differs=False)(fla_simple_gla_scores_escape)
    if (delta := reference("delta_rule")) is not None:

        def fla_delta_parallel(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
            return delta.delta_rule_parallel(q, k, v, beta, BM=32, BN=16)

        traits: dict[str, Any] = {"layout": "bhtd", "length": 64, "expect": "either", "differs": False}
        near_miss("delta_rule", "q k v beta", **traits)(fla_delta_parallel)
    if (linear := reference("linear_attn")) is not None:

        def fla_linear_normalized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return linear.naive_recurrent_linear_attn(q, k, v, normalize=True)[0]

        near_miss("linear_attention", "q k v", expect="either")(fla_linear_normalized)


_add_delta()
_add_plain()
_add_near_misses()
