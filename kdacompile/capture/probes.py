"""Random arguments for a function, by the roles its tensors were found to play."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from kdacompile import compat
from kdacompile.capture.calls import Call, Sizes

_OPERANDS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def roles(graph: fx.Graph) -> dict[int, str]:
    """Tensor argument (by position) -> what it must look like: a role, or how a gate or beta is given ("g:log")."""
    inputs = {node: index for index, node in enumerate(node for node in graph.nodes if node.op == "placeholder")}
    found: dict[int, str] = {}
    for call in graph.nodes:
        if not compat.is_own_op(call):
            continue
        for role, operand in zip(_OPERANDS, call.args, strict=False):
            node = operand
            while isinstance(node, fx.Node) and node not in inputs and node.all_input_nodes:
                node = node.all_input_nodes[0]
            if isinstance(node, fx.Node) and node in inputs:
                form = {"g": call.kwargs["gate_fn"], "beta": "logit" if call.kwargs["sigmoid_beta"] else "factor"}
                found.setdefault(inputs[node], f"{role}:{form[role]}" if role in form else role)
    return found


def make(call: Call, found: dict[int, str], sizes: Sizes, seed: int) -> list[Tensor]:
    """Tensors of the call's shapes: keys of about unit length, gates and write gates of order 1 / T. Nothing is
    forgotten with those, so that a window shows at every length that is longer than it.
    """
    generator = torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    for index, (_, tensor) in enumerate(call.tensors()):
        shape = tensor.shape(sizes)
        if found.get(index) == "cu_seqlens":
            value = torch.linspace(0, sizes["T"], shape[0])
        elif tensor.dtype.is_floating_point:
            value = _draw(found.get(index, ""), shape, generator, sizes["T"])
        else:  # a mask, or numbers that are indices wherever there are two tokens
            value = torch.randint(0, 2, shape, generator=generator)
        given = torch.empty_strided(shape, tensor.strides(sizes), dtype=tensor.dtype, device=tensor.device)
        made.append(given.copy_(value))
    return made


def _draw(role: str, shape: Sequence[int], generator: torch.Generator, length: int) -> Tensor:
    if role in ("g:factor", "g:log", "beta:factor"):
        share = (0.1 + torch.rand(shape, generator=generator)) / (1 + length)
        return {"g:factor": 1 - share, "g:log": -share, "beta:factor": share}[role]
    normal = torch.randn(shape, generator=generator)
    shut = {"g:softplus": -1.0, "g:sigmoid": -1.0, "g:logsigmoid": 1.0, "beta:logit": -1.0}.get(role, 0.0)
    return normal * shape[-1] ** -0.5 if role in ("q", "k") else 0.5 * normal + shut * math.log(1 + length)
