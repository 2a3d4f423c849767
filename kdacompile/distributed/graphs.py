"""A model's graph under context parallelism: what mixes tokens does so over all ranks (``kda.context_parallel``).

The graph was captured on a rank's tokens and searched as any other. Here the ops in it are given the context, and so
are the short causal convolutions before them; all else in such models is per token. What is seen to mix tokens in
another way raises :class:`.ContextParallelError`: a near miss, a step of decoding, a softmax over tokens, another
convolution. ``scaled_dot_product_attention`` is PyTorch's own business, which inside its ``context_parallel`` computes
with DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.compat.groups import group_of, order_of_region
from kdacompile.compat.local import is_distributed
from kdacompile.distributed import calls
from kdacompile.distributed.attention import parallel_mla
from kdacompile.distributed.convolution import causal_conv1d
from kdacompile.distributed.fragments import ContextParallel, Key
from kdacompile.graph.prefilter import name_of
from kdacompile.ops.errors import ContextParallelError
from kdacompile.ops.kernels import in_layout
from kdacompile.ops.signature import LINEAR_ATTENTION
from kdacompile.report.findings import Rejection
from kdacompile.report.source import source_of
from kdacompile.rewrite.local import mixing


def _context(key: Key) -> ContextParallel:
    group, order, total, method, steps, overlap = key
    return ContextParallel(group_of(group), order, total or None, method, steps, overlap, check=False)


@in_layout
def attend(*operands: Tensor | None, key: Key, **options: Any) -> tuple[Tensor, Tensor]:
    """``kdacompile::linear_attention`` on tokens of all ranks."""
    o, state = calls.linear_attention(operands, options, _context(key), final_state=True)
    assert state is not None
    return o, state


def attend_latents(*operands: Tensor | None, key: Key, **options: Any) -> tuple[Tensor, Tensor]:
    """``kdacompile::mla`` on tokens of all ranks."""
    return parallel_mla(operands, options, _context(key))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *, key: Key) -> Tensor:
    """A causal depthwise convolution ``[B, C, T]`` on tokens of all ranks; weight ``[C, 1, width]``."""
    return causal_conv1d(x.mT, weight.squeeze(1), bias, context_parallel=_context(key)).mT.contiguous()


def spread(gm: fx.GraphModule, key: Key, rejections: Iterable[Rejection]) -> None:
    """Rewrite a graph, searched already, for a rank's tokens; ``rejections`` are what the search left alone."""
    if (order := order_of_region()) not in (None, key[1]):
        problem = f'PyTorch\'s context_parallel has cut tokens in the order "{order}", and kda.context_parallel says'
        raise ContextParallelError(problem=f'{problem} "{key[1]}"')
    # SDPA of DTensors is PyTorch's own: it stands for all ranks' tokens.
    others = any(name_of(node) != "scaled_dot_product_attention" for node in mixing(gm.graph))
    if refused := [str(rejection) for rejection in rejections if rejection.code != "subclass" or others]:
        raise ContextParallelError(problem=f"what is not matched would see a rank's tokens alone: {'; '.join(refused)}")
    changed = False
    for node in list(gm.graph.nodes):
        if node.op in ("call_function", "call_method") and (rewrite := _RULES.get(name_of(node))) is not None:
            changed |= rewrite(node, key)
    if changed:
        gm.graph.lint()
        gm.recompile()


def _refuse(node: fx.Node, what: str) -> ContextParallelError:
    return ContextParallelError(problem=f"{what}, at {source_of(node)}")


def _attention(node: fx.Node, key: Key) -> bool:
    if not compat.is_own_op(node):
        return False
    q = compat.example_value(node.args[0])  # type: ignore[arg-type]
    tokens, total, ranks = q.shape[1], key[2], _context(key).ranks
    # Tokens that a model adds to fill its last chunk change no state; but the two fragments would be cut elsewhere.
    if key[1] == "zigzag" and (not total or tokens * ranks != total):
        problem = f"zigzag needs total_length, and {total} of it on {ranks} ranks are not {tokens} tokens each"
        raise _refuse(node, problem)
    if (bounds := _operand(node, "cu_seqlens")) is not None:
        raise _refuse(node, f"{bounds} packs a rank's tokens; call kdacompile.ops with whole bounds")
    _replace(node, attend, node.args, {**node.kwargs, "key": key})
    return True


def _operand(node: fx.Node, name: str) -> Any:
    place = [operand.name for operand in LINEAR_ATTENTION.operands].index(name)
    return node.kwargs.get(name, node.args[place] if place < len(node.args) else None)


