"""``python -m tests.faults``: an error at every function boundary in turn; each must leave what torch alone gives."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import Counter
from functools import partial

import torch

# Torch-private: switches Inductor's caches on disk off.
from torch._inductor import config as inductor_config

from kdacompile import containment
from tests.faults.inject import boundaries, in_children
from tests.faults.models import MODELS, Case


def outcome(case: Case) -> str:
    """What came of a fault: "contained" or "survived" (torch's results), or what is wrong."""
    try:
        results, report = case.compile()
    except Exception as error:  # noqa: BLE001 - whatever reaches the caller is the finding
        return f"ESCAPED as {type(error).__name__}: {str(error)[:200]}"
    if not case.agrees(results, report):
        return "WRONG"
    told = any(rejection.code == "internal" for rejection in report.rejections)
    return "contained" if told else "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--inner", default="aot_eager", choices=["eager", "aot_eager", "inductor"])
    parser.add_argument("--every", type=int, default=1, help="take every so many boundaries only")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time; default: all cores")
    arguments = parser.parse_args()
    os.environ.pop(containment.RAISE, None)
    logging.getLogger("kdacompile").setLevel(logging.CRITICAL)
    bad = 0
    with inductor_config.patch(force_disable_caches=True):
        for name in arguments.model or MODELS:
            case, started = Case(name, arguments.inner), time.monotonic()
            case.compile()  # loads what a process loads once
            faults = boundaries(case.compile)[:: arguments.every]
            found = in_children(faults, partial(outcome, case), arguments.processes)
            counts = Counter(result.split()[0] for result in found.values())
            for fault, result in found.items():
                if result.split()[0] not in ("contained", "survived"):
                    bad += 1
                    print(f"{name}: {fault}: {result}", flush=True)
            torch._dynamo.reset()
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            print(f"{name}: {len(faults)} faults: {listed}; {time.monotonic() - started:.0f} s", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
