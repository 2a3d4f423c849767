"""One attention layer of every small model beside Inductor alone, on one thread of a CPU: what a call costs there.

    python -m tests.models.small_layers [--layers qwen3_next,deepseek_v3-mla] [--tokens 1,16] [--rounds 40] [--rewrite]
        [--dtype bfloat16] [--train]
    python -m tests.models.small_layers --states [--layers qwen3_next,mamba2,kimi_linear,minimax]

Both compilers compile the same layer in this process and take turns, a block of calls at a time; times are of the
processor. The table has the medians in us and the median of the turns' ratios, kda over Inductor, with quartiles. One
token is a step over a cache for linear attention, a prompt of one token without a cache for MLA. ``--rewrite``: also
where the op is estimated to take longer. ``--states``: one token with states of several sizes, rewritten all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from kdacompile.report.collect import collecting
from tests.models import mla_zoo, zoo

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

CALLS = 20
"""In a block."""


@dataclass(frozen=True)
class Row:
    """Microseconds of processor time of a call, and quartiles of the ratios of turns; ``ops``: what the report has."""

    inductor: float
    kda: float
    low: float
    ratio: float
    high: float
    ops: str

    def __str__(self) -> str:
        return f"{self.inductor:7.0f}{self.kda:7.0f}{self.ratio:7.2f} ({self.low:.2f} to {self.high:.2f})  {self.ops}"


def names() -> list[str]:
    return [*zoo.CASES, *(f"{name}-mla" for name in mla_zoo.CASES)]


def call_of(name: str, tokens: int, dtype: torch.dtype = torch.float32) -> Call:
    """A layer and the arguments that its model calls it with."""
    if name.endswith("-mla"):
        case = mla_zoo.CASES[name.removesuffix("-mla")]
        model: Any = case.build("sdpa" if "sdpa" in case.implementations() else "eager")
        model.to(dtype)
        given = {"input_ids": mla_zoo.tokens(tokens, 1), "use_cache": False}
        layer = _last(model, ("self_attn",)) if "self_attn" in _leaves(model) else _last(model, ("0",))
    else:
        one = zoo.CASES[name]
        model = one.build()
        model.to(dtype)
        cached = tokens == 1
        given = one.step_inputs(model, batch=1) if cached else one.prefill_inputs(model, tokens, cache=False, batch=1)
        layer = _first(model, ("linear_attn", "mamba", "mixer", "self_attn"))
    calls: list[Call] = []
    hook = layer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((module, args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(**given)
    hook.remove()
    return calls[0]


def _leaves(model: nn.Module) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}


def _first(model: nn.Module, leaves: Sequence[str]) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in leaves)


def _last(model: nn.Module, leaves: Sequence[str]) -> nn.Module:
    return [module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in leaves][-1]


def compiled(
    call: Call, backend: str, options: dict[str, Any] | None = None, *, train: bool = False
) -> Callable[[], Any]:
    module, args, kwargs = call
    function = torch.compile(module, backend=backend, options=options)

    def run() -> None:
        if not train:
            with torch.no_grad():
                function(*args, **kwargs)
            return
        module.zero_grad()
        out = function(*args, **kwargs)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    for _ in range(3):
        run()
    return run


def measure(
    name: str,
    tokens: int,
    rounds: int,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    train: bool = False,
) -> Row:
    torch.compiler.reset()
    call = call_of(name, tokens, dtype)
    with collecting() as report:
        contenders = [compiled(call, "inductor", train=train), compiled(call, "kda", options, train=train)]
        times: list[list[float]] = [[], []]
        calls = CALLS // 5 if train else CALLS
        for number in range(rounds):
            for at in (0, 1) if number % 2 else (1, 0):
                start = time.process_time()
                for _ in range(calls):
                    contenders[at]()
                times[at].append((time.process_time() - start) / calls * 1e6)
    ratios = [kda / inductor for inductor, kda in zip(*times, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    found = [*(match.pattern for match in report.matches), *(f"{one.pattern} by cost" for one in report.declined)]
    inductor, kda = map(statistics.median, times)
    return Row(inductor, kda, low, ratio, high, ", ".join(found) or "nothing")


STATES = ((4, 32), (8, 32), (4, 64), (8, 64), (16, 64), (8, 128), (16, 128))
"""Heads, and the width of keys and values."""


def sized(name: str, heads: int, width: int) -> zoo.ModelCase:
    """A model of the zoo with these heads; Mamba-2 with states of twice the width, from 64 on."""
    case = zoo.CASES[name]
    changes: dict[str, dict[str, int]] = {
        "kimi_linear": {"linear_num_heads": heads, "linear_head_dim": width},
        "qwen3_next": {
            "linear_num_key_heads": heads // 2,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": width,
            "linear_value_head_dim": width,
        },
        "mamba2": {
            "hidden_size": heads * width // 2,
            "num_heads": heads,
            "head_dim": width,
            "state_size": width * (1 + (width >= 64)),
        },
        "minimax": {"num_attention_heads": heads, "head_dim": width},
    }

    def config() -> Any:
        made = case.config()
        for key, value in changes[name].items():
            setattr(made, key, value)
        return made

    return replace(case, config=config)


def states(names: Sequence[str], rounds: int, dtype: torch.dtype) -> None:
    print(f"{'layer':<14}{'heads':>6}{'width':>6}  inductor    kda  ratio")
    for name in names:
        for heads, width in STATES:
            case = sized(name, heads, width)
            with patch.dict(zoo.CASES, {name: case}):
                row = measure(name, 1, rounds, {"kda.cost_model": False}, dtype)
            print(f"{name:<14}{heads:>6}{width:>6}  {row}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.small_layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", default=",".join(names()), help="comma-separated; default: all")
    parser.add_argument("--tokens", default="1", help="comma-separated; default: 1")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each compiler; default: 40")
    parser.add_argument("--rewrite", action="store_true", help="also where the op is estimated to take longer")
    parser.add_argument("--states", action="store_true", help="one token with states of several sizes")
    parser.add_argument("--dtype", default="float32", help="of the model; default: float32")
    parser.add_argument("--train", action="store_true", help="forward and backward")
    args = parser.parse_args(argv)
    dtype: torch.dtype = getattr(torch, args.dtype)
    torch.set_num_threads(1)
    if args.states:
        given = args.layers.split(",")
        states(
            [name for name in given if name in ("qwen3_next", "mamba2", "kimi_linear", "minimax")], args.rounds, dtype
        )
        return 0
    print(f"{'layer':<22}{'tokens':>7}{'inductor':>9}{'kda':>7}{'ratio':>7}")
    for name in args.layers.split(","):
        for tokens in map(int, args.tokens.split(",")):
            options = {"kda.cost_model": False} if args.rewrite else None
            row = measure(name, tokens, args.rounds, options, dtype, train=args.train)
            print(f"{name:<22}{tokens:>7}  {row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
