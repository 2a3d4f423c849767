"""``python -m kdacompile``: doctor, support, bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kdacompile import __version__, doctor


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kdacompile", description="A torch.compile backend for linear attention.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    commands.add_parser("support", help="what is recognised, as a Markdown table")
    bench = commands.add_parser("bench", help="time ours beside Inductor alone and eager, each in its own process")
    bench.add_argument("--suite", default="cpu", help="a suite of kdacompile.bench.suites (default: cpu)")
    bench.add_argument("--case", action="append", help="only cases whose name contains this; may be repeated")
    bench.add_argument("--json", type=Path, default=Path("bench.json"), help="where the figures go")
    bench.add_argument("--timeout", type=float, default=1800, help="seconds allowed per contender (default: 1800)")
    return _run(parser.parse_args(argv))


def _run(arguments: argparse.Namespace) -> int:
    # Each command imports what it needs, and doctor must work where torch does not.
    if arguments.command == "doctor":
        return doctor.main()
    from kdacompile.errors import KdaError

    try:
        if arguments.command == "support":
            from kdacompile import support

            print(support.table())
            return 0
        from kdacompile.bench import harness

        return harness.main(arguments.suite, arguments.case, arguments.json, arguments.timeout)
    except KdaError as error:
        print(f"kdacompile: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