def _latents(node: fx.Node, key: Key) -> bool:
    if not compat.is_own_op(node):
        return False
    _replace(node, attend_latents, node.args, {**node.kwargs, "key": key})
    return True


def _step(node: fx.Node, key: Key) -> bool:
    raise _refuse(node, "a step of decoding has one token, which cannot be cut among ranks")


def _convolution(node: fx.Node, key: Key) -> bool:
    """``conv1d(x, padding=width - 1)[..., :T]`` and ``conv1d(pad(x, (width - 1, 0)))``, depthwise."""
    graph, given = node.graph, _bound(node)
    width = compat.example_value(given["weight"]).shape[2]
    if width == 1:
        return False
    x, pads = given["input"], given["padding"]
    if pads == width - 1:
        ends = list(node.users)
    elif pads == 0 and name_of(x) == "pad" and (x := _padded(x, width)) is not None:
        ends = [node]
    else:
        raise _refuse(node, "a convolution over tokens is not known to be causal")
    value = compat.example_value(x)
    causal = all(end is node or _cuts(end, value.shape[2]) for end in ends)
    plain = given["groups"] == value.shape[1] and given["stride"] == given["dilation"] == 1 and value.dim() == 3
    if not causal or not plain:
        raise _refuse(node, "a convolution over tokens is not known to be causal and depthwise")
    for end in ends:
        _replace(end, convolve, (x, given["weight"], given["bias"]), {"key": key})
    for left in (node, given["input"]):  # nobody reads the convolution, or what was padded
        if left is not x and left not in ends and not left.users:
            graph.erase_node(left)
    return True


def _bound(node: fx.Node) -> dict[str, Any]:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    found: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    found |= dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {name: x[0] if isinstance(x, (list, tuple)) and len(x) == 1 else x for name, x in found.items()}


def _padded(pad: fx.Node, width: int) -> fx.Node | None:
    """What ``pad`` puts ``width - 1`` zeros before."""
    args = (*pad.args, *(pad.kwargs.get(name) for name in ("pad", "mode", "value")[len(pad.args) - 1 :]))
    x, sizes, mode, value = args
    fits = isinstance(sizes, (list, tuple)) and tuple(sizes) == (width - 1, 0)
    return x if isinstance(x, fx.Node) and fits and mode in (None, "constant") and not value else None


def _cuts(end: fx.Node, length: Any) -> bool:
    """Whether a reader takes the first ``length`` tokens of the last dimension, and no others."""
    if name_of(end) != "getitem":
        return False
    index: Any = map_arg(end.args[1], compat.example_value)
    last = index[-1] if isinstance(index, tuple) else None
    whole = isinstance(index, tuple) and all(one is Ellipsis or one == slice(None) for one in index[:-1])
    reaches = whole and (len(index) == 3 or (len(index) == 2 and index[0] is Ellipsis))
    return reaches and isinstance(last, slice) and not last.start and last.step in (None, 1) and last.stop == length


def _stands_for_all(value: Any) -> bool:
    """Whether a tensor ``[.., T, D]`` is a DTensor that is cut along T, as in PyTorch's ``context_parallel``."""
    return is_distributed(value) and any(place.is_shard(value.dim() - 2) for place in value.placements)


def _softmax(node: fx.Node, key: Key) -> bool:
    """Scores of attention have four dimensions; a router's have fewer."""
    value = compat.example_value(node.all_input_nodes[0])
    if isinstance(value, Tensor) and value.dim() >= 4 and not _stands_for_all(value):
        raise _refuse(node, "attention would see a rank's tokens alone")
    return False


def _sdpa(node: fx.Node, key: Key) -> bool:
    if not _stands_for_all(compat.example_value(node.all_input_nodes[0])):
        raise _refuse(
            node, "attention would see a rank's tokens alone; torch.distributed.tensor.experimental.context_parallel"
        )
    return False


def _replace(node: fx.Node, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(function, args, kwargs)
    made.meta.update({name: x for name, x in node.meta.items() if name in ("stack_trace", "nn_module_stack")})
    compat.propagate_fake(made, node)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


_RULES: dict[str, Callable[[fx.Node, Key], bool]] = {
    "linear_attention": _attention,
    "linear_attention_step": _step,
    "linear_attention_step_": _step,
    "mla": _latents,
    "conv1d": _convolution,
    "softmax": _softmax,
    "scaled_dot_product_attention": _sdpa,
}
