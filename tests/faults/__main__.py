"""``python -m tests.faults``: an error at every function boundary in turn; each must leave what torch alone gives."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import Counter

import torch

# Torch-private: switches Inductor's caches on disk off.
from torch._inductor import config as inductor_config

from kdacompile import containment
from tests.faults.inject import Fault, boundaries, injected
from tests.faults.models import MODELS, Case


def outcome(case: Case, fault: Fault) -> str:
    """What came of one fault: "contained" or "survived" (torch's results), or what is wrong."""
    try:
        with injected(fault) as raised:
            results, report = case.compile()
    except Exception as error:  # noqa: BLE001 - whatever reaches the caller is the finding
        return f"ESCAPED as {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    if not raised:
        return "not reached"
    if not case.agrees(results, report):
        return "WRONG"
    told = any(rejection.code == "internal" for rejection in report.rejections)
    return "contained" if told else "survived"


def sample(case: Case, every: int, offset: int = 0) -> list[Fault]:
    """Every so many boundaries of compiling a case, once what a process loads once is loaded."""
    case.compile()
    return boundaries(case.compile)[offset::every]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--inner", default="aot_eager", choices=["eager", "aot_eager", "inductor"])
    parser.add_argument("--every", type=int, default=1, help="take every so many boundaries only")
    arguments = parser.parse_args()
    os.environ.pop(containment.RAISE, None)
    logging.getLogger("kdacompile").setLevel(logging.CRITICAL)
    bad = 0
    with inductor_config.patch(force_disable_caches=True):
        for name in arguments.model or MODELS:
            case, started = Case(name, arguments.inner), time.monotonic()
            counts: Counter[str] = Counter()
            for fault in sample(case, arguments.every):
                found = outcome(case, fault)
                counts[found.split()[0]] += 1
                if found.split()[0] in ("ESCAPED", "WRONG"):
                    bad += 1
                    print(f"{name}: {fault}: {found}", flush=True)
            torch._dynamo.reset()
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            print(f"{name}: {sum(counts.values())} faults: {listed}; {time.monotonic() - started:.0f} s", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
