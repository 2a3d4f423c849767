"""The full table: every model with MLA, attention implementation and cache, prefill and cached step.

    python -m tests.mla [--models deepseek_v3,youtu] [--inner inductor]

A row passes when every MLA attention is matched in the right mode, the model stays one graph (unless it is more under
any backend), and fp32 logits are within 1e-5 of eager's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.mla.sweep import Row, cells, measure
from tests.models.mla_zoo import CASES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mla", description=__doc__)
    parser.add_argument("--models", default=",".join(CASES), help="comma-separated; default: all")
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager", help="who compiles the rest")
    args = parser.parse_args(argv)
    names = [name for name in args.models.split(",") if name]
    if unknown := sorted(set(names) - set(CASES)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(CASES)}")
    rows: list[Row] = []
    print(f"{'model':<16}{'attn':<6}{'cache':<8}{'what':<8}{'mla':>5}{'graphs':>7}{'error':>10}{'s':>8}  verdict")
    for cell in cells(names):
        rows.append(measure(cell, args.inner))
        print(rows[-1], flush=True)
    failed = sum(bool(row.problems) for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} rows pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
