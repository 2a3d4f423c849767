"""Retention, with one decay per head: parallel, chunkwise and one token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.published.draw import B, H, K, V, bhtd, normal, unit
from tests.published.registry import Program, case
from tests.published.sources import Repository

JAMIE = Repository("Jamie-Stirling/RetNet", "a5841a3ebffd181c7ec1d964b46060519df4b6c8", roots=("src",))
SYNCDOTH = Repository("syncdoth/RetNet", "2634bbfb629df6c91dd9b755e66d61ad300607e7")
FKODOM = Repository("fkodom/yet-another-retnet", "fdd1c0e85a5ee64d4556c731879ee5efab9a968a")


@case(JAMIE, "src/retention.py", "retention")
def simple_parallel(m: Any) -> Program:
    return m.SimpleRetention(16, 0.9, 8), (normal(B, 20, 16),)


@case(JAMIE, "src/retention.py", "retention")
def simple_chunkwise(m: Any) -> Program:
    layer = m.SimpleRetention(16, 0.9, 8)
    return lambda x, state: layer.forward_chunkwise(x, state, 2), (normal(B, 6, 16), normal(B, 8, 8))


@case(JAMIE, "src/retention.py", "retention")
def simple_step(m: Any) -> Program:
    layer = m.SimpleRetention(16, 0.9, 8)
    return lambda x, state: layer.forward_recurrent(x, state, 5), (normal(B, 1, 16), normal(B, 8, 8))


@case(JAMIE, "src/retention.py", "retention", "retention")
def multiscale_parallel(m: Any) -> Program:
    return m.MultiScaleRetention(16, 2), (normal(B, 20, 16),)


@case(FKODOM, "yet_another_retnet/retention.py", "retention")
def parallel(m: Any) -> Program:
    return m.retention_parallel, bhtd(20)


@case(FKODOM, "yet_another_retnet/retention.py", "retention")
def chunkwise(m: Any) -> Program:
    q, k, v = bhtd(20)
    return m.retention_chunkwise, (q, k, v, normal(B, H, K, v.shape[-1]))


@case(FKODOM, "yet_another_retnet/retention.py", "retention")
def recurrent(m: Any) -> Program:
    q, k, v = (x[:, :, 0] for x in bhtd(1))
    return m.retention_recurrent, (q, k, v, normal(B, H, K, v.shape[-1]))


@case(FKODOM, "yet_another_retnet/retention.py", "retention")
def layer(m: Any) -> Program:
    x = normal(B, 20, 32)
    return m.MultiScaleRetention(32, 4).eval(), (x, x, torch.clone(x))


@case(SYNCDOTH, "retnet/modeling_retnet.py", "simple_gla", only=("MultiScaleRetention",))
def step(m: Any) -> Program:
    """The state is kept divided by a running scale, as torchscale keeps it."""

    def recurrent(q: Any, k: Any, v: Any, decay: Any, state: Any, scale: Any) -> Any:
        held = {"prev_key_value": state, "scale": scale}
        return m.MultiScaleRetention.recurrent_retention(SimpleNamespace(), q, k, v, decay, held)

    return recurrent, (*bhtd(1), unit(1, H, 1, 1), normal(B, H, V, K), unit(B, H, 1, 1) + 1)
