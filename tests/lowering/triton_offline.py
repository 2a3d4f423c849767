"""Compiling the portable MLA kernels for GPUs that this machine does not have."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kdacompile.lowering.triton import mla, mla_split


def compile_attend(capability: int, **given: Any) -> Any:
    """16 rows of DeepSeek-V3's cache in bf16, unless ``given`` says otherwise."""
    types = dict.fromkeys(("q", "q_rope", "latent", "rope", "o"), "*bf16") | {"mask": "*u8", "scale": "fp32"}
    types |= dict.fromkeys(("table", "lengths", "items"), "*i32")
    types |= dict.fromkeys(("sinks", "lse", "part_o", "part_lse"), "*fp32")
    sizes = {"C_STEP": 576, "R_STEP": 576, "R": 512, "RP": 512, "D": 64, "DP": 64, "BM": 16, "BN": 64, "BLOCK": 64}
    kinds = {"PAGE": 64, "MASK": "", "CAUSAL": False, "HAS_LENGTHS": True, "HAS_SINKS": False, "SCHEDULED": True}
    others = {"PARTIAL": True, "STAGES": 2, "PRECISION": "tf32", "CHAINED": capability >= 90, "APART": False}
    return _compile(mla.attend, types, {**sizes, **kinds, **others, **given}, capability)


def compile_schedule(*, stay: bool) -> Any:
    sizes = {"BP": 128, "PP": 512, "WP": 256 if stay else 0, "LOG_B": 7, "BLOCK": 64, "CHAINED": True}
    sizes |= {"OVERHEAD": 5, "PARTIAL": 3, "SHORT": 4}
    return _compile(mla_split.schedule, dict.fromkeys(("lengths", "items"), "*i32"), sizes, 90)


def compile_combine(columns: int, parts: int, scheduled: bool) -> Any:
    types = dict.fromkeys(("part_o", "part_lse", "lse", "sinks"), "*fp32") | {"o": "*bf16", "plan": "*i32"}
    constants = {"R": 512, "BC": columns, "BS": parts, "SCHEDULED": scheduled, "HAS_SINKS": True, "CHAINED": True}
    return _compile(mla_split.combine, types, constants, 90)


def _compile(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> Any:
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(constants, "constexpr")
    steps = ("q_sb", "q_st", "q_sh", "qr_sb", "qr_st", "qr_sh", "c_sp", "r_sp")
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in steps]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
