"""Two limits of capture that torch sets for a whole process, lifted for the one region that is being captured.

They are kept by the environment of the region's symbols, which lives as long as the capture: no other region, no other
backend and no other thread sees the change. That environment gets another class while Dynamo works with it: it is made
by Dynamo, from the process's configuration, before anything of ours is asked.

What this is worth, and when it goes: ``capture/open_lengths.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Generator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import sympy
from torch._guards import CompileContext
from torch.utils._sympy.functions import FloorDiv, Max

from kdacompile.compat import sizes

_left_as_ever: WeakKeyDictionary[types.CodeType, WeakSet[Any]] = WeakKeyDictionary()
"""Regions in which the limits turned out to be better kept: the code of their outermost frame, which models may share,
and the functions for whose sake they had been lifted.
"""

_thread = threading.local()
"""``told_apart``: the compilation that this thread captures again with counts told apart."""


def widen(tx: Any, cause: object, *, holds: bool = False) -> None:
    """From here on the region is captured through operators whose result's size depends on data, as
    ``torch._dynamo.config.capture_dynamic_output_shape_ops`` does for a process: Dynamo would cut the graph there. And
    counts of chunks or pools (divisions of sizes, rounded) are not told apart by whether they are one, wherever torch
    only asks in order to choose strides or a faster way, as it does not for sizes that depend on data.

    ``tx``: the frame that Dynamo is at. ``cause``: the function it is done for. ``holds``: an operator stands in its
    place, at which Dynamo would have cut the graph.
    """
    output = tx.output
    env: Any = output.shape_env
    if is_left_as_ever(tx, cause):
        return
    _be_careful(tx)
    if isinstance(env, _wide()):
        env.causes.add(cause)
        env.holds |= holds
        return
    capturing = env.settings.allow_dynamic_output_shape_ops
    env.settings = dataclasses.replace(env.settings, allow_dynamic_output_shape_ops=True)
    env.__class__ = _wide()
    env.causes, env.holds = {cause}, holds
    env.captured_further, env.counts_left_open = not capturing, False
    env.tells_counts = getattr(_thread, "told_apart", None) == CompileContext.current_compile_id()


def is_left_as_ever(tx: Any, cause: object) -> bool:
    return cause in _left_as_ever.get(tx.output.root_tx.f_code, ())


@contextlib.contextmanager
def careful() -> Generator[None]:
    """Where capture fails in here that would not with the limits, the region is captured again with them: what is left
    open may be too little for an operator to tell that two sizes agree.
    """
    try:
        yield
    except _failures() as error:
        if not is_used():
            raise
        raise capture_as_ever() from error


def _be_careful(tx: Any) -> None:
    """``careful`` in every instruction to come, of this frame and of those that called it."""
    while tx is not None and "step" not in vars(tx):
        tx.step = careful()(tx.step)  # Dynamo looks it up for each instruction
        tx = getattr(tx, "parent", None)


def is_used() -> bool:
    """True if the region this thread captures is what it is because of ``widen``."""
    env = _own()
    if env is None:
        return False
    return env.holds or env.counts_left_open or (env.captured_further and env.unbacked_symint_counter > 0)


def leaves_counts_open() -> bool:
    """True if the region this thread captures was not told apart by a count of chunks that may be one."""
    env = _own()
    return env is not None and env.counts_left_open


def _own() -> Any:
    """The environment of this thread's region, if it is a widened one."""
    frame = sizes.frame()
    env: Any = None if frame is None else frame.output.shape_env
    return env if isinstance(env, _wide()) else None


def refusals() -> tuple[type[Exception], ...]:
    """What compilers raise for a graph they cannot take."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return BackendCompilerFailed, GuardOnDataDependentSymNode


def with_its_backward() -> contextlib.AbstractContextManager[Any]:
    """What differentiates a widened region is compiled at once: of open sizes torch leaves errors to the first backward
    pass, when it is too late to capture the region again.
    """
    import torch._functorch.config as aot

    return aot.patch(force_non_lazy_backward_lowering=True) if is_used() else contextlib.nullcontext()


def _failures() -> tuple[type[Exception], ...]:
    """What Dynamo raises for code that it takes for wrong; where it merely cuts the graph it raises something else."""
    from torch._dynamo.exc import TorchRuntimeError, UserError
    from torch.fx.experimental.symbolic_shapes import PendingUnbackedSymbolNotFound

    return TorchRuntimeError, UserError, PendingUnbackedSymbolNotFound, *refusals()


def tell_counts() -> Exception:
    """What to raise for the region this thread captures to be captured as far, but with counts of chunks told apart."""
    _thread.told_apart = CompileContext.current_compile_id()
    return sizes.capture_again("kdacompile: a count that may be one is guarded")


def capture_as_ever() -> Exception:
    """What to raise for the region this thread captures to be captured again with the limits."""
    frame = sizes.frame()
    assert frame is not None
    _left_as_ever.setdefault(frame.output.root_tx.f_code, WeakSet()).update(frame.output.shape_env.causes)
    return sizes.capture_again("kdacompile: nothing is gained by capturing more than torch.compile does")


@functools.cache
def _wide() -> Any:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # slow to import

    class Wide(ShapeEnv):
        """Symbols of a region; questions that have a fallback are those whose answer changes no result."""

        causes: set[object]
        holds: bool
        counts_left_open: bool
        captured_further: bool
        tells_counts: bool

        def evaluate_expr(
            self,
            orig_expr: Any,
            hint: Any = None,
            fx_node: Any = None,
            size_oblivious: bool = False,
            fallback_value: bool | None = None,
            **more: Any,
        ) -> Any:
            known = _of_a_maximum(orig_expr)
            if known is not None:
                return known
            if fallback_value is not None and self._is_open_count(orig_expr):
                self.counts_left_open = True
                return fallback_value
            return super().evaluate_expr(orig_expr, hint, fx_node, size_oblivious, fallback_value, **more)

        def _is_open_count(self, expr: Any) -> bool:
            """True for a question about a rounded quotient that what is known does not answer."""
            known = self.tells_counts or not isinstance(expr, sympy.Basic) or not expr.has(FloorDiv)
            return not known and self._maybe_evaluate_static(expr) is None

    return Wide


def _of_a_maximum(expr: Any) -> Any:
    """True or false where a maximum is compared with one of what it is the largest of; None for any other question.
    Inductor asks whether a stride, which is ``Max(1, u0)``, is at least a size.
    """
    if isinstance(expr, (sympy.GreaterThan, sympy.StrictLessThan)):
        largest, one, answer = expr.lhs, expr.rhs, isinstance(expr, sympy.GreaterThan)
    elif isinstance(expr, (sympy.LessThan, sympy.StrictGreaterThan)):
        largest, one, answer = expr.rhs, expr.lhs, isinstance(expr, sympy.LessThan)
    else:
        return None
    return sympy.sympify(answer) if isinstance(largest, (Max, sympy.Max)) and one in largest.args else None
