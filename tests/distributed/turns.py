"""Halves of the heads that take turns: checks of ``test_context_parallel.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kdacompile.distributed import ContextParallel, collectives
from kdacompile.distributed.local import Readers
from tests.distributed.checks import BOUNDS, TOKENS, attend, compare, operands, with_tokens
from tests.distributed.processes import Ranks


@contextmanager
def recorded() -> Generator[list[str]]:
    """The passes, and when messages begin and are waited for."""
    calls: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*args, **options)

        return call

    def start(x: Tensor, group: str, ranks: int, begin: Any = collectives.start_gather) -> Callable[[], Tensor]:
        calls.append("send")
        return noted("wait", begin(x, group, ranks))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(collectives, "start_gather", start))
        for name in ("first_pass", "outputs", "asked", "gradients"):
            stack.enter_context(mock.patch.object(Readers, name, noted(name, getattr(Readers, name))))
        yield calls


def in_turn(ranks: Ranks) -> None:
    """What a half computes lies between a message of the other's and the wait for it, forward and backward."""
    given = operands("channel", None, TOKENS)
    for overlap in (False, True):
        context = ContextParallel(overlap=overlap, check=False)
        leaves = {
            name: (context.shard(x) if name in with_tokens("channel") else x).clone().requires_grad_()
            for name, x in given.items()
        }
        with recorded() as calls:
            o, _ = attend(leaves, context, None)
            forward, calls[:] = list(calls), []
            o.sum().backward()
        if overlap:
            assert forward == [*("first_pass", "send") * 2, *("wait", "outputs") * 2], forward
            assert calls == [*("asked", "send") * 2, *("wait", "gradients") * 2], calls
        else:
            assert forward == ["first_pass", "send", "wait", "outputs"], forward
            assert calls == ["asked", "send", "wait", "gradients"], calls


def numbers(ranks: Ranks) -> None:
    """Every gate, with and without the delta rule, rows and packed sequences, both orders, gathered and in steps."""
    cases = itertools.product(("none", "head", "token", "channel"), ((None, True), (BOUNDS, False)))
    for (gate, (bounds, delta)), (order, steps) in zip(
        cases, itertools.cycle(itertools.product(("contiguous", "zigzag"), (False, True))), strict=False
    ):
        for flip in (delta, not delta):
            compare(
                lambda x, c, b=bounds, d=flip: attend(x, c, b, delta=d),
                operands(gate, bounds, TOKENS), with_tokens(gate),
                ContextParallel(order=order, steps=steps, overlap=True), shared=1,
            )  # fmt: skip


def parameters_and_odd_heads(ranks: Ranks) -> None:
    """Parameters of a gate are cut with the heads; an odd number of key heads is one call."""
    tensors = operands("channel", None, TOKENS)
    tensors |= {"A_log": 0.3 * torch.randn(4).double(), "dt_bias": torch.randn(4, 5).double()}
    tensors["g"] = torch.randn_like(tensors["g"])
    for heads in (2, 1):
        given = {name: x[:, :, :heads] if name in "qk" else x for name, x in tensors.items()}
        compare(
            lambda x, c: attend(x, c, None, gate_fn="softplus", sigmoid_beta=True, qk_l2norm=True),
            given, with_tokens("channel"), ContextParallel(order="zigzag", overlap=True), shared=1,
        )  # fmt: skip
