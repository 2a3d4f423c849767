"""Experts of a mixture that loop over those which were hit: one call in the graph, which runs the module as it is.

``for expert in torch.greater(mask.sum(..), 0).nonzero()`` has as many turns as the data say. torch.compile cuts the
graph there, in every layer and all the way up, so that a model is some ten graphs. In inference such a module is called
by an operator instead, in eager mode as it would run between the cuts. Its result measures what ``zeros_like`` of an
argument does, which is read in its code (``loop``): the one tensor that every turn of the loop writes, in place.

A graph in which nothing is rewritten is captured again as ever.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kdacompile.capture import replacement
from kdacompile.capture.errors import Unliftable
from kdacompile.capture.identity import is_trusted
from kdacompile.capture.loop import Loop, read
from kdacompile.compat.dynamo import CallSite
from kdacompile.report.source import LIFT

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ACTIVATIONS = "transformers.activations"
_RANDOM = ("Dropout", "RReLU")
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Module:
    """A module as its ``forward`` sees it: tensors, which the graph has, and the rest of what it reads of itself."""

    forward: types.FunctionType
    plain: dict[str, Any]
    activations: dict[str, nn.Module]
    tensors: tuple[str, ...]

    @functools.cached_property
    def number(self) -> int:
        """What it is, in every process: a graph that is kept on disk finds it by that."""
        code = self.forward.__code__
        parts = [(name, _kind(each), _settings(each)) for name, each in sorted(self.activations.items())]
        text = repr((_kind(self.forward), code.co_code, code.co_consts, code.co_names, code.co_varnames))
        text += repr((sorted(self.plain.items()), parts, self.tensors))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


_known: dict[int, _Module] = {}


def replaced(module: nn.Module, site: CallSite, variables: list[Any]) -> types.FunctionType | None:
    """What to call in place of ``module``, with the variables that go to the list; None if it is no such loop."""
    forward: Any = type(module).forward
    loop = read(forward)
    if loop is None or torch.is_grad_enabled() or site.is_left_as_ever(forward):
        return None
    try:
        given = _given(loop, site)
        _check(loop, given, site)
        seen = _seen(module, loop, site)
    except Unliftable:
        return None
    site.widen_region(forward, holds=True)
    site.guard_module(forward, seen.plain, {name: _settings(each) for name, each in seen.activations.items()})
    held = site.held(seen.tensors)
    variables += [*given, *held]
    _known[seen.number] = seen
    return _call(seen.number, len(given), len(held), loop.like)


def _given(loop: Loop, site: CallSite) -> list[Any]:
    if len(site.args) + len(site.kwargs) != len(loop.arguments) or not site.kwargs.keys() <= set(loop.arguments):
        raise Unliftable("it is not called with its arguments")
    return [*site.args, *(site.kwargs[name] for name in loop.arguments[len(site.args) :])]


def _check(loop: Loop, given: Sequence[Any], site: CallSite) -> None:
    """Raises ``Unliftable`` where eager mode in the middle of a graph may not be what it is between two."""
    examples = [site.example(each) for each in given]
    if any(example is None or type(example).__name__ != "FakeTensor" for example in examples):
        raise Unliftable("it is given more than tensors")
    like = examples[loop.like]
    if like is None or not like.is_contiguous():
        raise Unliftable("its result may lie otherwise in memory")
    if site.under_transform() or site.in_own_function() or torch.is_autocast_enabled(like.device.type):
        raise Unliftable("it is called under a mode or a transform")


def _seen(module: nn.Module, loop: Loop, site: CallSite) -> _Module:
    """Raises ``Unliftable`` for a module that reads more of itself than tensors, plain values and activations."""
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    used = tuple(sorted(loop.read & tensors.keys()))
    plain = {name: vars(module).get(name, module) for name in sorted(loop.read - tensors.keys())}
    activations = {name: each for name, each in module.named_children() if name in loop.called}
    hooked = any(vars(module).get(name) for name in _HOOKS) or "forward" in vars(module)
    if hooked or site.is_changed(module) or loop.called != activations.keys():
        raise Unliftable("it has hooks, changes or functions of its own")
    if any(type(value) not in _PLAIN for value in plain.values()) or not all(map(_is_activation, activations.values())):
        raise Unliftable("it holds more than plain values and activations")
    if any(type(tensors[name]) not in (Tensor, nn.Parameter) for name in used):
        raise Unliftable("a parameter of it is a subclass")
    return _Module(type(module).forward, plain, activations, used)  # type: ignore[arg-type]


def _is_activation(module: nn.Module) -> bool:
    """A function of one tensor, which it does not write, and nothing else."""
    where = type(module).__module__
    bare = not any(True for _ in itertools.chain(module.parameters(), module.buffers(), module.children()))
    plain = not getattr(module, "inplace", False) and not any(each in type(module).__name__ for each in _RANDOM)
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    known = (is_trusted(where) or where == _ACTIVATIONS) and all(type(value) in _PLAIN for value in own.values())
    return bare and plain and known and not any(vars(module).get(name) for name in _HOOKS)


def _settings(module: nn.Module) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return dict(sorted(own.items()))


def _kind(value: Any) -> str:
    kind = value if isinstance(value, types.FunctionType) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _call(number: int, given: int, held: int, like: int) -> types.FunctionType:
    names = [f"x{place}" for place in range(given + held)]
    operands = f"{number}, [{', '.join(names[:given])}], [{', '.join(names[given:])}], {like}"
    text = f"def run({', '.join(names)}):\n    return torch.ops.kdacompile_whole.module({operands})\n"
    scope = dict(vars(replacement))
    exec(compile(text, f"{LIFT} experts>", "exec"), scope)
    return scope["run"]


# -- the operator -----------------------------------------------------------------------------------------------------

_library = torch.library.Library("kdacompile_whole", "DEF")
_library.define(
    "module(int number, Tensor[] given, Tensor[] held, int like) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe),
)


@torch.compiler.disable
def _run(number: int, given: list[Tensor], held: list[Tensor], like: int) -> Tensor:
    seen = _known[number]
    itself = types.SimpleNamespace(**seen.plain, **seen.activations, **dict(zip(seen.tensors, held, strict=True)))
    return seen.forward(itself, *given).contiguous()


def _fake(number: int, given: list[Tensor], held: list[Tensor], like: int) -> Tensor:
    return torch.empty_like(given[like])


_library.impl("module", _run, "CompositeExplicitAutograd")
torch.library.register_fake("kdacompile_whole::module", _fake, lib=_library)
