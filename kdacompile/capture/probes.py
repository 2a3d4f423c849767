"""Random arguments for a function, by the roles its tensors were found to play."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from kdacompile import compat
from kdacompile.capture.calls import Call, Sizes
from kdacompile.capture.errors import Unliftable
from kdacompile.lowering.gates import GATE_FUNCTIONS, log_decay
from kdacompile.ops.signature import LINEAR_ATTENTION

_OPERANDS = tuple(operand.name for operand in LINEAR_ATTENTION.operands)


def roles(graph: fx.Graph) -> dict[int, str]:
    """Tensor argument (by position) -> what it must look like: a role, or how a gate or beta is given ("g:log")."""
    inputs = {node: index for index, node in enumerate(_inputs(graph))}
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


def weakened(graph: fx.Graph, found: dict[int, str], length: int) -> dict[int, str]:
    """The same, with gates and write gates of order 1 / T where the function makes them of its arguments by activations
    that the op does not take over: those arguments are drawn so that what reaches the op comes nearest to that. Masks
    that may close a gate close next to none.
    """
    for call in graph.nodes:
        given = _operands(call) if compat.is_own_op(call) else {}
        above = {role: _Above(graph, operand, length) for role, operand in given.items()}
        found = _nowhere_closed(call, above, found)
        for role in _MEASURES.keys() & given.keys():
            found = _nearest(above[role], found, functools.partial(_MEASURES[role], call))
    return found


def _operands(call: fx.Node) -> dict[str, fx.Node]:
    return {role: node for role, node in zip(_OPERANDS, call.args, strict=False) if isinstance(node, fx.Node)}


class _Above:
    """What stands between the arguments of a function and an operand of the op, at one length."""

    def __init__(self, graph: fx.Graph, operand: fx.Node, length: int) -> None:
        self.length, copied = length, dict[fx.Node, fx.Node]()
        alone = fx.Graph()
        alone.graph_copy(graph, copied)
        alone.output(copied[operand])
        alone.eliminate_dead_code()
        self.arguments = [(compat.example_value(node), bool(copied[node].users)) for node in _inputs(graph)]
        self.run = fx.Interpreter(fx.GraphModule(graph.owning_module or {}, alone)).run

    def read(self, *, masks: bool = False) -> list[int]:
        """The arguments that the operand follows from: numbers, or masks and indices."""
        arguments = enumerate(self.arguments)
        return [index for index, (like, is_read) in arguments if is_read and like.is_floating_point() != masks]

    def __call__(self, roles: Mapping[int, str]) -> Tensor:
        generator, drawn = torch.Generator().manual_seed(0), list[Tensor | None]()
        for index, (like, is_read) in enumerate(self.arguments):
            shape = list(map(int, like.shape))
            role = roles.get(index, "")
            draw = _alike(role, shape) if role in _MASKS else _draw(role, shape, generator, self.length)
            data = draw if is_read else None
            drawn.append(None if data is None else data.to(like.dtype).to(like.device))
        return self.run(*drawn).double()


def _inputs(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _nearest(above: _Above, found: dict[int, str], measure: Callable[[Tensor], Tensor]) -> dict[int, str]:
    """Of ways to draw the arguments, the one with which the operand's size is nearest to 1 / T."""
    free = [i for i in above.read() if found.get(i, "").partition(":")[0] not in ("q", "k", "v")]
    best, least = found, math.inf
    with torch.no_grad(), contextlib.suppress(RuntimeError, TypeError, ValueError, KeyError):
        for forms in itertools.product(("", *_FORMS), repeat=len(free)) if len(free) <= 3 else ():
            roles = found | {index: form for index, form in zip(free, forms, strict=True) if form}
            size = float(measure(above(roles)).abs().mean()) * above.length
            much = math.log(max(size, 1e-30)) if math.isfinite(size) else math.inf
            far = max(4 * much, -much)  # rather too weak than too strong
            best, least = (roles, far) if far < least else (best, least)
            if least < 2.0:
                break
    return best


def _nowhere_closed(call: fx.Node, above: Mapping[str, _Above], found: dict[int, str]) -> dict[int, str]:
    """Masks drawn so that the most gates are open, and the most is written and read. Raises ``Unliftable`` if no way is
    found that leaves most of each.
    """
    read = {role: masks for role, each in above.items() if (masks := each.read(masks=True))}
    masks = sorted({mask for each in read.values() for mask in each})
    best, most = found, 0.0
    with torch.no_grad(), contextlib.suppress(RuntimeError, TypeError, ValueError, KeyError):
        for forms in itertools.product(_MASKS, repeat=len(masks)) if 0 < len(masks) <= 3 else ():
            roles = found | dict(zip(masks, forms, strict=True))
            least = min(_share_left(call, role, above[role](roles)) for role in read)
            best, most = (roles, least) if least > most else (best, most)
    if masks and most < 0.5:
        raise Unliftable("what it takes for masks leaves nothing of the state")
    return best


def _share_left(call: fx.Node, role: str, operand: Tensor) -> float:
    """How much of a gate is open, or of another operand is not zero."""
    measured = _MEASURES[role](call, operand) if role in _MEASURES else operand
    return float((measured > -math.inf if role == "g" else measured != 0).double().mean())


def _log_gate(call: fx.Node, g: Tensor) -> Tensor:
    return log_decay(g, 1.0, str(call.kwargs["gate_fn"]), float(call.kwargs["gate_scale"]))  # type: ignore[arg-type]


_MEASURES: dict[str, Callable[[fx.Node, Tensor], Tensor]] = {
    "g": _log_gate,
    "beta": lambda call, x: x.sigmoid() if call.kwargs["sigmoid_beta"] else x,
}

_FORMS = {"below": -1.0, "above": 1.0, "faint": 0.0}
"""Ways to draw what an activation reads: by how many log(1 + T) they are off; "faint" are numbers of order 1 / T."""


_MASKS = {"set nowhere": 0, "set everywhere": 1}
"""Ways to draw masks and indices: one number, and next to nowhere the other."""


def _alike(role: str, shape: Sequence[int]) -> Tensor:
    return torch.full(tuple(shape), _MASKS[role])


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
        elif found.get(index) in _MASKS:
            value = _alike(found[index], shape)
            value.view(-1)[:1] = 1 - value.view(-1)[:1]
            if len(shape) > 1 and shape[0] > 1:
                value[1:] = value[1:].logical_xor(torch.rand(shape[1:], generator=generator) * sizes["T"] < 1)
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
    if role in _FORMS:
        return normal / (1 + length) if role == "faint" else 0.5 * normal + _FORMS[role] * math.log(1 + length)
    return normal * shape[-1] ** -0.5 if role in ("q", "k") else 0.5 * normal + _shut(role) * math.log(1 + length)


def _shut(role: str) -> float:
    """On which side of zero a gate's logit forgets next to nothing, and a write gate's is closed: 1 above, -1 below."""
    operand, _, form = role.partition(":")
    function = GATE_FUNCTIONS.get(form)
    if operand != "g" or function is None:
        return -1.0 if role == "beta:logit" else 0.0
    forgotten = log_decay(torch.tensor([-30.0, 30.0]), 1.0, form, -1.0 if function.scale == "lower bound" else 1.0)
    return -1.0 if forgotten[0] > forgotten[1] else 1.0
