"""Tensors that inputs of a region are slices of, as a cache that was cut back is a slice of the whole one.

Torch tracks both and guards the symbols of both, so that a graph captured over a slice is for slices alone.
"""

from __future__ import annotations

from typing import Any

import torch

from kdacompile.compat import sizes


def forget() -> None:
    """Have nothing guarded about them where nothing depends on what they measure: their symbols stand in no guard, no
    replacement, no assertion and no other size. To be called when this thread's graph has been compiled.
    """
    captured = sizes.frame()
    if captured is None:
        return
    tracked: list[Any] = captured.output.tracked_fakes
    read = sizes.inputs()
    bases = {id(each): each for each in tracked if _is_base(each) and _name(each) not in read}
    if not bases:
        return
    needed = _needed(captured.output.shape_env)
    for each in tracked:
        needed |= set[Any]() if id(each) in bases else _symbols(each.fake)
    idle = {place for place, each in bases.items() if needed.isdisjoint(_symbols(each.fake)) and not _demanded(each)}
    tracked[:] = [each for each in tracked if id(each) not in idle]


def _is_base(tracked: Any) -> bool:
    return isinstance(tracked.fake, torch.Tensor) and _name(tracked).endswith("._base")


def _name(tracked: Any) -> str:
    name: Any = tracked.source.name
    return str(name() if callable(name) else name)


def _symbols(value: Any) -> set[Any]:
    """Symbols of a number or of all that a tensor measures, be they replaced or not."""
    measures: tuple[Any, ...] = (value,)
    if isinstance(value, torch.Tensor):
        measures = (*value.shape, *value.stride(), value.storage_offset())
    nodes: list[Any] = [each.node for each in measures if isinstance(each, (torch.SymInt, torch.SymFloat))]
    return {symbol for node in nodes for expr in (node.expr, node._expr) for symbol in expr.free_symbols}


def _needed(env: Any) -> set[Any]:
    """Symbols of which more is known or asserted than a range of their own."""
    exprs: list[Any] = [guard.expr for guard in env.guards]
    exprs += [*env.replacements, *env.replacements.values(), *env.divisible]
    exprs += [each.expr for asserted in env.deferred_runtime_asserts.values() for each in asserted]
    return {symbol for expr in exprs for symbol in expr.free_symbols}


def _demanded(tracked: Any) -> bool:
    """True if the caller has said that sizes of it stay open."""
    constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
    return any(each is not None and not each.warn_only for each in constraints)
