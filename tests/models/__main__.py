"""The table of generation: every transformers model with latent or linear attention in its default settings.

    python -m tests.models [--models deepseek_v3,qwen3_next] [--ways greedy,static,beam,assisted] [--inner inductor]

A row passes when the tokens are eager's, every layer is matched in every compilation, and 64 tokens cost at most
three, or as many as torch.compile alone needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.models.generation import WAYS, Row, cells, measure, names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(names()), help="comma-separated; default: all")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"default: {','.join(WAYS)}")
    parser.add_argument("--inner", choices=("eager", "inductor"), default="eager", help="who compiles the rest")
    args = parser.parse_args(argv)
    models, ways = ([part for part in text.split(",") if part] for text in (args.models, args.ways))
    if unknown := sorted({*models, *ways} - {*names(), *WAYS}):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join([*names(), *WAYS])}")
    rows: list[Row] = []
    print(f"{'model':<18}{'way':<10}{'layers':>3}  {'by graph':<11}{'s':>7}  verdict")
    for cell in cells(models, ways):
        rows.append(measure(cell, args.inner))
        print(rows[-1], flush=True)
    failed = sum(bool(row.problems) for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} rows pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
