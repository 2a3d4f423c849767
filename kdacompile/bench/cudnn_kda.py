"""KDA of NVIDIA's cudnn-frontend, where it is installed, K = V = 128.

The forward with log or "sigmoid" gates in fp32, norms inside or outside; the backward with log gates, norms outside.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from kdacompile.bench import rows

NORM, SIGMOID_GATE = 1, 2
"""What its forward is told to do with its inputs."""


def forward(given: rows.Given) -> Callable[[], rows.Output] | None:
    """A call; None where it is not installed, or does not compute the row."""
    gate_fn, v = given.get("gate_fn", "log"), given["v"]
    if not given["delta"] or "g" not in given or given["g"].dim() != 4 or gate_fn == "softplus":
        return None
    try:
        host = importlib.import_module("cudnn.linear_attention.hopper.cuda_host")
    except ImportError:
        return None
    _, length, heads, width = v.shape
    q, k = given["q"], given["k"]
    g, beta = given["g"].float(), given["beta"].float()
    bounds = torch.tensor([0, length], dtype=torch.int32, device=v.device)
    before, after = (torch.zeros(1, heads, width, width, device=v.device) for _ in range(2))
    o = torch.empty_like(v)
    flags = (NORM if given["qk_l2norm"] else 0) | (SIGMOID_GATE if gate_fn == "sigmoid" else 0)
    parameters = {"a_log": given["A_log"], "dt_bias": given["dt_bias"]} if rows.parametric(given) else {}
    tensors = (q, k, v, g, beta, bounds, before, o, after)

    def run() -> rows.Output:
        stream = torch.cuda.current_stream().cuda_stream
        pointers = (x.data_ptr() for x in tensors)
        others = {name: x.data_ptr() for name, x in parameters.items()}
        host.launch(v.device.index or 0, stream, *pointers, length, 1, heads, flags=flags, **others)
        return o, after.mT

    return run


def backward(given: rows.Given, of_o: Tensor) -> tuple[Callable[[], object], dict[str, Tensor], int]:
    """A call, the gradients that it writes, by name, and the bytes of its workspace."""
    host = importlib.import_module("cudnn.linear_attention.hopper.cuda_bwd_host")
    q, k, v, g, beta = (given[name].detach() for name in rows.TOKENS)
    beta = beta.float()
    _, length, heads, width = v.shape
    bounds = torch.tensor([0, length], dtype=torch.int32, device=v.device)
    before, after, of_before = (torch.zeros(1, heads, width, width, device=v.device) for _ in range(3))
    found: dict[str, Tensor] = dict(zip(rows.TOKENS, map(torch.empty_like, (q, k, v, g, beta)), strict=True))
    size = host.workspace_bytes(length, heads, 1)
    space = torch.empty(size, dtype=torch.uint8, device=v.device)
    tensors = (space, of_o, q, k, v, g, beta, bounds, before, after, *found.values(), of_before)

    def run() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        host.launch(v.device.index or 0, stream, *(x.data_ptr() for x in tensors), length, heads, 1)

    return run, found, size
