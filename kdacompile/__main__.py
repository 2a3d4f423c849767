"""``kdacompile`` (or ``python -m kdacompile``): explain, doctor, support, plan, bench, overhead."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kdacompile import __version__
from kdacompile.commands import console, doctor


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a pipe on Windows has no arrows
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "plan" and arguments.write and not arguments.table:
        parser.error("--write goes with --table")
    try:
        status = _run(arguments)
        sys.stdout.flush()  # here, where a pipe that nobody reads any more is no traceback
    except KeyboardInterrupt:
        print("kdacompile: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # kdacompile plan | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kdacompile", description="A torch.compile backend for linear attention.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_explain(commands.add_parser("explain", help="what the backend does with a function, or a transformers model"))
    for name, text in (
        ("doctor", "what this machine can run, and why not the rest"),
        ("support", "what is recognised: a table, Markdown in a pipe"),
    ):
        commands.add_parser(name, help=text).add_argument("--json", action="store_true", help="for a program to read")
    _add_plan(commands.add_parser("plan", help="how a pattern is cut into stages for a target, and its buffers"))
    overhead = commands.add_parser("overhead", help="what the backend costs programs that have nothing for it")
    overhead.add_argument("program", nargs="?", default="", help="only programs whose names begin so")
    overhead.add_argument("--json", type=Path, help="where the figures go")
    bench = commands.add_parser("bench", help="time ours beside Inductor alone and eager, each in its own process")
    bench.add_argument("--suite", default="cpu", help="cpu, lengths, cuda, mla, train or parallel (default: cpu)")
    bench.add_argument("--case", action="append", help="only cases whose name contains this; may be repeated")
    bench.add_argument("--json", type=Path, default=Path("bench.json"), help="where the figures go")
    allowed = "seconds allowed for each wait for a contender (default: 1800; to get ready on a GPU 240 to 300)"
    bench.add_argument("--timeout", type=_positive, help=allowed)
    return parser


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("subject", help="FILE.py:FUNCTION, or a model type of transformers such as kimi_linear")
    explain.add_argument(
        "--tensor", action="append", default=[], metavar="NAME=SHAPE", help="a random argument: q=1x64x4x32:bf16"
    )
    explain.add_argument("--tokens", type=_count, default=128, help="length of a model's prompt (default: 128)")
    explain.add_argument("--device", default="cpu", help="where it runs (default: cpu)")
    explain.add_argument("--no-time", action="store_true", help="do not call it again to estimate what is gained")
    explain.add_argument("--train", action="store_true", help="with gradients, as in training")
    explain.add_argument("--json", action="store_true", help="the report as JSON, for a program to read")
    explain.add_argument("--html", type=Path, help="write the report there as a page")
    explain.add_argument("--svg", type=Path, help="write what a terminal shows there, as a picture (needs rich)")
    explain.add_argument("--open", action="store_true", help="show the page in a browser")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("pattern", nargs="?", default="kda", help="a name of `support`, mla or gdn_state (default: kda)")
    plan.add_argument(
        "--size", nargs="+", default=[], metavar="NAME=N", help="B T H K V, C (a chunk), BV (a value tile)"
    )
    targets = "ascend910b (default), cuda_sm90, cpu, ...: a wrong name lists all; here: this machine's"
    plan.add_argument("--target", default="ascend910b", help=targets)
    forms = "token: the one-token step; segment: what a run of chunks does to the state; gradients"
    plan.add_argument("--form", default="chunk", choices=["chunk", "token", "segment", "gradients"], help=forms)
    plan.add_argument("--naive", action="store_true", help="the textbook's order, to compare with")
    plan.add_argument("--io", default="bf16", help="dtype of the inputs: bf16, fp16, fp32 (default: bf16)")
    plan.add_argument("--ranks", type=_count, help="tokens are cut among so many ranks: what one computes and sends")
    plan.add_argument("--order", default="zigzag", choices=["contiguous", "zigzag"], help="with --ranks: which tokens")
    plan.add_argument("--json", action="store_true", help="stages, buffers and cost for a program to read")
    plan.add_argument("--html", type=Path, help="write a page with the picture there")
    plan.add_argument("--svg", type=Path, help="write the picture there")
    plan.add_argument("--table", action="store_true", help="all patterns and targets, as a Markdown table")
    plan.add_argument("--write", type=Path, help="with --table: put it between the markers of this file")


def _run(arguments: argparse.Namespace) -> int:
    # Each command imports what it needs, and doctor must work where torch does not.
    if arguments.command == "doctor":
        return doctor.main(as_json=arguments.json)
    try:
        from kdacompile.errors import KdaError
        from kdacompile.lowering.errors import LoweringError
    except (ImportError, RuntimeError, OSError) as error:
        print(f"kdacompile: torch cannot be used: {error}; `kdacompile doctor` says more", file=sys.stderr)
        return 2
    try:
        for option in ("html", "svg", "json", "write"):
            if isinstance(path := getattr(arguments, option, None), Path):
                console.check_writable(path)  # now, not after minutes of work
        return _chosen(arguments)
    except BrokenPipeError:
        raise
    except (KdaError, LoweringError, OSError) as error:
        print(f"kdacompile: {error}", file=sys.stderr)
        return 2


def _chosen(arguments: argparse.Namespace) -> int:
    if arguments.command == "explain":
        from kdacompile.commands import explain

        return explain.main(arguments)
    if arguments.command == "support":
        from kdacompile.commands import support

        return support.main(as_json=arguments.json)
    if arguments.command == "overhead":
        from kdacompile.bench import overhead

        return overhead.main(arguments.program, arguments.json)
    if arguments.command == "plan":
        from kdacompile import plans

        return plans.main(arguments)
    from kdacompile.bench import harness

    return harness.main(arguments.suite, arguments.case, arguments.json, arguments.timeout)


if __name__ == "__main__":
    sys.exit(main())
