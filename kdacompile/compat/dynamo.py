"""Dynamo's internals: calls it is about to inline, which ``capture`` may replace.

``call_function`` of two kinds of variables is wrapped, once a process: Dynamo has no hook there.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._C._functorch import peek_interpreter_stack
from torch.utils._device import DeviceContext

from kdacompile.compat import region, sizes
from kdacompile.compat.symbols import times_captured

_latest: weakref.ref[Any] | None = None
"""The region a call was looked at in last."""


class CallSite:
    """A call of a Python function inside a region that Dynamo captures."""

    def __init__(self, variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.variable, self.tx, self.args, self.kwargs = variable, tx, args, kwargs
        self.open_numbers: list[torch.SymInt] = []
        """Those that ``number_now`` has told."""

    def backend(self) -> Generator[tuple[Any, dict[str, Any]]]:
        """The backend the region is captured for, from the outermost wrapper in, with torch.compile's own arguments."""
        backend: Any = self.tx.output.compiler_fn
        given: dict[str, Any] = {}
        while backend is not None:
            given = {**getattr(backend, "kwargs", {}), **given}
            yield backend, given
            inner = ("_torchdynamo_orig_backend", "compiler_fn", "__wrapped__", "func")
            backend = next((getattr(backend, name) for name in inner if hasattr(backend, name)), None)

    def under_transform(self) -> bool:
        """True inside vmap or grad, or where a mode (not a default device) changes what operators do."""
        interpreter: Any = peek_interpreter_stack()
        modes = (mode.realize().value for mode in self.tx.symbolic_torch_function_state.mode_stack)
        changed = any(not isinstance(mode, DeviceContext | None) for mode in modes)
        return interpreter is not None or changed

    def in_own_function(self) -> bool:
        """True inside a torch.autograd.Function. There torch returns every value of the forward beside its results, and
        under 2.11 one that stands in both loses its gradient.
        """
        tracer = self.tx.output.current_tracer
        while tracer is not None and tracer.source_target != "autograd.Function":
            tracer = tracer.parent
        return tracer is not None

    @staticmethod
    def example(variable: Any) -> torch.Tensor | None:
        """The stand-in of a tensor argument; none where a class of its own says what operators do to it."""
        from torch._dynamo.variables import TensorVariable
        from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable

        variable = variable.realize()
        if not isinstance(variable, TensorVariable) or isinstance(variable, TensorWithTFOverrideVariable):
            return None
        return variable.as_proxy().node.meta["example_value"]

    @staticmethod
    def constant(variable: Any) -> tuple[Any, bool]:
        """(value, True) of an argument that is the same on every call of the captured region."""
        variable = variable.realize()
        return (variable.as_python_constant(), True) if variable.is_python_constant() else (None, False)

    def number_now(self, variable: Any) -> int | None:
        """What a whole number is in this call that may be another in the next, and may be guarded; None for anything
        else.
        """
        from torch._dynamo.variables import SymNodeVariable

        number = variable.realize().sym_num if isinstance(variable.realize(), SymNodeVariable) else None
        if not isinstance(number, torch.SymInt) or number.node.hint is None or times_captured(number) is None:
            return None
        self.open_numbers.append(number)
        return number.node.hint

    def begins_region(self) -> bool:
        """True for the first call that is looked at in an attempt to capture a region."""
        global _latest
        news = _latest is None or _latest() is not self.tx.output
        _latest = weakref.ref(self.tx.output)
        return news

    def inputs_of_size(self, size: int) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
        """What the region is called with, and the dimensions of it that have this size, captured as a number."""
        return sizes.of_size(self.tx.output.tracers[0].graph, {size})

    def widen_region(self, cause: object, *, holds: bool = False) -> None:
        """Capture the region past operators whose result's size depends on data (see ``region.widen``)."""
        region.widen(self.tx, cause, holds=holds)

    def is_left_as_ever(self, cause: object) -> bool:
        return region.is_left_as_ever(self.tx, cause)

    def held(self, names: Sequence[str]) -> list[Any]:
        """Dynamo's variables for tensors that the called module holds, asked for as by the module's own code."""
        from torch._dynamo.variables.base import VariableTracker

        build = functools.partial(VariableTracker.build, self.tx)
        return [build(getattr).call_function(self.tx, [self.variable, build(name)], {}) for name in names]

    def guard_module(self, forward: Any, plain: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Recapture once the called module has another ``forward``, other values under these names, or in its parts."""
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource, TypeSource

        source = self.variable.source
        absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr="forward")
        install_guard(source.make_guard(GuardBuilder.TYPE_MATCH), source.make_guard(absent))
        self._build(forward, AttrSource(TypeSource(source), "forward"))
        for name, value in plain.items():
            self._build(value, AttrSource(source, name))
        for name, values in parts.items():
            part = AttrSource(source, name)
            install_guard(part.make_guard(GuardBuilder.TYPE_MATCH))
            for inner, value in values.items():
                self._build(value, AttrSource(part, inner))

    def is_changed(self, module: torch.nn.Module) -> bool:
        """True if Dynamo has put off changes of the called module, or may not guard it."""
        changed = self.tx.output.side_effects.store_attr_mutations
        return self.variable.source is None or any(getattr(each, "value", None) is module for each in changed)

    def guard_global(self, namespace: dict[str, Any], name: str, attributes: Sequence[str]) -> bool:
        """Recapture once a global (or what attributes lead to) is another object; False if Dynamo cannot look at it."""
        from torch._dynamo.source import AttrSource, GlobalSource

        if namespace is self.tx.output.global_scope:
            source: Any = GlobalSource(name)
        else:
            module = sys.modules.get(str(namespace.get("__name__")))
            if module is None or vars(module) is not namespace:
                return False
            source = AttrSource(self.tx.import_source(module.__name__), name)
        value = namespace[name]
        for attribute in attributes:
            value, source = getattr(value, attribute), AttrSource(source, attribute)
        self._build(value, source)
        return True

    def guard_cell(self, fn: types.FunctionType, index: int) -> bool:
        """Recapture once a closure cell of the called function holds another object."""
        from torch._dynamo.source import AttrSource, GetItemSource

        if fn is not self.variable.fn or self.variable.source is None or fn.__closure__ is None:
            return False
        cells = AttrSource(self.variable.source, "__closure__")
        self._build(fn.__closure__[index].cell_contents, AttrSource(GetItemSource(cells, index), "cell_contents"))
        return True

    def guard_defaults(self, fn: types.FunctionType) -> None:
        """Recapture once the called function has other defaults."""
        if fn is self.variable.fn and self.variable.source is not None:
            self._guard_defaults(fn, self.variable.source)

    def _build(self, value: Any, source: Any) -> None:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.variables.builder import VariableBuilder

        if isinstance(value, (bool, int, float, str)):  # numbers would be taken for inputs of the graph
            install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
        else:
            VariableBuilder(self.tx, source)(value).realize()  # a lazy one has no guards
        if isinstance(value, types.FunctionType):
            self._guard_defaults(value, source)

    @staticmethod
    def _guard_defaults(fn: types.FunctionType, source: Any) -> None:
        """A function is guarded by its code; its defaults are a tuple and a dict beside that."""
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import AttrSource, DefaultsSource

        if fn.__defaults__:
            install_guard(AttrSource(source, "__defaults__").make_guard(GuardBuilder.ID_MATCH))
        for name in fn.__kwdefaults__ or {}:
            install_guard(DefaultsSource(source, name, is_kw=True).make_guard(GuardBuilder.ID_MATCH))

    def call(self, fn: types.FunctionType, tensors: Sequence[Any]) -> Any:
        """Inline ``fn`` in place of the function that is called here."""
        from torch._dynamo.variables import UserFunctionVariable

        replacement: Any = UserFunctionVariable(fn)
        return replacement.call_function(self.tx, list(tensors), {})


def on_disabled_call(consult: Callable[[Any, CallSite], Any]) -> None:
    """Have ``consult`` see calls of functions Dynamo may not enter, as ``on_function_call`` does for the others."""
    from torch._dynamo.variables.functions import SkipFunctionVariable

    _before_calls(SkipFunctionVariable, lambda variable: variable.value, consult)


def on_function_call(consult: Callable[[types.FunctionType, CallSite], Any]) -> None:
    """Have ``consult`` see each Python function before Dynamo inlines it; what it returns, unless None, is the result.

    Installed once a process; ``consult`` must look at the call's backend.
    """
    from torch._dynamo.variables import UserFunctionVariable

    def plain_function(variable: Any) -> Any:  # not a method, which is a subclass
        return variable.fn if type(variable) is UserFunctionVariable else None

    _before_calls(UserFunctionVariable, plain_function, consult)


def on_module_call(consult: Callable[[torch.nn.Module, CallSite], Any]) -> None:
    """Have ``consult`` see calls of modules, as ``on_function_call`` does calls of functions."""
    from torch._dynamo.variables import UnspecializedNNModuleVariable

    _before_calls(UnspecializedNNModuleVariable, lambda variable: variable.value, consult)


def _before_calls(kind: Any, function_of: Callable[[Any], Any], consult: Callable[[Any, CallSite], Any]) -> None:
    """Ask ``consult`` before a kind of variable is called, if ``function_of`` finds a function in it."""
    usual = kind.call_function

    @functools.wraps(usual)
    def call_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        fn = function_of(self)
        replaced = None if fn is None else consult(fn, CallSite(self, tx, args, kwargs))
        if replaced is not None:
            return replaced
        with region.careful():
            return usual(self, tx, args, kwargs)

    kind.call_function = call_function
