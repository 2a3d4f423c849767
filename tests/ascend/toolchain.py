"""Runs in the environment of the Ascend tools and answers requests: ``python -m tests.ascend.toolchain``.

A request is a line of JSON on the standard input, its answer a line on the standard output. triton-ascend installs
itself under the name triton, so it has an environment of its own, and what this file imports is there and nowhere
else: the tests talk to it through :mod:`tests.ascend.tools`.
"""

# pyright: reportCallIssue=false
# (the checker sees the other triton)

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import ascendnpuir  # pyright: ignore[reportMissingImports]
import numpy as np

from tests.ascend.simulator import (
    DeadlockError,
    FlagError,
    RaceError,
    Simulator,
    UnsupportedError,
    device,
    facts,
    next_facts,
    parse,
)
from tests.ascend.simulator.memory import DTYPES, BoundsError

BINARIES = Path(str(ascendnpuir.__file__)).parent / "bin"
OPTIMISED = "module.hivm.opt.mlir"
LIMIT = 600  # seconds
WORK = {"": 30, "-a5": 150}  # seconds of a core for one run; kernels take about one, and ten


class CompilerError(RuntimeError):
    """The compiler refused a kernel; the text is its own."""


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one kernel of ``source`` for ``arch``; returns where its HIVM is, and the facts.

    The signature maps argument names to Triton types, ``constants`` the constexpr ones to values. Results are kept in
    the folder ``cache`` under a name made of all of that and of the versions of the tools.
    """
    versions = [metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir")]
    key = hashlib.sha256(json.dumps([request, versions], sort_keys=True).encode()).hexdigest()[:32]
    folder = Path(request["cache"]) / key
    with folder.with_suffix(".lock").open("w") as lock:  # processes that test in parallel want the same kernels
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=request["cache"]) as temporary:
                work = Path(temporary) / "work"
                work.mkdir()
                linalg = _linalg(request, work)
                text, generic = _hivm(linalg, request, work)
                (work / "kernel.mlir").write_text(text)
                (work / "kernel.generic.mlir").write_text(generic)
                work.rename(folder)
    text, kernel = (folder / "kernel.mlir").read_text(), request["kernel"]
    if _suffix(request["arch"]):  # its Vec code is functions with jumps, which nothing here reads
        found = next_facts(text, kernel)
    else:
        found = facts(parse((folder / "kernel.generic.mlir").read_text()), text, kernel)
    return {"folder": str(folder), "device": device(text), "facts": asdict(found)}


def _suffix(arch: str) -> str:
    """Of the binaries for an architecture: the next generation has its own."""
    return "-a5" if arch.startswith("Ascend910_95") else ""


def _load(source: str, work: Path) -> ModuleType:
    """The emitted text as a module: Triton reads the source of a kernel from its file."""
    path = work / "emitted.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["emitted"] = module
    spec.loader.exec_module(module)
    return module


def _linalg(request: dict[str, Any], work: Path) -> str:
    """Triton to linalg, by the front end of triton-ascend."""
    from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]
    from triton.backends.ascend import compiler  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    function = getattr(_load(request["source"], work), request["kernel"])
    backend = compiler.AscendBackend(GPUTarget("npu", request["arch"], 0))
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(fn=function, signature=request["signature"], constants=request["constants"])
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    details = {"target": backend.target, "hash": "", **options.__dict__}
    module = compiler.make_ttir(module, details, options)
    text, _ = compiler._parse_linalg_metadata(
        compiler.ttir_to_linalg(module, details, options, named_ops=True), details
    )
    return text


def _hivm(linalg: str, request: dict[str, Any], work: Path) -> tuple[str, str]:
    """linalg to optimised HIVM, in its own and in MLIR's generic form.

    The compiler ends with an error, because the last step (hivmc) belongs to CANN; the file it leaves is the result.
    """
    suffix = _suffix(request["arch"])
    (work / "kernel.ttadapter.mlir").write_text(linalg)
    command = [
        str(BINARIES / f"bishengir-compile{suffix}"), str(work / "kernel.ttadapter.mlir"),
        f"--target={request['arch']}", "--enable-auto-multi-buffer=true", "--enable-auto-bind-sub-block=true",
        "--enable-hfusion-compile=true", "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true",
        *request.get("options", ()), f"--save-temps={work}", "-o", str(work / "kernel.o"),
    ]  # fmt: skip
    done = limited(command, request["kernel"], WORK[suffix])
    result = work / OPTIMISED
    if not result.exists():
        raise CompilerError((done.stdout + done.stderr).replace(str(work), "")[-4000:])
    text = result.read_text()
    return text, generic_form(text, suffix)


def generic_form(text: str, suffix: str) -> str:
    command = [str(BINARIES / f"bishengir-opt{suffix}"), "-", "--mlir-print-op-generic"]
    return limited(command, "the generic form", WORK[suffix], text).stdout


def limited(command: list[str], what: str, work: int, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a binary that may not come back: on some kernels the compiler's pass ``cv-pipelining`` runs for ever, in one
    run of ten (ascendnpu-ir 1.2.0), and the next run is as good as any. ``work``: seconds of a core a run may take."""
    name, end = Path(command[0]).name, time.monotonic() + LIMIT
    command = ["sh", "-c", f'ulimit -t {work}; exec "$@"', name, *command]
    with suppress(subprocess.TimeoutExpired):
        while (left := end - time.monotonic()) > 0:
            done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=left)
            if done.returncode not in (-signal.SIGXCPU, -signal.SIGKILL):
                return done
    raise CompilerError(f"{name} has not come back on {what} in {LIMIT} s, tried anew after every {work} s of work")


def run_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Run one launch on the arrays of an ``.npz`` file and write them back.

    Of the arguments a string names an array, anything else is a number; ``kinds`` names arrays that numpy has no type
    for. ``edits`` change the HIVM first: mutations, for the tests' own sake.
    """
    with np.load(request["arrays"]) as stored:
        arrays = {name: stored[name] for name in stored.files}
    views = {name: x.view(DTYPES[kind]) if (kind := request["kinds"].get(name)) else x for name, x in arrays.items()}
    text = (Path(request["folder"]) / "kernel.generic.mlir").read_text()
    for edit in request["edits"]:
        text = _edited(text, *edit)
    arguments = [views[x] if isinstance(x, str) else x for x in request["arguments"]]
    simulator = Simulator(parse(text), request["order"], request["seed"])
    simulator.run(request["kernel"], arguments, request["grid"], request["workspace_bytes"])
    np.savez(request["arrays"], **arrays)
    return {}


def _edited(text: str, pattern: str, replacement: str, occurrence: int) -> str:
    """``text`` with one match of ``pattern`` replaced, or all of them where ``occurrence`` is -1."""
    matches = list(re.finditer(pattern, text))
    if len(matches) <= max(occurrence, 0):
        raise ValueError(f"{len(matches)} matches of {pattern!r}")
    for match in reversed(matches if occurrence < 0 else matches[occurrence : occurrence + 1]):
        text = text[: match.start()] + match.expand(replacement) + text[match.end() :]
    return text


def main() -> None:
    sys.stdout, answers = sys.stderr, sys.stdout  # what the tools print is no answer
    actions = {"compile": compile_kernel, "run": run_kernel}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request.pop("do")](request)
        except (CompilerError, UnsupportedError, BoundsError, DeadlockError, FlagError, RaceError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
