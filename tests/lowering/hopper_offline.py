"""Compiling the Hopper kernels for sm_90a on a machine without a GPU."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kdacompile.lowering.hopper import (
    backward_gradients,
    backward_prepare,
    backward_scalar,
    backward_scan,
    combine,
    linear,
    mla,
    prepare,
    prepare_scalar,
    prepare_unbounded,
    scan,
    scan_channel,
)
from kdacompile.lowering.hopper.launches import COMBINED, gram_registers
from kdacompile.lowering.hopper.schedules import CHANNEL_STAGES, LINEAR_STAGES, Schedule

TENSORS = {
    "A_log": "*fp32", "dt_bias": "*fp32", "beta": "*bf16", "places": "*i32", "announced": "*i32", "buffer": "*bf16",
    "decay": "*fp32", "factors": "*fp32",
}  # fmt: skip
REGISTERS = {"prepare": 168, "prepare_scalar": 128}  # of the backward pass
FLAGS = dict.fromkeys(("HAS_A", "HAS_DT", "HAS_BETA", "SIGMOID_BETA"), True)


def compile_prepare(
    packed: bool = False,
    ready: bool = False,
    width: int = 128,
    raw: bool = False,
    folded: bool = False,
    sigmoid: bool = True,
) -> Any:
    tile = _descriptor(1, 64, 1, width)
    signature = dict.fromkeys(("bound", "shift", "unshift"), "fp32") | {"d_g": tile}
    constants = {"PACKED": packed, "READY": ready, "WIDTH": width, "RAW": raw, "FOLDED": folded}
    constants["SIGMOID_BETA"] = sigmoid
    return _compile_prepare(prepare.prepare, signature, constants)


def compile_prepare_unbounded(
    gate: str = "bf16",
    packed: bool = False,
    gate_fn: str = "softplus",
    ready: bool = False,
    width: int = 128,
    raw: bool = False,
    delta: bool = True,
    folded: bool = False,
    sigmoid: bool = True,
) -> Any:
    signature = {"d_g": _descriptor(1, 64, 1, width, dtype=gate), "gate_scale": "fp32"}
    constants = {"PACKED": packed, "FN": gate_fn, "READY": ready, "WIDTH": width, "RAW": raw, "DELTA": delta}
    constants |= {"FOLDED": folded, "SIGMOID_BETA": sigmoid}
    return _compile_prepare(prepare_unbounded.prepare_unbounded, signature, constants)


def compile_prepare_scalar(
    packed: bool = False,
    ready: bool = False,
    width: int = 128,
    raw: bool = False,
    gate_fn: str = "softplus",
    apart: bool = False,
) -> Any:
    signature = {"g": "*bf16", "gate_scale": "fp32"}
    constants = {"PACKED": packed, "FN": gate_fn, "READY": ready, "WIDTH": width, "RAW": raw, "SIGMOID_BETA": not apart}
    return _compile_prepare(prepare_scalar.prepare_scalar, signature, constants, 4)


def compile_scan(
    columns: int,
    packed: bool = False,
    output: bool = True,
    scalar: bool = False,
    ready: bool = False,
    width: int = 128,
    apart: bool = False,
    ahead: bool = False,
) -> Any:
    tile, rows = _descriptor(1, 64, 1, columns), _descriptor(1, 64, 1, width)
    signature = dict.fromkeys(scan.scan.arg_names, "i32") | {"d_q": rows, "d_k": rows, "d_v": tile, "d_o": tile}
    signature |= {"d_buffer": _descriptor(64, width), "d_M": _descriptor(64, 64), "announced": "*i32"}
    signature |= {"d_factors": _line(256 if scalar else width)}
    signature |= {"o_rows": "*bf16", "initial": "*fp32", "final": "*fp32", "cu_seqlens": "*i64"}
    plan = Schedule(8, 8, columns, 1, columns, 1, 1, width)
    constants = {"BV": columns, "STAGES": plan.stages, "HAS_INITIAL": True, "OUTPUT": output}
    constants |= {"SCALAR": scalar, "READY": ready, "AHEAD": ahead, "PACKED": packed, "WIDTH": width, "APART": apart}
    return _compile(scan.scan, signature | {"chunk_offsets": "*i32"}, constants, columns // 16)


def compile_scan_channel(output: bool = True, ready: bool = False, ahead: bool = False) -> Any:
    tile = _descriptor(1, 64, 1, 64)
    signature = dict.fromkeys(scan_channel.scan_channel.arg_names, "i32") | {"d_v": tile, "d_o": tile}
    signature |= {"d_buffer": _descriptor(64, 128), "d_squares": _descriptor(64, 64), "d_decay": _line(128)}
    signature |= {"d_ends": _descriptor(64, 64, dtype="fp32"), "announced": "*i32"}
    signature |= dict.fromkeys(("initial", "final", "ends"), "*fp32")
    early, stages = CHANNEL_STAGES["outputs" if output else "maps"]
    constants = {"EARLY": early, "STAGES": stages, "READY": ready, "HAS_INITIAL": True}
    return _compile(scan_channel.scan_channel, signature, {**constants, "OUTPUT": output, "AHEAD": ahead}, 4)


def compile_linear(
    scalar: bool = True,
    output: bool = True,
    packed: bool = False,
    ready: bool = False,
    raw: bool = True,
    width: int = 128,
    gate_fn: str = "log",
) -> Any:
    tile, rows = _descriptor(1, 64, 1, 64), _descriptor(1, 64, 1, width)
    signature = dict.fromkeys(linear.linear.arg_names, "i32") | {"d_q": rows, "d_k": rows, "d_v": tile, "d_o": tile}
    signature |= {"d_rows": _descriptor(64, width), "d_squares": _descriptor(64, 64), "d_factors": _line(width)}
    signature |= dict.fromkeys(("announced", "chunk_offsets"), "*i32") | dict.fromkeys(("g", "o_rows", "beta"), "*bf16")
    signature |= dict.fromkeys(("A_log", "dt_bias", "initial", "ends", "decays", "final"), "*fp32")
    signature |= {"cu_seqlens": "*i64"} | dict.fromkeys(("scale", "eps", "gate_scale"), "fp32")
    constants = {"SCALAR": scalar, "OUTPUT": output, "PACKED": packed, "READY": ready, "RAW": raw, "FN": gate_fn}
    constants |= {**FLAGS, "HAS_INITIAL": True, "STAGES": LINEAR_STAGES[width], "BV": 64, "WIDTH": width}
    return _compile(linear.linear, signature, constants, 4)


def compile_combine(width: int = 128) -> Any:
    signature: dict[str, str] = dict.fromkeys(combine.combine.arg_names, "i32")
    signature |= dict.fromkeys(("ends", "states", "initial"), "*fp32")
    signature["d_ends"] = _descriptor(width, width, dtype="fp32")
    constants = {"BLOCK": COMBINED, "WIDTH": width, "HAS_INITIAL": True}
    return _compile(combine.combine, signature, constants, width // 16)


def compile_mla(page: int, scheduled: bool, partial: bool, dtype: str, masked: bool) -> Any:
    half, rope = (_descriptor(1, 64, columns, dtype=dtype) for columns in (256, 64))
    signature = dict.fromkeys(mla.attend.arg_names, "i32") | {"d_q": half, "d_q_rope": rope, "d_c": half, "d_r": rope}
    signature |= dict.fromkeys(("table", "lengths", "items", "starts"), "*i32") | {
        "d_o": half,
        "scale": "fp32",
        "k_rope": f"*{dtype}",
    }
    signature |= dict.fromkeys(("sinks", "lse", "part_lse"), "*fp32")
    signature["d_part"] = _descriptor(1, 64, 128, dtype="fp32")
    constants = {"PAGE": page, "CAUSAL": True, "HAS_LENGTHS": True, "HAS_SINKS": scheduled or not partial}
    constants |= {"CHAINED": True, "MASK": masked}
    signature["mask"] = "*u8"
    return _compile(mla.attend, signature, {**constants, "SCHEDULED": scheduled, "PARTIAL": partial}, 4)


def compile_backward(
    name: str,
    *,
    gate: str = "bf16",
    delta: bool = True,
    packed: bool = False,
    scalar: bool = False,
    values: int = 128,
    forward: int = 0,
    gate_fn: str = "softplus",
    early: str = "",
    ahead: bool = False,
    solved: bool = True,
    pairs: bool = True,
    sigmoid: bool = True,
) -> Any:
    """A kernel of the backward pass, by its name; ``scalar``: of the scan with a gate per token."""
    kernels = {"prepare": backward_prepare.prepare, "prepare_scalar": backward_scalar.prepare_scalar}
    kernels |= {"scan": backward_scan.scan, "gradients_scalar": backward_scalar.gradients_scalar}
    kernel = {**kernels, "gradients": backward_gradients.gradients}[name]
    flags = "DELTA BETA SIGMOID L2NORM NORM_INSIDE RATE BIAS DBIAS GATED STATE FINAL".split()
    constants: dict[str, Any] = {flag: delta or flag not in ("DELTA", "BETA") for flag in flags}
    constants |= {"HV": 32, "HP": 32, "GROUP": 1, "FN": gate_fn, "PACKED": packed, "SCALAR": scalar, "V": values}
    constants |= {
        "FORWARD": forward,
        "AHEAD": ahead,
        "BESIDE": ahead,
        "BOUNDED": gate_fn == "sigmoid",
        "EARLY": early,
        "SOLVED": solved,
        "PAIRS": pairs,
    }
    constants |= {argument: 1 for argument in kernel.arg_names if argument.endswith(("_sd", "_sv"))}
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"cu_seqlens": "*i64", "chunk_offsets": "*i32"}
    signature |= {a: "*bf16" for a in kernel.arg_names if a.endswith(("_ptr", "_buffer"))}
    signature |= dict.fromkeys(("scale", "gate_scale", "l2norm_eps", "over", "times"), "fp32") | {"g_ptr": f"*{gate}"}
    singles = (
        "A_log_ptr dt_bias_ptr dbias_ptr drate_ptr state_ptr final_ptr dstate_ptr last_ptr beta_buffer rate_buffer"
    )
    signature |= dict.fromkeys([*singles.split(), "sums_buffer", "total_buffer", "lines_buffer"], "*fp32")
    signature["done_buffer"] = "*i32"
    signature["last_ptr"] = "*fp32" if ahead else "*bf16"  # what a call does not have is q
    constants["SIGMOID"] = constants["SIGMOID"] and sigmoid
    if not pairs:
        constants |= dict.fromkeys(("GATED", "RATE", "BIAS"), False) | {"FN": "none"}
    if name == "scan":
        rows = (1, 64, 1, 128) if scalar else (64, 128)
        signature |= dict.fromkeys(("d_v", "d_do"), _descriptor(1, 64, 1, 64))
        signature |= dict.fromkeys(("d_keys", "d_queries"), _descriptor(*rows))
        signature |= dict.fromkeys(("d_p", "d_x", "d_y", "d_z"), _descriptor(64, 64)) | {"d_kg": _descriptor(64, 128)}
        signature |= dict.fromkeys(("d_s", "d_d"), _descriptor(128, 64))
        signature |= {"d_beta": _line(64), "d_gates": _line(64 if scalar else 128), "d_rates": _line(128)}
    signature = {a: kind for a, kind in signature.items() if a in kernel.arg_names}
    constants = {a: value for a, value in constants.items() if a in kernel.arg_names}
    steps = [i for i, a in enumerate(signature) if a.endswith(("_sb", "_st", "_sh")) and not a.startswith("beta")]
    limit = {"maxnreg": REGISTERS[name]} if name in REGISTERS else {}
    return _compile(kernel, signature, constants, 4, steps, **limit)


def spilled_bytes(compiled: Any) -> int:
    """Stack a thread has, by the compiler's own disassembler: what did not fit the registers."""
    tool = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(text.split("STACK:")[1].split()[0])


