"""KDA's backward of NVIDIA's cudnn-frontend, where it is installed: log gates in fp32, norms outside, K = V = 128."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from kdacompile.bench import rows


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