def _compile_prepare(kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int = 8) -> Any:
    tile = _descriptor(1, 64, 1, constants["WIDTH"])
    common = dict.fromkeys(kernel.arg_names, "i32") | TENSORS | {"d_q": tile, "d_k": tile}
    common |= {"d_out": _descriptor(64, 64), "scale": "fp32", "eps": "fp32"}
    common = {name: kind for name, kind in (common | signature).items() if name in kernel.arg_names}
    kinds = {True: "unbounded", False: "linear", None: "bounded"}
    registers = gram_registers(kinds[constants.get("DELTA")], constants["WIDTH"])
    constants = {**FLAGS, **constants, "GRAM_REGISTERS": registers}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return _compile(kernel, common, constants, warps)


def _descriptor(*block: int, dtype: str = "bf16") -> str:
    bits = 32 if dtype == "fp32" else 16
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{gl.NVMMASharedLayout(128, bits, len(block))}>"


def _line(length: int) -> str:
    return f"tensordesc<fp32[{length}],{gl.NVMMASharedLayout(0, 32, 1)}>"


def _compile(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    warps: int,
    multiples: Sequence[int] = (),
    **options: int,
) -> Any:
    signature |= dict.fromkeys(constants, "constexpr")
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i in [*pointers, *multiples]}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})
